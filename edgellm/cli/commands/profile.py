"""`edgellm profile`: measure a pair on prompts, and print the results"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli import options
from edgellm.cli.options import option
from edgellm.cli.views.console import emit_json, facts, out, read_text, say, table
from edgellm.cli.views.progress import ProgressBar
from edgellm.errors import InvalidOption
from edgellm.spec.params import BUDGET_CHUNK

if TYPE_CHECKING:
    from edgellm.engine import Message
    from edgellm.spec.gates.profile import Profile


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """The options for measuring, and the file of the results."""

    gamma: int = option(BUDGET_CHUNK, "N", least=1)
    max_tokens: int = option(96, "N", least=1)
    layer: tuple[int, ...] = option((), "N", shown="the most informative one")
    context_lookup: bool = option(True)
    output: Path | None = option(None, "FILE", shown="where chat finds it")
    as_json: bool = option(False, names=("--json",))


@options.with_records
def profile(
    models: Annotated[options.PairOptions, "draft", "verifier", "verifier_tier", "verifier_key_file"],
    measure: MeasureOptions,
    hardware: options.HardwareOptions,
    prompts: Path = typer.Option(..., metavar="FILE"),
) -> None:
    from edgellm.cli.chat_session import with_default_pair
    from edgellm.llm import LLM
    from edgellm.llm.pair_stats import keep_profile, tidy

    tidy()
    read = read_prompts(prompts)
    models = with_default_pair(models)
    with ProgressBar() as loading:
        pair = LLM.open(
            models.draft, models.verifier, progress=loading, hardware=hardware.of(options.VERIFIER),
            draft_hardware=hardware.of(options.DRAFT), upstream=models.upstream(),
        )  # fmt: skip
    with pair:
        with ProgressBar("hashing") as hashing:
            pair.hash_models(hashing)
        with ProgressBar("profiling", "prompts") as profiling:
            found = pair.profile(
                read, gamma=measure.gamma, max_tokens=measure.max_tokens, layers=measure.layer or None,
                context_lookup=measure.context_lookup, progress=partial(profiling, pair.name),
            )  # fmt: skip
        try:
            if (path := measure.output) is not None:
                keep_profile(found, path)
            else:
                path = pair.keep_profile(found)
        except OSError as error:
            what = f"The profile cannot be written: {error}."
            raise InvalidOption(what, "Choose another file with --output.") from error
        except InvalidOption:
            if not measure.as_json:
                _print_profile(found)
            raise
    if measure.as_json:
        emit_json({"path": str(path), **figures(found)})
        return
    _print_profile(found)
    say(f"wrote {path}", style="dim")


def read_prompts(path: Path) -> list[str | list[Message]]:
    """Return the prompts in a file. Raise InvalidOption for a line that looks like JSON and holds no prompt."""
    from edgellm.engine import Message

    found: list[str | list[Message]] = []
    for number, line in enumerate(read_text(path, "Check the path given to --prompts.").splitlines(), 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith(("{", "[", '"')):
            found.append(line.strip())
            continue
        try:
            row: Any = json.loads(line)
            row = row.get("messages", row.get("prompt")) if isinstance(row, dict) else row
            found.append(row if isinstance(row, str) else [Message(str(m["role"]), str(m["content"])) for m in row])
        except (ValueError, KeyError, TypeError):
            raise InvalidOption(
                f"Line {number} of {path} is not a prompt.",
                'Write a text, or JSON such as {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}.',
            ) from None
    if not found:
        raise InvalidOption(f"{path} has no prompts.", "Write a few dozen, one per line.")
    return found


def figures(found: Profile) -> dict[str, Any]:
    """Return the figures of a profile for a script, without the chunks that it keeps."""
    numbers = asdict(found)
    for name in ("alone", "rejected", "policies"):
        del numbers[name]
    return {**numbers.pop("terms"), **numbers}


def _print_profile(found: Profile) -> None:
    from edgellm.spec.gates.rules import evidence_of

    terms, acceptance = found.terms, ", ".join(f"{share:.0%}" for share in found.acceptance)
    about = facts(
        [
            ("profiled on", f"{terms.prompts} prompts, {terms.chunks} chunks of {terms.gamma} tokens"),
            ("context lookup", f"below a confidence of {found.hesitates:.2f}" if found.hesitates else "never"),
            ("rejections", f"foreseen with a log loss of {found.evidence['loss']:.3f} on unseen replies"),
            ("c_th", f"{found.c_th:.3f}, the mean confidence of chunks accepted whole"),
            ("alpha", f"{found.alpha:.3f}, the chance that a drafted token is accepted"),
            ("accepted up to token", f"{acceptance} (1 to {len(found.acceptance)})"),
        ]
    )
    signals = table("signal", "AUC", right=("AUC",))
    known = {key.removeprefix("auc "): value for key, value in found.evidence.items() if key.startswith("auc ")}
    for name, area in sorted(known.items(), key=lambda each: -each[1]):
        signals.add_row(name, f"{area:.2f}")
    separates = "how well each signal separates rejected from accepted chunks (0.5: not at all)"
    for part in (about, "", separates, signals, ""):
        out().print(part)
    for policy in found.policies:
        out().print(f"at a budget of {policy.share:g}: {evidence_of(found, policy.share)}")
