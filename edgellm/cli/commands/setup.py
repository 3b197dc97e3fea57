"""`edgellm setup`: from nothing to a pair of real models that fits this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from edgellm.cli.commands.config import write_settings
from edgellm.cli.views.console import emit_json, is_terminal, one_line, out, say, table, tell
from edgellm.cli.views.progress import download
from edgellm.errors import EdgeError, InvalidOption, PullFailed, size
from edgellm.storage.catalog import Catalog, catalog
from edgellm.storage.model_files import resolve
from edgellm.system import config_file

if TYPE_CHECKING:
    from edgellm.rpc.discovery.peer_probe import ProbeResult
    from edgellm.storage.hub.pull import DownloadPlan
    from edgellm.storage.pair_choice import ModelRoom

AUTO, NONE = "auto", "none"
_COMMANDS = ("chat", "serve", "profile")  # commands that use the pair
_NEXT = 'Ask it something: edgellm chat "Why is the sky blue?"'


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model of the pair: its name, AUTO for a paired device's verifier, NONE for no draft model, and its download."""

    name: str
    size: int = 0
    runs_on: str = ""
    plan: DownloadPlan | None = None

    @property
    def here(self) -> bool:
        return self.plan is not None and self.plan.path is not None

    def row(self) -> dict[str, Any]:
        """Return the model as JSON."""
        found = None if self.plan is None else self.plan.file
        return {"name": self.name, "size": self.size, "runs_on": self.runs_on, "file": found, "here": self.here}


@dataclass(frozen=True, slots=True)
class SetupChoice:
    """The pair that setup proposes, and why; `expect` says what to expect of the pair."""

    machine: str
    verifier: ModelChoice
    draft: ModelChoice
    reasons: tuple[str, ...]
    expect: str

    @property
    def missing(self) -> list[ModelChoice]:
        """Return the models that are to be downloaded."""
        return [model for model in (self.draft, self.verifier) if model.name not in (AUTO, NONE) and not model.here]


def setup(
    context: typer.Context,
    verifier: str | None = typer.Option(None, metavar="NAME|auto", show_default="the one that suits this machine"),
    yes: bool = typer.Option(False, "-y", "--yes"),
    dry_run: bool = typer.Option(False, "--dry-run"),
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    from edgellm.rpc.discovery.interfaces import chosen_hosts
    from edgellm.rpc.discovery.peer_probe import probe_peers
    from edgellm.rpc.trust.trust import Peers, Trust

    asks = not (yes or dry_run)
    if asks and (as_json or not is_terminal(sys.stdin)):
        why = "--json asks nothing." if as_json else "Nobody can be asked here."
        raise InvalidOption(why, "Add --yes, or --dry-run to see what would be done.")
    known = Peers().all()
    answers = probe_peers(Trust.load(), known, chosen_hosts()) if known else []
    choice = _choose(verifier, answers, must_ask_hub=not dry_run)
    wanted = sum(model.size for model in choice.missing)
    row: dict[str, Any] = {
        "machine": choice.machine, "verifier": choice.verifier.row(), "draft": choice.draft.row(),
        "reasons": list(choice.reasons), "expect": choice.expect, "settings": str(config_file()), "download": wanted,
        "dry_run": dry_run,
    }  # fmt: skip
    if not as_json:
        _print(choice)
    if dry_run:
        if as_json:
            emit_json(row)
        return
    question = f"Download {size(wanted)}, and use this pair from now on?" if wanted else "Use this pair from now on?"
    if asks and not typer.confirm(question, default=True, err=True):
        raise typer.Exit(1)
    pulled = download([model.plan for model in choice.missing if model.plan is not None])
    row["draft"]["name"] = draft = _checked(choice)
    root: Any = context.find_root()
    write_settings(root, {name: {"draft": draft, "verifier": choice.verifier.name} for name in _COMMANDS})
    if not as_json:
        say(f"chat, serve and profile use this pair now: {config_file()}")
        say("Serve it at every login: edgellm service install. Pair another device: edgellm pair", style="dim")
    tell({**row, "received": sum(one.sent for one in pulled)}, as_json, _NEXT, style="bold")


def _choose(wanted: str | None, peers: Sequence[ProbeResult], *, must_ask_hub: bool) -> SetupChoice:
    """Return the pair for this machine and its paired devices. Raise what `propose` and `plan` raise."""
    from edgellm.storage.pair_choice import ModelRoom, propose

    known, room = catalog(), ModelRoom.look(measure=True)
    machine, offered, short = _machine(room, peers), _best_offer(known, room, peers), ""
    try:
        local = None if wanted == AUTO else propose(known, room, wanted)
    except EdgeError as error:
        if wanted is not None or offered is None:
            raise
        local, short = None, error.what
    if local is None or (wanted is None and offered is not None and offered[0].size > local.verifier.size):
        if offered is None:
            raise InvalidOption(
                "No paired device serves a verifier of the catalogue.",
                "There: edgellm serve --role verifier -m NAME --host ADDRESS",
            )
        verifier, draft, file = offered
        device = verifier.runs_on
        reason = short or f"{file} on {device} is larger than what suits this machine"
        expect = f"{device} reads your prompts; while it is away, the draft model writes alone."
        return SetupChoice(machine, verifier, _planned(draft, must_ask_hub), (reason,), expect)
    draft = ModelChoice(NONE)
    if local.draft is not None:
        draft = _planned(ModelChoice(local.draft.name, local.draft.size, local.draft_on), must_ask_hub)
    expect = f"How fast it is on {local.verifier_on} is not known before it is there."
    if local.tokens_per_second is not None:
        expect = f"The verifier alone writes at most {local.tokens_per_second:.0f} tokens a second here"
        expect += "; a draft model makes it faster where it is right." if local.draft is not None else "."
    verifier = _planned(ModelChoice(local.verifier.name, local.verifier.size, local.verifier_on), must_ask_hub)
    return SetupChoice(machine, verifier, draft, local.reasons, expect)


def _best_offer(
    known: Catalog, room: ModelRoom, peers: Sequence[ProbeResult]
) -> tuple[ModelChoice, ModelChoice, str] | None:
    """Return the paired devices' largest verifier that has a draft model here, that model, and the verifier's file."""
    found = []
    for answer in peers:
        offers = answer.info.offers if answer.info is not None and "verify" in answer.info.rights else ()
        for offer in offers:
            model = known.find_file(offer.model)
            if model is not None and model.draft is not None:
                draft = known.models[model.draft]
                if (place := room.place(draft.size)) is not None:
                    verifier = ModelChoice(AUTO, offer.size, answer.peer.name)
                    found.append((verifier, ModelChoice(draft.name, draft.size, place.on), offer.model))
    return max(found, key=lambda one: one[0].size, default=None)


def _planned(model: ModelChoice, must_ask_hub: bool) -> ModelChoice:
    """Return a model with its size on the hub; as it is where the hub cannot and need not be asked."""
    from edgellm.storage.hub.pull import plan

    try:
        found = plan(model.name)
    except PullFailed as error:
        if must_ask_hub:
            raise
        say(f"{error.what} The size of {model.name} is that of the catalogue.", style="yellow")
        return model
    return ModelChoice(model.name, found.size, model.runs_on, found)


def _machine(room: ModelRoom, peers: Sequence[ProbeResult]) -> str:
    cards = f"{' and '.join(room.cards)} with {size(room.card_memory)}" if room.cards else "no graphics card"
    offers = [
        f"{answer.peer.name} ({', '.join(offer.model for offer in answer.info.offers) or 'offers nothing'})"
        for answer in peers
        if answer.info is not None
    ]
    devices = ", ".join(offers) if offers else f"{len(peers)} paired, none answers" if peers else "none paired"
    return f"{size(room.memory)} of memory for models ({room.reason}); {cards}; other devices: {devices}"


def _print(choice: SetupChoice) -> None:
    say(f"This machine: {one_line(choice.machine)}")
    rows = table("", "MODEL", "SIZE", "RUNS ON", "HERE", right=("SIZE",))
    for model, role in ((choice.verifier, "verifier"), (choice.draft, "draft model")):
        bytes_ = size(model.size) if model.size else "-"
        rows.add_row(role, one_line(model.name), bytes_, one_line(model.runs_on), "yes" if model.here else "-")
    out().print(rows)
    for reason in choice.reasons:
        say(f"- {one_line(reason)}", style="dim")
    say(one_line(choice.expect), style="dim")
    for model in (choice.verifier, choice.draft):
        if model.plan is not None and model.plan.warning:
            say(f"{model.plan.warning}.", style="yellow")


def _checked(choice: SetupChoice) -> str:
    """Return the name of the draft model; NONE if its file has another tokenizer than the verifier's, with a notice."""
    from edgellm.engine import ModelFile
    from edgellm.llm.abilities import same_tokenizer

    pair = draft, verifier = choice.draft.name, choice.verifier.name
    if draft == NONE or verifier == AUTO or same_tokenizer(*(ModelFile.open(resolve(one)) for one in pair)):
        return draft
    say(f"{draft} has another tokenizer than {verifier}, which writes alone.", style="yellow")
    return NONE
