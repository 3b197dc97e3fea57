"""Write replies with a verifier that is bigger than memory: a part of its weights is read from the disk in each pass.

The setting of Lever (Wang et al. 2026, arXiv 2605.16786), on one machine. Each way to draft has a process of its own,
and a copy of the verifier's file. Once that is loaded, the process's control group leaves no room for `cold` of its
weights, and decodes are measured as in any idle time. Replies to Spec-Bench's questions follow, greedily: by the model
alone, with copies, by default with the draft model, and with four tokens of it in each round. *length* is the mean of
tokens for each pass of the verifier, *pass* the time of such a round. Linux, as root.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from bench.harness.children import in_child
from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.spec_bench import of_each, questions
from bench.real.speed import N_CTX, ours
from edgellm.engine import Message
from edgellm.engine.hardware import Hardware
from edgellm.errors import InvalidOption
from edgellm.llm import LLM
from edgellm.storage.model_files import resolve

GROUPS = Path("/sys/fs/cgroup")
SPARE = 48 * 2**20  # bytes that the process may come to hold
WAYS: Mapping[str, Mapping[str, Any]] = {
    "alone": {"retrieval": "off"}, "copies": {}, "default": {},
    "draft model": {"retrieval": "off", "gate": "always", "gamma": 4},
}  # fmt: skip


@contextmanager
def limited() -> Iterator[Callable[[float], None]]:
    """Put this process into a control group; yield the function that leaves so many bytes to the pages of files, beside
    what else the process holds, and some for more of that. Raise InvalidOption where there are no such groups."""
    old = (GROUPS / "memory").is_dir()
    parent = GROUPS / "memory" if old else GROUPS
    group = parent / f"edgellm-bench-{os.getpid()}"
    most, own = ("memory.limit_in_bytes", "total_rss") if old else ("memory.max", "anon")

    def leave(pages: float) -> None:
        held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        (group / most).write_text(str(int(int(held[own]) + SPARE + pages)))

    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
        (group / most).read_text()
    except OSError as error:
        raise InvalidOption(f"No memory can be limited here: {error}.", "Run it on Linux, as root.") from error
    try:
        yield leave
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def replies(
    way: str, verifier: str, draft: str, texts: Sequence[str], tokens: int, threads: int, cold: float
) -> list[dict[str, float]]:
    """Return the figures of a way's replies, in a process that may not keep `cold` of the verifier's weights."""
    hardware, small = Hardware(n_ctx=N_CTX, threads=threads), "none" if way in ("alone", "copies") else draft
    with tempfile.TemporaryDirectory(dir=Path(verifier).parent) as folder, limited() as leave:
        os.environ["EDGELLM_HOME"] = folder  # Nobody else is to use a curve that is measured without memory.
        copy = Path(shutil.copy(verifier, folder))
        with copy.open("rb") as file:  # pages that another group has read would not count
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with LLM.open(small, copy, history=False, hardware=hardware) as pair:
            list(pair.reply(max(texts, key=len), max_tokens=2, **WAYS[way]))
            leave((1.0 - cold) * copy.stat().st_size)
            pair.wait_until_measured()
            asks = ours(pair, tokens, **WAYS[way])
            return [asks([Message("user", text)]) for text in texts]


def table(figures: Mapping[str, Any]) -> str:
    """Return a row for each way."""
    lines, alone = [f"{'':12}{'pass, ms':>9}{'length':>8}{'tokens/s':>10}{'times':>7}"], 0.0
    for way, rows in figures["ways"].items():
        tokens, seconds, length = (sum(one[name] for one in rows) for name in ("tokens", "seconds", "length"))
        speed, mean = tokens / seconds, length / len(rows)
        alone = alone or speed
        lines.append(f"{way:12}{1e3 * mean / speed:9.0f}{mean:8.2f}{speed:10.2f}{speed / alone:7.2f}")
    return "\n".join(lines) + "\n"


def measure(
    asked: Annotated[Path, "Spec-Bench's questions, or a part of them"],
    verifier: str = "smollm2:135m",
    draft: str = "smollm2:draft",
    cold: Annotated[float, "share of the verifier's weights that have no room"] = 0.75,
    per: Annotated[int, "questions of each category"] = 4,
    category: Annotated[str, "only this one"] = "writing",
    tokens: Annotated[int, "of a reply, at most"] = 48,
    threads: int = 2,
) -> Iterator[Figures]:
    """Yield the figures after each way."""
    texts = [one.text for one in of_each(questions(asked), per, category)]
    files, ways = (str(resolve(verifier)), str(resolve(draft))), dict[str, Any]()
    for way in track(list(WAYS), "ways"):
        ways[way] = in_child(__name__, "replies", way, *files, texts, tokens, threads, cold)
        yield {"ways": ways}
