"""Crafted model files against the loader: no file may end the process that loads it."""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

from bench.robustness.attack.harness import Attack, Found
from edgellm.engine.gguf.reader import check_gguf
from edgellm.errors import EdgeError
from testkit import ROOT
from testkit.hostile.crafted_gguf import KNOWN, crafted
from testkit.hostile.loader import Loader

_PATIENCE = 300.0  # seconds for one file
_QUICK = 20  # files besides those known to end the process

_LOAD = """
import sys
from pathlib import Path
import numpy as np
from edgellm.engine import Context, ContextSpec, Message, Model
from edgellm.errors import EdgeError
for line in sys.stdin:
    try:
        with Model.load(Path(line.strip())) as model:
            model.vocabulary
            for special in (False, True):
                model.detokenize(model.tokenize("Some words,\\n 12 of them. <|im_end|>", special=special))
            for n_seq, unified in ((1, True), (2, False)):
                spec = ContextSpec(n_ctx=64, n_seq=n_seq, unified=unified, threads=1)
                with Context(model, spec) as context:
                    context.decode(np.arange(5, dtype=np.int32))
                    context.decode(np.arange(1, dtype=np.int32))
            model.chat_prompt([Message("user", "hello")])
        said = "loaded"
    except EdgeError as error:
        said = "ended a child" if "ends the process that loads it" in error.what else "refused: " + error.what
    except Exception as error:
        said = "!" + type(error).__name__ + ": " + str(error)
    print(said.replace("\\n", " ")[:300], flush=True)
"""


def _library(quick: bool) -> Found:
    """Load every crafted file through the library twice: the second time its verdict is known."""
    wrong, kinds, tried = [], Counter[str](), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "crafted.gguf"
        with closing(Loader(_LOAD, _environment(folder / "home"))) as loader:
            for what, data in crafted(folder):
                if quick and tried >= len(KNOWN) + _QUICK:
                    break
                tried += 1
                path.write_bytes(data)
                checked = _checked(path)
                outcome = loader.load(path)
                if outcome.startswith("!") or loader.load(path).split(":")[0] != outcome.split(":")[0]:
                    wrong.append(f"{what}: {outcome}")
                kinds["refused by the check" if not checked else outcome.partition(":")[0]] += 1
                if what in KNOWN and checked:
                    wrong.append(f"{what}: passes the check")
    return Found(tried, tuple(wrong), dict(kinds))


def _environment(home: Path) -> dict[str, str]:
    """Return a new home with the guard at work and no debugger, which would trace each death."""
    kept = {name: value for name, value in os.environ.items() if name != "EDGELLM_PROBE"}
    return kept | {"EDGELLM_HOME": str(home), "PYTHONPATH": str(ROOT), "GGML_NO_BACKTRACE": "1"}


def _checked(path: Path) -> bool:
    try:
        check_gguf(path)
    except EdgeError:
        return False
    return True


def _command(quick: bool) -> Found:
    """Load the files known to end the process, and some that only a child detects, through the command line."""
    wrong, tried = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "crafted.gguf"
        for what, data in crafted(folder):
            if what not in KNOWN[: 3 if quick else None]:
                continue
            tried += 1
            path.write_bytes(data)
            words = ["chat", "--draft", "none", "--retrieval", "off", "--verifier", str(path), "hello"]
            done = subprocess.run(
                [sys.executable, "-m", "edgellm", *words], capture_output=True, text=True, check=False, cwd=ROOT,
                env=_environment(folder / "home"), timeout=_PATIENCE,
            )  # fmt: skip
            if done.returncode != 1 or not done.stderr.startswith("error:"):
                wrong.append(f"{what}: exit code {done.returncode}, {done.stderr.strip()[-200:]}")
    return Found(tried, tuple(wrong))


def _run(quick: bool) -> Found:
    library, command = _library(quick), _command(quick)
    return Found(library.tried + command.tried, library.wrong + command.wrong, library.figures)


ATTACKS = (Attack("model-files", "valid GGUF files with a meaning that llama.cpp does not expect", _run),)
