"""`edgellm catalog`: models that make good pairs, with their short names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli.options.models import AsJson
from edgellm.cli.views.console import emit, out, say, size, table
from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.storage.catalog import CatalogModel
    from edgellm.storage.pair_choice import ModelRoom


def catalog(
    family: Annotated[
        str | None, typer.Argument(metavar="[FAMILY]", help="List this family only, such as qwen3.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    from edgellm.storage import catalog as read_catalog
    from edgellm.storage import list_models
    from edgellm.storage.pair_choice import ModelRoom

    known = read_catalog()
    models = list(known.models.values())
    if family is not None:
        names = known.sizes(family)
        families = dict.fromkeys(model.name.partition(":")[0] for model in models)
        if not names:
            raise InvalidOption(f"The catalogue has no family {family!r}.", f"It has {', '.join(families)}.")
        models = [known.models[name] for name in names]
    here = {model.name for model in list_models()}
    room = ModelRoom.look()
    if as_json:
        emit(json.dumps([_row(model, here, room) for model in models], indent=2))
        return
    rows = table("NAME", "SIZE", "CONTEXT", "DRAFT MODEL", "HERE", "FITS", right=("SIZE", "CONTEXT"))
    for model in models:
        place = room.place(model.size)
        fits = f"on {place.on}" if place is not None else "no"
        rows.add_row(
            model.name, size(model.size), f"{model.context:,}", model.draft or "-",
            "yes" if model.name in here else "-", fits,
        )  # fmt: skip
    out().print(rows)
    say("Download one with: edgellm pull NAME; another quantisation with NAME-q8_0. Sizes are from lists.", style="dim")


def _row(model: CatalogModel, here: set[str], room: ModelRoom) -> dict[str, Any]:
    place = room.place(model.size)
    return {
        "name": model.name, "title": model.title, "repository": model.repo_id, "quantisation": model.quant,
        "size": model.size, "parameters": model.parameters, "active_parameters": model.active,
        "context": model.context, "draft": model.draft, "template": model.template, "license": model.license,
        "here": model.name in here, "fits": place is not None, "runs_on": None if place is None else place.on,
    }  # fmt: skip
