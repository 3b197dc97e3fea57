"""Reading of a file of devices, for `mesh plan --devices`."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from edgellm.coldstart import costs
from edgellm.coldstart.costs import Device, Link, ModelCosts, TransformerShape
from edgellm.coldstart.problem import Fleet
from edgellm.errors import InvalidOption, StateDamaged
from edgellm.state import read_toml

PRESETS = ("csgo",)
MAX_DEVICES = 20
_MOST = 1e15  # limit of numbers, so that nothing computed from it overflows
_ADVICE = "Correct it; edgellm mesh plan --help-all has an example."

Name = Annotated[str, StringConstraints(strip_whitespace=True, max_length=64, pattern=r"^[^\p{C}\p{Zl}\p{Zp}]+$")]
Positive = Annotated[float, Field(gt=0.0, le=_MOST)]
NotNegative = Annotated[float, Field(ge=0.0, le=_MOST)]
Count = Annotated[int, Field(gt=0, le=_MOST)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DeviceTable(_Table):
    name: Name
    tflops: Positive
    util_a: Annotated[Positive, Field(le=1.0)]
    util_b: Positive
    disk_mb_s: Positive
    memory_gb: Positive
    uplink_mbps: Positive
    downlink_mbps: Positive
    latency_ms: NotNegative = 0.0
    memory_gb_s: NotNegative = 0.0

    def device(self) -> Device:
        return Device(
            self.name, 1e12 * self.tflops, self.util_a, self.util_b, 1e6 * self.disk_mb_s, 1e9 * self.memory_gb,
            1e6 * self.uplink_mbps, 1e6 * self.downlink_mbps, 1e-3 * self.latency_ms, 1e9 * self.memory_gb_s,
        )  # fmt: skip


class LinkTable(_Table):
    sender: Name = Field(alias="from")
    receiver: Name = Field(alias="to")
    mbps: Positive
    latency_ms: NotNegative = 0.0


class ModelTable(_Table):
    name: str = "the model in the file"
    layers: Annotated[Count, Field(le=512)]
    d_model: Count
    heads: Count
    kv_heads: Count
    d_head: Count
    d_ff: Count
    bytes_per_weight: Positive = 2.0

    def costs(self) -> ModelCosts:
        return ModelCosts.of(TransformerShape(**self.model_dump(exclude={"name"})), self.name)


class _File(_Table):
    device: list[DeviceTable] = Field(min_length=1, max_length=MAX_DEVICES)
    link: list[LinkTable] = []
    model: ModelTable | None = None


def preset(name: str) -> Fleet:
    """Return a fleet that is known by name: `csgo` is the paper's, with its model. Raise InvalidOption for another
    name."""
    if name not in PRESETS:
        raise InvalidOption(f"There is no preset named {name!r}.", f"Choose from {', '.join(PRESETS)}.")
    return Fleet(costs.devices(), {}, costs.model())


def read_fleet(path: Path) -> Fleet:
    """Read a file of devices. Raise InvalidOption where it cannot be read, is not TOML, or has an invalid key or value;
    the error says which, and what is expected."""
    try:
        if (found := read_toml(path.expanduser())) is None:
            raise InvalidOption(f"There is no file {path}.", "Check the path given to --devices.")
        file = _File.model_validate(found)
    except StateDamaged as error:
        raise InvalidOption(error.what, _ADVICE) from None
    except ValidationError as error:
        first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
        place = " ".join(str(part + 1 if isinstance(part, int) else part) for part in first["loc"])
        shown = "" if isinstance(first["input"], (dict, list)) else f" is {first['input']!r:.40}"
        raise InvalidOption(f"In {path}, {place}{shown}: {first['msg']}.", _ADVICE) from None
    names = [one.name for one in file.device]
    wrong = [f"two devices are named {name!r}" for name in names if names.count(name) > 1]
    wrong += [
        f"no device is named {one!r}" for two in file.link for one in (two.sender, two.receiver) if one not in names
    ]
    if wrong:
        raise InvalidOption(f"In {path}, {wrong[0]}.", _ADVICE)
    links = {(one.sender, one.receiver): Link(1e6 * one.mbps, 1e-3 * one.latency_ms) for one in file.link}
    model = None if file.model is None else file.model.costs()
    return Fleet(tuple(one.device() for one in file.device), links, model)
