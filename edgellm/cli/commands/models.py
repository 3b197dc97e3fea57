"""`edgellm catalog`, `pull`, `add`, `ls`, `show`, `rm`: find, download, name, list, show and remove models; `run`: talk
to one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from edgellm.cli.options import AsJson, Yes
from edgellm.cli.views import console as ui
from edgellm.cli.views.console import show as show_rows
from edgellm.cli.views.progress import download
from edgellm.errors import InvalidOption, ModelNotFound, size
from edgellm.storage import model_files, upkeep
from edgellm.storage.catalog import catalog as whole_catalog

if TYPE_CHECKING:
    from rich.console import RenderableType


_NAME = "Name from `edgellm ls` or `edgellm catalog`, user/repo[:quant], or path."
Name = Annotated[str, typer.Argument(metavar="MODEL", help=_NAME)]
_LEFT_TO_US = ("draft", "verifier", "peer", "mesh", "profile")  # settings of `chat` that belong to another pair


def catalog(family: str | None = typer.Argument(None, metavar="[FAMILY]"), as_json: AsJson = False) -> None:
    from edgellm.storage.pair_choice import ModelRoom

    known, here, room = whole_catalog(), {model.name for model in model_files.list_models()}, ModelRoom.look()
    names = list(known.models) if family is None else known.sizes(family)
    if not names:
        families = dict.fromkeys(name.partition(":")[0] for name in known.models)
        raise InvalidOption(f"The catalogue has no family {family!r}.", f"It has {', '.join(families)}.")
    rows = []
    for model in (known.models[name] for name in names):
        place = room.place(model.size)
        rows.append({
            "name": model.name, "title": model.title, "repository": model.repo_id, "quantisation": model.quant,
            "size": model.size, "parameters": model.parameters, "active_parameters": model.active,
            "context": model.context, "draft": model.draft, "template": model.template, "license": model.license,
            "here": model.name in here, "fits": place is not None, "runs_on": None if place is None else place.on,
        })  # fmt: skip
    hint = "Download one with: edgellm pull NAME; another quantisation with NAME-q8_0. Sizes are from lists."
    columns: ui.Columns = {
        "NAME": "name",
        " SIZE": lambda row: size(row["size"]),
        " CONTEXT": lambda row: f"{row['context']:,}",
        "DRAFT MODEL": "draft",
        "HERE": lambda row: "yes" if row["here"] else "-",
        "FITS": lambda row: f"on {row['runs_on']}" if row["fits"] else "no",
    }
    show_rows(rows, columns, as_json, empty="", hint=hint)


def pull(name: str = typer.Argument(..., metavar="NAME|USER/REPO[@REVISION][:QUANT]"), as_json: AsJson = False) -> None:
    from edgellm.storage.hub.pull import plan as plan_of

    plan = plan_of(name)
    if plan.renamed:
        ui.say(f"{model_files.hub_name(name).repo_id} is called {plan.renamed} now.")
    if plan.warning:
        ui.say(f"{plan.warning}.")
    parts = f" in {len(plan.files)} files" if len(plan.files) > 1 else ""
    if plan.path is not None:
        ui.say(f"{ui.one_line(plan.file)} is already on this machine ({size(plan.size)}{parts}; {plan.reason}).")
        path, sent = plan.fetch()
    else:
        ui.say(f"downloading {ui.one_line(plan.file)} ({size(plan.size)}{parts}; {plan.reason})")
        ((path, sent),) = download([plan])
    row = {"name": name, "file": plan.file, "files": [file.name for file in plan.files], "path": str(path),
           "size": plan.size, "reason": plan.reason, "warning": plan.warning, "renamed": plan.renamed,
           "received": sent}  # fmt: skip
    ui.tell(row, as_json, str(path), style="dim")


def add(
    file: Path = typer.Argument(..., metavar="FILE"),
    name: str | None = typer.Argument(None, metavar="[NAME]", show_default=False),
    as_json: AsJson = False,
) -> None:
    model = upkeep.add(file, name)
    row = {"name": model.name, "path": str(model.path), "size": model.size}
    ui.tell(
        row, as_json, f"{model.name} is {model.path.resolve()} now ({size(model.size)}); the file stays where it is."
    )


def ls(as_json: AsJson = False) -> None:
    left_out = dict[str, str]()
    models = model_files.list_models(left_out)
    rows = [
        {"name": m.name, "path": str(m.path), "size": m.size, "origin": m.origin, "repository": m.repo_id or None}
        for m in models
    ]
    bundled = all(model.origin == "bundled" for model in models)
    hint = "These know little more than a made-up home. For a real pair: edgellm setup" if bundled else ""
    columns: ui.Columns = {
        "NAME": "name",
        " SIZE": lambda row: size(row["size"]),
        "SOURCE": lambda row: row["repository"] if row["origin"] == "hub" else row["origin"],
    }
    show_rows(rows, columns, as_json, empty=hint, hint=hint)
    for file, reason in left_out.items():
        ui.say(f"not listed: {ui.one_line(file)}, as {reason}", style="dim")


def show(name: Name, as_json: AsJson = False) -> None:
    found = model_facts(model_files.resolve(name))
    if as_json:
        ui.emit_json(found)
    else:
        ui.out().print(ui.facts(row for key, value in found.items() for row in _described(key, value)))


def _described(key: str, value: Any) -> Iterator[tuple[str, RenderableType]]:
    name = key.replace("_", " ")
    if key == "abilities":
        for ability in value:
            able = ("yes  ", "green") if ability["able"] else ("no  ", "yellow")
            yield ability["name"], Text.assemble(able, ui.harmless(ability["reason"]))
    elif key == "context_memory":
        for row in value:
            cache, index, attention = (size(row[part]) for part in ("cache", "index", "attention"))
            more = f", {attention} for importance gates and profiles" if row["attention"] else ""
            yield "memory", f"{row['tokens']:,} tokens: {cache} of keys and values, about {index} for copies{more}"
    elif key == "parts":
        for part in value:
            yield "part", ui.harmless(f"{part['sha256']}  {size(part['size'])}  {Path(part['path']).name}")
    elif key == "main_type":
        yield "weights", "-" if value is None else f"{value[1]:.0%} {value[0]}"
    elif key == "sampling":
        figures = ", ".join(f"{one.replace('_', '-')} {number:g}" for one, number in value.items() if one != "origin")
        yield name, ui.harmless(f"{figures} ({value['origin']})")
    elif value is None or isinstance(value, bool):
        yield name, {None: "-", True: "yes", False: "no"}[value]
    elif isinstance(value, int):
        yield name, size(value) if key == "size" else f"{value:,}"
    else:
        yield name, ui.harmless(str(value))


def rm(name: Name, yes: Yes = False, as_json: AsJson = False) -> None:
    models = upkeep.removable(name)
    listed = ", ".join(f"{model.name} ({size(model.size)})" for model in models)
    if models[0].origin == "added":
        listed = f"the name {name}; its file stays: {models[0].path.resolve()}"
    ui.make_sure("remove", listed, yes=yes)
    removed = upkeep.remove(name)
    rows = [{"name": model.name, "path": str(model.path), "size": model.size} for model in removed]
    ui.tell(rows, as_json, f"removed {listed}")


def model_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a model in the order of printing; `sha256` is that of `fingerprint_of`."""
    from edgellm.engine import ModelFile
    from edgellm.engine.gguf.header import GgufArray
    from edgellm.llm.abilities import abilities, context_memory, other_models
    from edgellm.spec.sampling import sampling_of
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
        "path": str(path), "size": header.file_size, "sha256": fingerprint_of(hashes),
        **({"parts": parts} if len(parts) > 1 else {}),
        "name": meta.get("general.name"), "architecture": family,
        "parameters": header.n_params,
        "layers": meta.get(f"{family}.block_count"), "width": meta.get(f"{family}.embedding_length"),
        "trained_context": meta.get(f"{family}.context_length"),
        "vocabulary": tokens.count if isinstance(tokens, GgufArray) else None,
        "quantisation": header.quantisation, "main_type": header.main_type,
        "chat_template": "tokenizer.chat_template" in meta, "license": meta.get("general.license"),
        "sampling": asdict(sampling_of(model)), "gguf_version": header.version,
        "context_memory": [asdict(row) for row in context_memory(header)],
        "abilities": [asdict(ability) for ability in abilities(model, other_models(path))],
    }  # fmt: skip


def run(
    context: typer.Context,
    model: str | None = typer.Argument(None, metavar="MODEL", help=_NAME, show_default=False),
    words: list[str] | None = typer.Argument(None, metavar="[PROMPT]"),
    named: str | None = typer.Option(None, "-m", "--model", metavar="MODEL", show_default=False),
    draft: str | None = typer.Option(None, metavar="MODEL", show_default="one that is here and fits"),
    yes: bool = typer.Option(False, "-y", "--yes"),
) -> int:
    words = [*([model] if named is not None and model is not None else []), *(words or [])]
    model = model if named is None else named
    if model is None:
        raise InvalidOption("No model is named.", "Name one: edgellm run MODEL PROMPT; edgellm ls lists those here.")
    path = here_or_pulled(checked_first(model), yes=yes)
    if draft is None:
        draft = fitting_draft(model, path)
    return talk(context, ["--draft", draft, "--verifier", model, *words])


def checked_first(model: str) -> str:
    """Return the first word behind a command, if it is no option of `edgellm chat`. Raise InvalidOption."""
    if model.startswith("-"):
        raise InvalidOption(f"{model} is before the model.", "Name the model first, as in: edgellm run MODEL PROMPT")
    return model


def talk(context: typer.Context, words: list[str]) -> int:
    """Run `edgellm chat` with these words, and with those of its settings that belong to any pair."""
    root = context.find_root()
    command = root.command.get_command(root, "chat")  # type: ignore[attr-defined]
    settings = (root.default_map or {}).get("chat") or {}
    kept = {name: value for name, value in settings.items() if name not in _LEFT_TO_US}
    with command.make_context("chat", words, parent=root, default_map=kept) as chat:
        code: int = command.invoke(chat)
    return code


def here_or_pulled(name: str, *, yes: bool) -> Path:
    """Return the file of a model, after a download where it is not here and the user says so."""
    try:
        return model_files.resolve(name)
    except ModelNotFound as error:
        if " " in name:
            raise ModelNotFound(f"{name!r} is not a model.", "To ask the pair that is set up: edgellm chat") from None
        if model_files.looks_like_path(name) or (whole_catalog().find(name) is None and "/" not in name):
            raise
        if not yes and not ui.is_terminal(sys.stdin):
            raise ModelNotFound(error.what, f"{error.next_step}; or add --yes to download it now.") from None
    from edgellm.storage.hub.pull import plan as plan_of

    plan = plan_of(name)
    if plan.path is not None:
        return plan.path
    if plan.warning:
        ui.say(f"{plan.warning}.", style="yellow")
    about = f"{ui.one_line(plan.file)} ({size(plan.size)}; {plan.reason})"
    if yes:
        ui.say(f"downloading {about}")
    elif not typer.confirm(f"{name} is not here. Download {about}?", default=True, err=True):
        raise typer.Exit(1)
    return download([plan])[0][0]


def fitting_draft(name: str, path: Path) -> str:
    """Return the draft model, or EAGLE-3 head, for a verifier among those here, or "none"; say why."""
    from edgellm.llm.abilities import ALONE, choose_draft
    from edgellm.llm.model_loading import EngineConfig, place_pair

    draft, why = choose_draft(path, lambda draft: place_pair(draft, path, EngineConfig(draft, path)))
    if draft is not None:
        ui.say(f"{draft} drafts for {name}: {why}. Alone: --draft none", style="dim")
        return draft
    known = whole_catalog().find(name) if why == ALONE else None
    wanted = None if known is None else known[0].draft
    more = f" {wanted} would draft for it: edgellm pull {wanted}" if wanted else ""
    ui.say(f"{name} writes without a draft model: {why}.{more}", style="dim")
    return "none"
