"""What works with which client: real packages of other projects, each in a few of its features, against edgellm.

The packages of `requirements.txt`, and openai from npm where there is Node, are installed in an environment of their
own in FOLDER, which a later run uses again; by default it is a temporary one. Each program of `programs/` tries the
features of one client. `works`: what came back was checked. `refused`: the server said no with the reason that is
shown. `fails`: anything else.

Replies are those of the bundled pair. Tools are tried on a second server, whose model calls the first tool that it is
told of (`tool_caller.py`), as the bundled models call none. Embeddings are those of a model with random weights.
"""

import json
import shutil
import subprocess
import tempfile
import venv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from bench.clients.tool_caller import ToolCaller
from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.engine import Model
from edgellm.engine.embedding.embedder import Embedder
from edgellm.http.middleware import HttpConfig
from edgellm.http.model_host import ServedEmbedder, ServedModel
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.storage.model_files import resolve
from testkit.gguf.architectures import write_bert

HERE = Path(__file__).parent
MODEL = "edgellm-verifier"
LIMIT = 600.0  # seconds for one program
NODE: Mapping[str, Sequence[str]] = {
    "openai_node.mjs": ("openai@6.49.0",),
    "langchain.mjs": ("@langchain/openai@1.5.8", "@langchain/ollama@1.3.0", "@langchain/core@1.4.0", "zod@4.6.7"),
}
"""Programs for Node, with their packages; the first one's version is shown."""
CLIENTS: Mapping[str, tuple[str, str | None]] = {
    "openai_python.py": ("OpenAI Python", "openai"),
    "openai_node.mjs": ("OpenAI Node", None),
    "anthropic_python.py": ("Anthropic Python", "anthropic"),
    "ollama_python.py": ("Ollama Python", "ollama"),
    "llm_cli.py": ("llm", "llm"),
    "langchain.mjs": ("LangChain (n8n)", None),
    "open_webui.py": ("Open WebUI's calls", None),
}
"""Programs, with the names of their clients, and the packages whose versions are shown."""


@contextmanager
def servers(folder: str) -> Iterator[tuple[str, str]]:
    """Serve the bundled pair beside an embedding model, which is written to `folder`, and the model that calls tools;
    yield the two addresses."""
    home = Address.parse("127.0.0.1:0")
    bert = Path(folder) / "embedder.gguf"
    write_bert(bert)
    with (
        LLM.open(history=False) as pair,
        Model.load(bert) as vectors,
        Embedder(vectors) as embedder,
        Model.load(resolve(MODEL)) as model,
        LLM(model, verifier=ToolCaller(model), history=False) as caller,
        HttpServer(home, HttpConfig(replies=2)) as server,
        HttpServer(home, HttpConfig(replies=1)) as tools,
    ):
        server.open(ServedModel(pair, MODEL))
        server.models.open_embedder(ServedEmbedder("embedder", embedder))
        tools.open(ServedModel(caller, "caller"))
        yield server.url, tools.url


def install(folder: Path) -> dict[str, str]:
    """Install the packages in `folder`, unless they are there, and return their versions."""
    python = folder / "env" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "env", with_pip=True)
    requirements = HERE / "requirements.txt"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", requirements], check=True, timeout=3600)
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True, timeout=600
    )
    versions = {package["name"].lower(): package["version"] for package in json.loads(listed.stdout)}
    if npm := shutil.which("npm"):
        packages = [one for several in NODE.values() for one in several]
        subprocess.run([npm, "install", "--no-audit", "--no-fund", "--prefix", folder, *packages], check=True,
                       capture_output=True, timeout=1800)  # fmt: skip
    return versions


def attempt(program: str, folder: Path, versions: Mapping[str, str], urls: tuple[str, str]) -> list[dict[str, Any]]:
    """Return what each feature of a client did."""
    client, package = CLIENTS[program]
    version = versions.get(package or "", "")
    if program in NODE:
        for each in (program, "common.mjs"):
            shutil.copy(HERE / "programs" / each, folder / each)  # modules are looked for beside it
        version = NODE[program][0].rpartition("@")[2]
        command = ["node", str(folder / program)]
    else:
        command = [str(folder / "env" / "bin" / "python"), str(HERE / "programs" / program)]
    path = f"{folder / 'env' / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    if program in NODE and shutil.which("node") is None:
        return [_row(client, version, "all", "skipped", "Node is not installed here")]
    done = subprocess.run(
        [*command, urls[0], MODEL, urls[1]], capture_output=True, text=True, timeout=LIMIT, check=False,
        env={"PATH": path, "HOME": str(folder), "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [_row(client, version, line["feature"], line["outcome"], line["detail"]) for line in lines]
    if done.returncode or not rows:
        rows.append(_row(client, version, "the program", "fails", " ".join(done.stderr.split())[-300:]))
    return rows


def _row(client: str, version: str, feature: str, outcome: str, detail: str) -> dict[str, Any]:
    return {"client": client, "version": version, "feature": feature, "outcome": outcome, "detail": detail}


def table(found: Mapping[str, Any]) -> str:
    """Return the table of a result."""
    rows = found["clients"]
    lines, last = [], ""
    for row in rows:
        client = f"{row['client']} {row['version']}".strip()
        lines.append(f"{client if client != last else '':24}  {row['outcome']:8}  {row['feature']}")
        if row["detail"]:
            lines.append(f"{'':36}  {row['detail']}")
        last = client
    counts = Counter(row["outcome"] for row in rows)
    return "\n".join([*lines, "", ", ".join(f"{count} {outcome}" for outcome, count in counts.items())])


def measure(
    folder: Annotated[Path | None, "where the packages are installed, and stay"] = None,
    clients: Annotated[Sequence[str], "programs, such as open_webui; none for all"] = (),
) -> Figures:
    """Return what each feature of these clients did."""
    chosen = [one for one in CLIENTS if not clients or Path(one).stem in clients]
    with tempfile.TemporaryDirectory() as temporary, servers(temporary) as urls:
        place = folder or Path(temporary)
        versions = install(place)
        return {"clients": [row for one in track(chosen, "clients") for row in attempt(one, place, versions, urls)]}


def failures(found: Figures) -> list[str]:
    """Return the features that fail."""
    return [f"{row['client']}: {row['feature']}" for row in found["clients"] if row["outcome"] == "fails"]
