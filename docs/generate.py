"""Runs the commands that the documentation shows, and puts their output into it.

A block between `<!-- $ command -->` and `<!-- end -->` holds the command's real output. `./start docs` renews them all;
a test compares them. Figures that differ from run to run (times, speeds, probabilities) are left out of the comparison.
A figure in a sentence stands between `<!-- figure BENCHMARK, ROWS, ROW -->` and `<!-- end -->`: of the benchmark's
table, in the rows below a heading, the row's number before its range.
"""

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path

from bench.harness.runner import main as bench

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md")), *sorted((ROOT / "models").rglob("README.md")))

_BLOCK = re.compile(r"(<!-- \$ (?P<command>.+?) -->\n```\w*\n)(?:.*?\n)??(```\n<!-- end -->)", re.DOTALL)
_FIGURE = re.compile(r"(<!-- figure (?P<name>\S+), (?P<rows>[^,]+), (?P<row>[^,]+) -->)[\d.]+(?=<!-- end -->)")
_RESULTS = re.compile(r"python -m bench (show .+)")
_STALE = re.compile(r"^stale: .*\n", re.MULTILINE)  # which depends on commits, and on how many of them are here
_SLOW = re.compile(r"^loading \S+: .*\n", re.MULTILINE)  # printed only if a model takes long
_VARIES = (
    (re.compile(r", at [0-9a-f]{8} of [\d-]+$", re.MULTILINE), ""),  # where the commit is known
    (re.compile(r"\d[\d,.]* tokens/s"), "N tokens/s"),
    (re.compile(r"planned in \d+ ms"), "planned in N ms"),
    (re.compile(r'"confidence": ?([\d.]+|null)'), '"confidence": N'),
    (re.compile(r'"source": ?"(accepted|corrected|bonus|retrieved|verifier)"'), '"source": "CHECKED"'),
    (re.compile(r'"round": ?\d+'), '"round": N'),
    (re.compile(r'"created": ?\d+'), '"created": N'),
    (re.compile(r'"id": ?"(chatcmpl|cmpl)-[0-9a-f]+"'), '"id": "ID"'),
    (re.compile(r'"((?:prompt|predicted)_(?:per_token_)?(?:ms|per_second))": ?[\d.]+'), r'"\1": N'),
    (re.compile(r'"seed": ?\d+'), '"seed": N'),
    (  # drafts depend on their cost on this machine
        re.compile(
            r'"(draft_n|draft_n_accepted|rounds|drafted|tokens_per_round|acceptance_rate|mean_acceptance_length|'
            r'verifier_passes_per_token|share_offloaded)": ?(?:[\d.]+|null)'
        ),
        r'"\1": N',
    ),
)


def main() -> int:
    """Renew every page, except those in which only figures have changed."""
    with _home() as environment:
        for page in PAGES:
            old = page.read_text(encoding="utf-8")
            new = renewed(old, environment)
            if figureless(new) != figureless(old):
                page.write_text(new, encoding="utf-8")
                print(f"renewed {page.relative_to(ROOT)}")
    return 0


def stale() -> list[str]:
    """Return the names of pages whose blocks differ from the output of the commands."""
    with _home() as environment:
        texts = ((page, page.read_text(encoding="utf-8")) for page in PAGES)
        return [page.name for page, text in texts if comparable(renewed(text, environment)) != comparable(text)]


def renewed(text: str, environment: dict[str, str]) -> str:
    """Return `text` with the current output of every command in it."""
    return _FIGURE.sub(_figure, _BLOCK.sub(partial(_block, environment=environment), text))


@contextmanager
def _home() -> Iterator[dict[str, str]]:
    """Yield the environment of a user with an empty home, whose `edgellm` and `python` are this program's."""
    with tempfile.TemporaryDirectory() as folder:
        for name, words in (("edgellm", " -m edgellm"), ("python", "")):
            shim = Path(folder) / name
            shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{words} "$@"\n', encoding="utf-8")
            shim.chmod(0o755)
        yield _environment(folder)


def _block(found: re.Match[str], environment: dict[str, str]) -> str:
    command = found["command"]
    return f"{found[1]}$ {command}\n{output(command, environment)}\n{found[3]}"


def _figure(found: re.Match[str]) -> str:
    rows = re.search(
        rf"^{re.escape(found['rows'])}, .*\n((?:  .*\n?)+)", _results(f"show {found['name']}"), re.MULTILINE
    )
    value = rows and re.search(rf"^  {re.escape(found['row'])} .*? ([\d.]+) \(", rows[1], re.MULTILINE)
    if not value:
        raise SystemExit(f"There is no such figure: {found[1]}")
    return f"{found[1]}{value[1]}"


def output(command: str, environment: dict[str, str]) -> str:
    """Return the output of `command`, on both streams."""
    results = _RESULTS.fullmatch(command)
    return _trimmed(_results(results[1]) if results else _run(command, environment))


def _trimmed(text: str) -> str:
    lines = "\n".join(line.rstrip() for line in _SLOW.sub("", text).strip("\n").splitlines())
    return lines.strip("\n")


def _environment(home: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELLM_", "HF_"))}
    return environment | {
        "PATH": f"{home}{os.pathsep}{environment['PATH']}",
        "EDGELLM_HOME": home,
        "EDGELLM_PAIR": "home",
        "HF_HOME": home,
        "NO_COLOR": "1",
        "LC_ALL": "C.UTF-8",
    }


def _run(command: str, environment: dict[str, str]) -> str:
    # Both streams, as at a terminal; the answer comes before its figures.
    done = subprocess.run(
        ["sh", "-c", f"({command}) 2>&1"], capture_output=True, text=True, cwd=ROOT, env=environment, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"`{command}` ended with {done.returncode}, so nothing is written:\n{done.stdout}")
    return done.stdout


def _results(words: str) -> str:
    """Return the tables of the last results, from this process, as two dozen would take long."""
    text = io.StringIO()
    with redirect_stdout(text):
        bench(shlex.split(words))
    return text.getvalue()


def comparable(text: str) -> str:
    """Return `text` without what differs from run to run, or from commit to commit."""
    return _STALE.sub("", figureless(text))


def figureless(text: str) -> str:
    """Return `text` without figures that differ from run to run."""
    for pattern, name in _VARIES:
        text = pattern.sub(name, text)
    return text


if __name__ == "__main__":
    sys.exit(main())
