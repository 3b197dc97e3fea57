"""`edgellm profile`: measure a pair on prompts, and print the result."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from edgellm.cli.help_examples import model_names
from edgellm.cli.settings import renamed
from edgellm.cli.views.console import Loading, decode, emit, err, is_terminal, out, say
from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.engine import Message
    from edgellm.spec.gates.profile import Profile


def profile(
    given: typer.Context,
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="One prompt a line; or JSON lines: a text, or messages with role and content."
        ),
    ],
    draft: Annotated[
        str,
        typer.Option("-m", "--draft", metavar="MODEL", envvar="EDGELLM_DRAFT", autocompletion=model_names,
                     help="The small model."),
    ] = "edgellm-draft",
    verifier: Annotated[
        str,
        typer.Option(metavar="MODEL|HOST:PORT", envvar="EDGELLM_VERIFIER", autocompletion=model_names,
                     help="The bigger model, or where one is served."),
    ] = "edgellm-verifier",
    gamma: Annotated[int | None, typer.Option(metavar="N", help="Drafted tokens a chunk, where not 2.")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="The longest reply.")] = 96,
    layer: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="A layer whose attention is importance, from 0. Can be given several times.",
                     show_default="the one that tells most"),
    ] = None,
    context_lookup: Annotated[
        bool,
        typer.Option("--context-lookup/--no-context-lookup",
                     help="Find the confidence below which a token from the context is the better draft."),
    ] = True,
    precedents: Annotated[bool | None, typer.Option("--precedents/--no-precedents", hidden=True)] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write it instead.", show_default="where it is found by itself"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile's figures as JSON.")] = False,
) -> None:  # fmt: skip
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from edgellm.llm import Pair
    from edgellm.llm.pair_stats import tidy
    from edgellm.spec.params import FINE

    tidy()
    asked = read_prompts(prompts)
    gamma = FINE if gamma is None else gamma
    if gamma < 1 or max_tokens < 1:
        raise InvalidOption("--gamma and --max-tokens are 1 or more.", f"Leave them out for {FINE} and 96.")
    with Loading() as loading:
        pair = Pair.open(draft, verifier, progress=loading)
    columns = (TextColumn("profiling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with pair:
        with Progress(*columns, console=err(), disable=not is_terminal(sys.stderr), transient=True) as bar:
            task = bar.add_task("profiling", total=len(asked))
            found = pair.profile(
                asked, gamma=gamma, max_tokens=max_tokens, layers=tuple(layer) if layer else None,
                context_lookup=renamed(given, "precedents", precedents, "context_lookup", context_lookup),
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )  # fmt: skip
        try:
            path = _keep(pair, found, output)
        except OSError as error:
            raise InvalidOption(
                f"The profile cannot be written: {error}.", "Name another place with --output."
            ) from error
    if as_json:
        emit(json.dumps({"path": str(path), **figures(found)}))
        return
    _show(found)
    say(f"kept in {path}", style="dim")


def _keep(pair: Any, found: Profile, output: Path | None) -> Path:
    from edgellm.llm.pair_stats import keep_profile

    if output is None:
        kept: Path = pair.keep_profile(found)
        return kept
    keep_profile(found, output)
    return output


def read_prompts(path: Path) -> list[str | list[Message]]:
    """Read the prompts in a file.

    Raises:
        InvalidOption: it cannot be read, or a line that looks like JSON holds no prompt; says which.
        InputNotText: it is not UTF-8.
    """
    from edgellm.engine import Message

    try:
        lines = decode(path.expanduser().read_bytes(), str(path)).splitlines()
    except OSError as error:
        raise InvalidOption(
            f"{path} cannot be read: {error.strerror}.", "Check the path given to --prompts."
        ) from error
    found: list[str | list[Message]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith(("{", "[", '"')):
            found.append(line.strip())
            continue
        try:
            said: Any = json.loads(line)
            said = said.get("messages", said.get("prompt")) if isinstance(said, dict) else said
            found.append(said if isinstance(said, str) else [Message(str(m["role"]), str(m["content"])) for m in said])
        except (ValueError, KeyError, TypeError):
            raise InvalidOption(
                f"Line {number} of {path} is no prompt.",
                'Write a text, or JSON such as {"messages": [{"role": "user", "content": "Where is my mug?"}]}.',
            ) from None
    if not found:
        raise InvalidOption(f"There is no prompt in {path}.", "Write some dozens, one a line.")
    return found


def figures(found: Profile) -> dict[str, Any]:
    """Return the figures of a profile for a script, without the chunks that it keeps."""
    kept = ("confidence", "importance", "tokens", "perplexities", "policies")
    from edgellm.spec.gates.offload_policy import SHARES

    layer, why = found.best_exit()
    return {name: value for name, value in asdict(found).items() if name not in kept} | {
        "early_exit": {"layer": layer, "reason": why},
        "best_gates": {str(share): _best(found, share) for share in SHARES},
    }


def _best(found: Profile, share: float) -> dict[str, str]:
    from edgellm.spec.gates.factory import best_gate

    name, reason = best_gate(found, share)
    return {"gate": name, "reason": reason}


def _show(found: Profile) -> None:
    from edgellm.spec.gates.factory import AUTO
    from edgellm.spec.gates.offload_policy import SHARES

    console = out()
    acceptance = ", ".join(f"{share:.0%}" for share in found.acceptance)
    batch = " / ".join(f"{seconds * 1e3:.2f}" for seconds in found.batch_seconds)
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (
        ("profiled on", f"{found.prompts} prompts, {found.chunks} chunks of {found.gamma} tokens"),
        ("the context is heeded", f"below a confidence of {found.hesitates:.2f}" if found.hesitates else "never"),
        ("rejections are foretold", found.foretold),
        ("c_th", f"{found.c_th:.3f}, the mean confidence of chunks accepted whole"),
        ("alpha", f"{found.alpha:.3f}, the chance that a drafted token is accepted"),
        ("accepted up to place", f"{acceptance} (1 to {len(found.acceptance)})"),
        ("a drafted token", f"{found.draft_seconds * 1e3:.2f} ms; for 1 / 2 / ... branches {batch} ms"),
        ("a verification", f"{found.verify_seconds * 1e3:.2f} ms of computing"),
        ("early exit", found.best_exit()[1]),
    ):
        facts.add_row(name, value)
    console.print(facts)
    console.print()
    signals = Table(box=None, pad_edge=False)
    signals.add_column("signal")
    signals.add_column("AUC", justify="right")
    known = {key.removeprefix("auc "): value for key, value in found.evidence.items() if key.startswith("auc ")}
    for name, area in sorted(known.items(), key=lambda each: -each[1]):
        signals.add_row(name, f"{area:.2f}")
    console.print("how well each signal tells rejected chunks from accepted ones (0.5: not at all)")
    console.print(signals)
    console.print()
    gates = Table(box=None, pad_edge=False)
    for name in ("gate", *map(str, SHARES)):
        gates.add_column(name, justify="left" if name == "gate" else "right")
    for name in AUTO:
        cells = (found.evidence.get(f"gate {name} at {share}") for share in SHARES)
        gates.add_row(name, *("-" if right is None else f"{right:.0%}" for right in cells))
    console.print("replies that come out as the verifier's own, at three budgets")
    console.print(gates)
    console.print()
    for share in SHARES:
        console.print(f"at a budget of {share:g}: {_best(found, share)['reason']}")
