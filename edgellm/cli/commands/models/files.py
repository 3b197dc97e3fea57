"""`edgellm catalog`, `pull`, `ls`, `show` and `rm`: find, download, list, show and remove models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from edgellm.cli.options.models import AsJson, catalog_names, model_names
from edgellm.cli.views.console import emit, facts, harmless, make_sure, one_line, out, say, size, table
from edgellm.cli.views.progress import download
from edgellm.errors import EdgeError, InvalidOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edgellm.engine import ModelFile
    from edgellm.storage.catalog import CatalogModel
    from edgellm.storage.pair_choice import ModelRoom


Name = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Name from `edgellm ls` or `edgellm catalog`, user/repo[:quant], or path.",
                   autocompletion=model_names),
]  # fmt: skip


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
        emit(json.dumps([_catalog_row(model, here, room) for model in models], indent=2))
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


def _catalog_row(model: CatalogModel, here: set[str], room: ModelRoom) -> dict[str, Any]:
    place = room.place(model.size)
    return {
        "name": model.name, "title": model.title, "repository": model.repo_id, "quantisation": model.quant,
        "size": model.size, "parameters": model.parameters, "active_parameters": model.active,
        "context": model.context, "draft": model.draft, "template": model.template, "license": model.license,
        "here": model.name in here, "fits": place is not None, "runs_on": None if place is None else place.on,
    }  # fmt: skip


def pull(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME|USER/REPO[@REVISION][:QUANT]", autocompletion=catalog_names,
                       help="Name from `edgellm catalog`, or a model on the Hugging Face hub.")
    ],
    as_json: AsJson = False,
) -> None:  # fmt: skip
    from edgellm import storage

    plan = storage.plan(name)
    if plan.renamed:
        say(f"{storage.hub_name(name).repo_id} is called {plan.renamed} now.")
    if plan.warning:
        say(f"{plan.warning}.")
    parts = f" in {len(plan.files)} files" if len(plan.files) > 1 else ""
    if plan.path is not None:
        say(f"{one_line(plan.file)} is already on this machine ({size(plan.size)}{parts}; {plan.reason}).")
        pulled = storage.fetch(plan)
    else:
        say(f"downloading {one_line(plan.file)} ({size(plan.size)}{parts}; {plan.reason})")
        (pulled,) = download([plan])
    if as_json:
        emit(json.dumps({"name": name, "file": plan.file, "files": [file.name for file in plan.files],
                          "path": str(pulled.path), "size": plan.size, "reason": plan.reason, "warning": plan.warning,
                          "renamed": plan.renamed, "received": pulled.sent}))  # fmt: skip
    else:
        say(str(pulled.path), style="dim")


def ls(as_json: AsJson = False) -> None:
    from edgellm.storage import list_models

    models = list_models()
    if as_json:
        rows = [
            {"name": m.name, "path": str(m.path), "size": m.size, "origin": m.origin, "repository": m.repo_id or None}
            for m in models
        ]
        emit(json.dumps(rows, indent=2))
        return
    shown = table("NAME", "SIZE", "SOURCE", right=("SIZE",))
    for model in models:
        shown.add_row(one_line(model.name), size(model.size), one_line(model.repo_id or model.origin))
    out().print(shown)
    if all(model.origin == "bundled" for model in models):
        say("These know little more than a made-up home. For a real pair: edgellm setup", style="dim")


def show(name: Name, as_json: AsJson = False) -> None:
    from edgellm.storage import resolve

    found = model_facts(resolve(name))
    if as_json:
        emit(json.dumps(found, indent=2))
        return
    out().print(facts(row for key, value in found.items() for row in _described(key, value)))


def _described(key: str, value: Any) -> Iterator[tuple[str, RenderableType]]:
    """Yield the rows of a fact: its name, and what a person reads."""
    if key == "abilities":
        for ability in value:
            able = ("yes  ", "green") if ability["able"] else ("no  ", "yellow")
            yield ability["name"], Text.assemble(able, harmless(ability["reason"]))
    elif key == "context_memory":
        yield from (("memory", _memory(row)) for row in value)
    elif key == "parts":
        for part in value:
            yield "part", harmless(f"{part['sha256']}  {size(part['size'])}  {Path(part['path']).name}")
    elif key == "main_type":
        yield "weights", "-" if value is None else f"{value[1]:.0%} {value[0]}"
    elif key == "sampling":
        yield key, harmless(_sampling(value))
    else:
        yield key.replace("_", " "), size(value) if key == "size" and isinstance(value, int) else _format(value)


def _memory(row: dict[str, int]) -> str:
    """Return what a context takes, in words."""
    text = f"{row['tokens']:,} tokens: {size(row['cache'])} of keys and values, about {size(row['index'])} for copies"
    return f"{text}, {size(row['attention'])} for importance gates and profiles" if row["attention"] else text


def _sampling(wanted: dict[str, Any]) -> str:
    """Return the sampling that a model wants, and who says so, in words."""
    figures = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in wanted.items() if name != "origin")
    return f"{figures} ({wanted['origin']})"


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else harmless(str(value))


def rm(
    name: Name,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Remove without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    from edgellm import storage

    listed = ", ".join(f"{model.name} ({size(model.size)})" for model in storage.removable(name))
    make_sure("remove", listed, yes=yes)
    removed = storage.remove(name)
    if as_json:
        emit(json.dumps([{"name": model.name, "path": str(model.path), "size": model.size} for model in removed]))
    else:
        say(f"removed {listed}")


def model_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a model in the order of printing; its files are hashed. Raises what `ModelFile.open` raises.

    Of a split model, `sha256` is the hash over its parts that `fingerprint_of` describes, and `parts` are its files.
    """
    from edgellm.engine import ModelFile
    from edgellm.engine.gguf.reader import GgufArray
    from edgellm.llm.abilities import abilities, context_memory
    from edgellm.spec.model_sampling import sampling_of
    from edgellm.storage.fingerprint import fingerprint_of, sha256_of

    model = ModelFile.open(path)
    header, meta, family = model.header, model.header.metadata, model.header.architecture
    tokens = meta.get("tokenizer.ggml.tokens")
    hashes = [sha256_of(file) for file in model.paths]
    parts = [
        {"path": str(file), "size": part.file_size, "sha256": digest}
        for file, part, digest in zip(model.paths, model.parts, hashes, strict=True)
    ]
    return {
        "path": str(path),
        "size": header.file_size,
        "sha256": fingerprint_of(hashes),
        **({"parts": parts} if len(parts) > 1 else {}),
        "name": meta.get("general.name"),
        "architecture": family,
        "parameters": sum(tensor.n_elements for tensor in header.tensors),
        "layers": meta.get(f"{family}.block_count"),
        "width": meta.get(f"{family}.embedding_length"),
        "trained_context": meta.get(f"{family}.context_length"),
        "vocabulary": tokens.count if isinstance(tokens, GgufArray) else None,
        "quantisation": header.quantisation,
        "main_type": header.main_type,
        "chat_template": "tokenizer.chat_template" in meta,
        "license": meta.get("general.license"),
        "sampling": asdict(sampling_of(model)),
        "gguf_version": header.version,
        "context_memory": [asdict(row) for row in context_memory(header)],
        "abilities": [asdict(ability) for ability in abilities(model, other_models(path))],
    }


def other_models(path: Path) -> dict[str, ModelFile]:
    """Return the models of `edgellm ls` that can be read, except that at `path`, by name."""
    from edgellm.engine import ModelFile
    from edgellm.storage import list_models

    found = {}
    for model in list_models():
        with suppress(EdgeError):
            if model.path.resolve() != path.resolve():
                found[model.name] = ModelFile.open(model.path)
    return found
