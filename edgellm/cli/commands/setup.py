"""`edgellm setup`: from nothing to a pair of real models that fits this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from edgellm.cli.commands.config import write_settings
from edgellm.cli.views.console import Columns, emit_json, is_terminal, one_line, say, show, tell
from edgellm.cli.views.progress import download
from edgellm.errors import EdgeError, InvalidOption, PullFailed, size
from edgellm.storage.catalog import Catalog, catalog
from edgellm.storage.model_files import resolve
from edgellm.system import config_file

if TYPE_CHECKING:
    from edgellm.rpc.trust.handshake import PeerInfo
    from edgellm.storage.hub.pull import DownloadPlan
    from edgellm.storage.pair_choice import ModelRoom, PairProposal

AUTO, NONE = "auto", "none"
_COMMANDS = ("chat", "serve", "profile")  # commands that use the pair
_NEXT = 'Ask it something: edgellm chat "Why is the sky blue?"'


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
    from edgellm.storage.pair_choice import ModelRoom

    asks = not (yes or dry_run)
    if asks and (as_json or not is_terminal(sys.stdin)):
        why = "--json asks nothing." if as_json else "Nobody can be asked here."
        raise InvalidOption(why, "Add --yes, or --dry-run to see what would be done.")
    known = Peers().all()
    answers = probe_peers(Trust.load(), known, chosen_hosts()) if known else []
    there = [answer for _, answer in answers if not isinstance(answer, EdgeError)]
    room = ModelRoom.look(measure=True)
    machine, pair = _machine(room, there, len(known)), _choose(room, there, verifier)
    models, plans = _planned(pair, must_ask_hub=not dry_run)
    verifies, drafts = models
    wanted = sum(model["size"] for model in models if model["name"] not in (AUTO, NONE) and not model["here"])
    row: dict[str, Any] = {
        "machine": machine, "verifier": verifies, "draft": drafts, "reasons": list(pair.reasons),
        "expect": _expectation(pair), "settings": str(config_file()), "download": wanted, "dry_run": dry_run,
    }  # fmt: skip
    if not as_json:
        _print(row, plans)
    if dry_run:
        if as_json:
            emit_json(row)
        return
    question = f"Download {size(wanted)}, and use this pair from now on?" if wanted else "Use this pair from now on?"
    if asks and not typer.confirm(question, default=True, err=True):
        raise typer.Exit(1)
    pulled = download([plan for plan in plans if plan.path is None])
    drafts["name"] = _checked(drafts["name"], verifies["name"])
    root: Any = context.find_root()
    names = {"draft": drafts["name"], "verifier": verifies["name"]}
    write_settings(root, dict.fromkeys(_COMMANDS, names))
    if not as_json:
        say(f"chat, serve and profile use this pair now: {config_file()}")
        say("Serve it at every login: edgellm service install. Pair another device: edgellm pair", style="dim")
    tell({**row, "received": sum(sent for _, sent in pulled)}, as_json, _NEXT, style="bold")


def _choose(room: ModelRoom, peers: Sequence[PeerInfo], wanted: str | None) -> PairProposal:
    """Return the pair for this machine and its paired devices. Raise what `propose` raises."""
    from edgellm.storage.pair_choice import propose

    known, local = catalog(), None
    offered = _best_offer(known, room, peers)
    try:
        if wanted != AUTO:
            local = propose(known, room, wanted)
    except EdgeError as error:
        if wanted is not None or offered is None:
            raise
        return replace(offered, reasons=(error.what,))
    if offered is not None and (local is None or (wanted is None and offered.verifier.size > local.verifier.size)):
        return offered
    if local is None:
        raise InvalidOption(
            "No paired device serves a verifier of the catalogue.",
            "There: edgellm serve --role verifier -m NAME --host ADDRESS",
        )
    return local


def _best_offer(known: Catalog, room: ModelRoom, peers: Sequence[PeerInfo]) -> PairProposal | None:
    """Return the paired devices' largest verifier, named AUTO, that has a draft model here, and that model."""
    from edgellm.storage.pair_choice import PairProposal

    found = []
    for there in peers:
        for offer in there.offers if "verify" in there.rights else ():
            model, device = known.find_file(offer.model), there.peer.name
            draft = None if model is None or model.draft is None else known.models[model.draft]
            if model is not None and draft is not None and (place := room.place(draft.size)) is not None:
                verifier = replace(model, name=AUTO, size=offer.size)
                reason = f"{offer.model} on {device} is larger than what suits this machine"
                found.append(PairProposal(verifier, device, draft, place.on, None, (reason,)))
    return max(found, key=lambda one: one.verifier.size, default=None)


def _expectation(pair: PairProposal) -> str:
    """Return a sentence on what to expect of a pair."""
    if pair.verifier.name == AUTO:
        return f"{pair.verifier_on} reads your prompts; while it is away, the draft model writes alone."
    if pair.tokens_per_second is None:
        return f"How fast it is on {pair.verifier_on} is not known before it is there."
    faster = "; a draft model makes it faster where it is right." if pair.draft is not None else "."
    return f"The verifier alone writes at most {pair.tokens_per_second:.0f} tokens a second here{faster}"


def _planned(pair: PairProposal, *, must_ask_hub: bool) -> tuple[list[dict[str, Any]], list[DownloadPlan]]:
    """Return the verifier and the draft model as JSON, and their downloads. Their sizes are those on the hub, or of the
    catalogue where the hub cannot and need not be asked."""
    from edgellm.storage.hub.pull import plan

    rows: list[dict[str, Any]] = []
    plans: list[DownloadPlan] = []
    for model, runs_on in ((pair.verifier, pair.verifier_on), (pair.draft, pair.draft_on)):
        name, bytes_ = (NONE, 0) if model is None else (model.name, model.size)
        rows.append({"name": name, "size": bytes_, "runs_on": runs_on, "file": None, "here": False})
        if name in (AUTO, NONE):
            continue
        try:
            found = plan(name)
        except PullFailed as error:
            if must_ask_hub:
                raise
            say(f"{error.what} The size of {name} is that of the catalogue.", style="yellow")
            continue
        rows[-1] |= {"size": found.size, "file": found.file, "here": found.path is not None}
        plans.append(found)
    return rows, plans


def _machine(room: ModelRoom, peers: Sequence[PeerInfo], paired: int) -> str:
    cards = f"{' and '.join(room.cards)} with {size(room.card_memory)}" if room.cards else "no graphics card"
    offers = [
        f"{there.peer.name} ({', '.join(offer.model for offer in there.offers) or 'offers nothing'})" for there in peers
    ]
    devices = ", ".join(offers) if offers else f"{paired} paired, none answers" if paired else "none paired"
    return f"{size(room.memory)} of memory for models ({room.reason}); {cards}; other devices: {devices}"


def _print(row: dict[str, Any], plans: Sequence[DownloadPlan]) -> None:
    say(f"This machine: {one_line(row['machine'])}")
    models = [{"role": role} | row[name] for name, role in (("verifier", "verifier"), ("draft", "draft model"))]
    show(models, _COLUMNS, False, empty="")
    for text in (*(f"- {reason}" for reason in row["reasons"]), row["expect"]):
        say(one_line(text), style="dim")
    for plan in plans:
        if plan.warning:
            say(f"{plan.warning}.", style="yellow")


_COLUMNS: Columns = {
    "": "role",
    "MODEL": "name",
    " SIZE": lambda row: size(row["size"]) if row["size"] else "-",
    "RUNS ON": "runs_on",
    "HERE": lambda row: "yes" if row["here"] else "-",
}


def _checked(draft: str, verifier: str) -> str:
    """Return the name of the draft model; NONE if its file has another tokenizer than the verifier's, with a notice."""
    from edgellm.engine import ModelFile
    from edgellm.llm.abilities import same_tokenizer

    files = (ModelFile.open(resolve(one)) for one in (draft, verifier))
    if draft == NONE or verifier == AUTO or same_tokenizer(*files):
        return draft
    say(f"{draft} has another tokenizer than {verifier}, which writes alone.", style="yellow")
    return NONE
