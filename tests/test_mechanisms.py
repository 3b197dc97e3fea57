"""Each mechanism is a file or folder, and at most a line in a table: the rest works without it."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = """
import importlib, pkgutil, edgellm
for module in pkgutil.walk_packages(edgellm.__path__, "edgellm."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from edgellm.http.dialects import dialects
assert dialects()
"""


@dataclass(frozen=True, slots=True)
class Mechanism:
    """The `paths` of a mechanism below `edgellm/`, separated by spaces; the `table` that names it, and a part of its
    line or lines there, or its entry."""

    paths: str
    table: str = ""
    line: str = ""


MECHANISMS = {
    "forced text": Mechanism("spec/ngram/forced.py", "spec/params.py", '"forced text"'),
    "reuse": Mechanism("spec/ngram/reuse.py", "spec/params.py", '"reuse"'),
    "calibration": Mechanism("spec/ngram/calibration.py", "spec/params.py", '"calibration"'),
    "importance": Mechanism("spec/drafters/importance.py", "spec/params.py", '"importance"'),
    "parallel drafting": Mechanism("spec/drafters/parallel.py", "spec/params.py", '"parallel drafting"'),
    "rpc engine": Mechanism(
        "rpc_engine rpc/protos/rpc_engine.proto rpc/protos/rpc_engine_pb2.py rpc/protos/rpc_engine_pb2.pyi",
        "mesh/__init__.py",
        '"rpc": ',
    ),
    "early exit": Mechanism("llm/early_exit.py", "spec/params.py", '"early exit"'),
    "translation": Mechanism("spec/drafters/translation.py", "spec/params.py", '"translation"'),
    "fitting": Mechanism("llm/profiling.py spec/gates/fitting.py", "spec/params.py", '"fitting"'),
    "gates by importance": Mechanism("spec/gates/synera.py", "spec/params.py", 'f"{_SYNERA}'),
    "mtp": Mechanism("engine/speculators/mtp.py", "engine/model.py", ".speculators.mtp"),
    "eagle3": Mechanism("engine/speculators/eagle3.py", "engine/model.py", ".speculators.eagle3"),
    "speculators": Mechanism(
        "engine/speculators spec/drafters/speculator.py verifier/extra_drafts.py",
        "engine/model.py",
        '"edgellm.engine.speculators.',
    ),
    "embeddings": Mechanism(
        "engine/embedding http/dialects/embeddings.py", "http/dialects/__init__.py", '"embeddings", '
    ),
    **{
        name: Mechanism(f"http/dialects/{name}.py", "http/dialects/__init__.py", f'"{name}", ')
        for name in ("anthropic", "ollama", "responses")
    },
    "phases": Mechanism("coldstart/phases.py", "mesh/placement.py", 'coldstart.phases",'),
    "gateway": Mechanism("upstream/gateway services/server/gateway_server.py"),
    **{
        f"dialect {name}": Mechanism(f"upstream/dialects/{name}.py", "upstream/opening.py", f'"{name}", ')
        for name in ("vllm", "sglang", "llama_server", "ollama", "by_text")
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MECHANISMS)
def test_the_rest_works_without_a_mechanism(name: str, tmp_path: Path) -> None:
    mechanism = MECHANISMS[name]
    shutil.copytree(ROOT / "edgellm", tmp_path / "edgellm", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "models").symlink_to(ROOT / "models")
    for path in (tmp_path / "edgellm" / path for path in mechanism.paths.split()):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if mechanism.table:
        table = tmp_path / "edgellm" / mechanism.table
        text = table.read_text(encoding="utf-8")
        if mechanism.line.endswith('", '):  # a table of names in one line
            kept = text.replace(mechanism.line, "", 1)
        else:
            kept = "".join(line for line in text.splitlines(keepends=True) if mechanism.line not in line)
        assert len(kept) < len(text)
        table.write_text(kept, encoding="utf-8")
    _run(tmp_path, "-c", IMPORTS)
    said = _run(tmp_path, "-m", "edgellm", "chat", "Where is my mug?", "--max-tokens", "8", "--json")
    assert '"text"' in said
    _run(tmp_path, "-m", "edgellm", "mesh", "plan", "--preset", "csgo", "--json")


def _run(tree: Path, *words: str) -> str:
    """Run Python with the tree's package, and return its standard output."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "EDGELLM_HOME": str(tree / "home")}
    done = subprocess.run(
        (sys.executable, *words), check=False, env=environment, cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
