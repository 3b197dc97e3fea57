"""A mesh plan for the page to draw."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edgellm.errors import InvalidOption

_MOST_BYTES = 2**20


class StageOut(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    device: str = Field(max_length=200)
    first_layer: int
    last_layer: int
    load_s: float
    wait_s: float
    network_s: float
    compute_s: float
    finish_s: float


class PlanOut(BaseModel):
    """The part of a plan that the page draws."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    ttft_s: float
    advice: str = Field(max_length=2000)
    stages: list[StageOut] = Field(min_length=1, max_length=256)


def read_plan(path: Path) -> PlanOut:
    """Read a plan as `edgellm mesh plan --json` prints it.

    Raises:
        InvalidOption: the file cannot be read, or is something else.
    """
    try:
        with path.open("rb") as file:
            return PlanOut.model_validate(json.loads(file.read(_MOST_BYTES)))
    except OSError as error:
        raise InvalidOption(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    except (ValueError, RecursionError) as error:
        what = error.errors()[0]["loc"] if isinstance(error, ValidationError) else error
        raise InvalidOption(
            f"{path} holds no plan ({what}).", f"Make one: edgellm mesh plan ... --json > {path.name}"
        ) from None
