"""The guide's page "Use the server you have", word for word from an empty home: does each command do what it says?

    python -m bench.cli.server_page [--only TEXT]

The commands of `docs/guide/servers.md` are run as they stand there, in a network of this process's own where the page's
machines have their names and ports: `gpu-box` and `attic-box` have a server, `desk` is the gateway, and `laptop` is a
paired device. Each of the two has an empty home and an empty model cache; a hub on loopback serves the bundled draft
model under the names of the page's models, the second one with another tokenizer.

The commands of the first block are run once for each row of the page's table of servers, whose way to verify must be
the row's. llama-cpp-python's own server is the real one where `llama-cpp-python[server]` is installed; the others are
those of our tests, over the bundled verifier. What the page shows as a command's output must be in what it prints, in
order, where … is anything; and each reply must be what the server's model writes alone. Otherwise it ends with exit
code 1.

It needs Linux, root and iproute2, and changes nothing outside its own network and mounts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.harness.report import write
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.rpc.channel import DEFAULT_PORT
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.storage import catalog, resolve
from testkit import ROOT, environment, retokenized
from testkit.network.hub import Hub, running

MODULE = "bench.cli.server_page"
PAGE = ROOT / "docs" / "guide" / "servers.md"
MACHINES = {"gpu-box": "10.79.0.10", "attic-box": "10.79.0.11", "desk": "10.79.0.20", "laptop": "10.79.0.30"}
PORT = 8000
SERVERS = {
    "vLLM": ("vllm-score", "vllm-fan-out"), "SGLang": ("sglang",), "llama-server": ("llama-server",),
    "llama-cpp-python": ("llama-cpp-python",), "Ollama": ("ollama",), "LM Studio": ("lm-studio",),
    "TabbyAPI": ("tabbyapi",), "mlx-lm": ("mlx-lm",),
}  # fmt: skip
"""The servers of the page's table by the beginning of their rows, and what stands for them in `testkit.upstream`."""
LIVE = "llama_cpp.server"
_CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
_TYPED = re.compile(r"(?P<machine>[a-z]*)\$ +(?P<command>.+)")
_COMMENT = re.compile(r"\s+# .*$")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_SECONDS = 300.0
_WIDE = 84  # characters of a command in the table
_SERVING = "edgellm chat --"


@dataclass(frozen=True, slots=True)
class Step:
    """A command of the page, the machine that it is for, and what the page shows as its output."""

    command: str
    machine: str
    shown: tuple[str, ...]

    @property
    def serves(self) -> bool:
        return " serve " in f"{self.command} "


@dataclass(frozen=True, slots=True)
class Tried:
    """A command that was run against a server, what it printed, and what was not as the page says."""

    server: str
    command: str
    printed: str
    problems: tuple[str, ...]


def blocks(page: str) -> list[list[Step]]:
    """Return the steps of each console block of a page; those without a machine before the $ are for `laptop`."""
    found = []
    for block in _CONSOLE.finditer(page):
        steps: list[Step] = []
        for line in block[1].splitlines():
            if typed := _TYPED.match(line):
                steps.append(Step(_COMMENT.sub("", typed["command"]), typed["machine"] or "laptop", ()))
            elif line.strip():
                last = steps[-1]
                steps[-1] = Step(last.command, last.machine, (*last.shown, line))
        found.append(steps)
    return found


def ways(page: str) -> dict[str, str]:
    """Return the best tiers that the page's table of servers promises, by the first words of a row."""
    rows = re.findall(r"^\| (.+?) \| (score.*?|fan-out|continue) \| (?:token ids|text) \|", page, re.MULTILINE)
    return dict(rows)


def missing(shown: Sequence[str], printed: str) -> list[str]:
    """Return the lines that the page shows and a command has not printed, in this order; … is anything."""
    at, found = 0, []
    for line in shown:
        pattern = re.compile("[^\n]*".join(re.escape(part) for part in line.strip().split("…")))
        if match := pattern.search(printed, at):
            at = match.end()
        else:
            found.append(f"it does not print: {line}")
    return found


@dataclass(frozen=True, slots=True)
class Device:
    """A machine of the page with a home of its own."""

    name: str
    home: Path
    hub: str

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in environment().items() if not name.startswith("HF_")}
        return {
            **kept, "HOME": str(self.home), "EDGELLM_HOME": str(self.home / "edgellm"),
            "HF_HOME": str(self.home / "hf"), "HF_ENDPOINT": self.hub, "HF_HUB_DISABLE_XET": "1",
            "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "100",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
        }  # fmt: skip

    @property
    def trust(self) -> Trust:
        return Trust.load(self.home / "edgellm" / "data" / "trust")

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command of the page; replies are greedy, so that they can be compared."""
        settings = self.home / "edgellm" / "config" / "config.toml"
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text("[chat]\ntemperature = 0\n", encoding="utf-8")
        return subprocess.Popen(
            [sys.executable, "-m", *shlex.split(command)], cwd=self.home, env=self.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, command: str) -> tuple[str, int]:
        """Run a command to its end; return what it has printed, and its exit code."""
        process = self.start(command)
        try:
            printed, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            printed = f"{process.communicate()[0]}\n(it was ended after {_SECONDS:.0f} s)"
        return _CONTROL.sub("", printed), process.returncode

    @contextmanager
    def serving(self, step: Step) -> Iterator[list[str]]:
        """Run a command in the background until the `with` ends; yield the lines that it prints, once it has printed
        what the page shows, or does no more."""
        process, lines, news = self.start(step.command), list[str](), threading.Condition()
        assert process.stdout is not None

        def serves(printed: str) -> bool:
            return _SERVING in printed and not missing(step.shown, printed)

        def read(pipe: Any) -> None:
            for line in pipe:
                with news:
                    lines.append(line)
                    news.notify_all()
            with news:
                news.notify_all()

        reader = threading.Thread(target=read, args=(process.stdout,))
        reader.start()
        try:
            with news:
                news.wait_for(lambda: serves("".join(lines)) or process.poll() is not None, timeout=_SECONDS)
            yield lines
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
            reader.join()
            process.stdout.close()


@contextmanager
def server(kind: str, machine: str, model: Path, name: str) -> Iterator[str]:
    """Run the server of a kind on a machine of the page; yield how it was run."""
    host = MACHINES[machine]
    live = kind == "llama-cpp-python" and _starts(LIVE)
    words = (
        [LIVE, "--model", str(model), "--host", host, "--port", str(PORT), "--n_ctx", "1024", "--model_alias", name]
        if live
        else ["testkit.upstream.process", kind, str(model), str(PORT), host, name]
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(f"http://{host}:{PORT}/v1/models")
        yield "live" if live else "ours"
    finally:
        process.kill()
        process.communicate()


def _starts(module: str) -> bool:
    words = [sys.executable, "-m", module, "--help"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _wait(url: str) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(url, timeout=60).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return


class Trial:
    """The page's machines, and what was tried so far."""

    def __init__(self, folder: Path, hub: Hub, models: Mapping[str, Path]) -> None:
        """`models` are the files that servers serve, by the draft models of the page that fit."""
        self.laptop, self.desk = (Device(name, folder / name, hub.url) for name in ("laptop", "desk"))
        self._models, self._alone = models, dict[tuple[Path, str], str]()
        self.tried: list[Tried] = []

    def pair(self) -> None:
        """Pair the two devices, as `edgellm pair` does."""
        now = datetime.now(UTC).replace(microsecond=0)
        for one, other in ((self.laptop, self.desk), (self.desk, self.laptop)):
            theirs, rights = other.trust, frozenset(Right)
            one.trust.peers.add(Peer(other.name, theirs.identity.certificate, rights, rights, (), now, now))
            one.trust.peers.record_seen(theirs.identity.id, Address(MACHINES[other.name], DEFAULT_PORT), rights)

    def run(self, steps: Sequence[Step], server_name: str, tier: str = "") -> None:
        """Run a block of the page: a gateway serves until the block ends. With a `tier`, doctor must name it."""
        with ExitStack() as closing:
            for step in steps:
                device = self.desk if step.machine == "desk" else self.laptop
                if step.serves:
                    lines = closing.enter_context(device.serving(step))
                    printed = "".join(lines)
                    problems = [] if _SERVING in printed else ["it does not serve"]
                else:
                    printed, code = device.run(step.command)
                    fails = any(line.startswith("error: ") for line in step.shown)
                    problems = [] if bool(code) is fails else [f"it ended with {code}"]
                problems += missing(step.shown, printed)
                if tier and " doctor " in step.command and f"verifies by {tier}" not in printed:
                    problems.append(f"it does not verify by {tier}")
                problems += self._wrong_reply(step.command, printed)
                if "Traceback" in printed:
                    problems.append("it prints a traceback")
                printed = printed.replace(str(device.home), "~")
                self.tried.append(Tried(server_name, step.command, printed, tuple(problems)))
                print(f"{'not ok' if problems else 'ok':<8}{server_name:<24}{step.command}", file=sys.stderr)

    def _wrong_reply(self, command: str, printed: str) -> list[str]:
        """Return what is wrong with a reply: it must be what the server's model writes alone."""
        words = shlex.split(command)
        if words[1] != "chat" or "error: " in printed:
            return []
        model, question = self._models[words[words.index("--draft") + 1]], words[-1]
        if (wanted := self._alone.get((model, question))) is None:
            with LLM.open("none", model, history=False) as alone:
                reply = alone.reply(question, temperature=0.0)
                wanted = b"".join(token.piece for token in reply).decode("utf-8", "replace")
            self._alone[model, question] = wanted
        said = wanted.strip()
        return [] if said in printed else [f"the reply is not {said!r}"]


def inside(folder: Path, only: str) -> list[Tried]:
    """Try the page in this process's own network."""
    page = PAGE.read_text(encoding="utf-8")
    direct, gateway, several = blocks(page)
    draft, verifier = resolve("edgellm-draft"), resolve("edgellm-verifier")
    others = folder / "other-draft.gguf", folder / "other-verifier.gguf"
    for source, path in zip((draft, verifier), others, strict=True):
        retokenized.write(source, path, retokenized.permuted)
    hub, names = Hub(), _drafts(page)
    files = dict(zip(names, (draft, others[0]), strict=True))
    for name, path in files.items():
        model = catalog().models[name]
        file = f"{model.repo_id.partition('/')[2].removesuffix('-GGUF')}-{model.quant}.gguf"
        data = path.read_bytes()
        hub.digests[file] = hashlib.sha256(data).hexdigest()
        hub.repos[model.repo_id] = {"README.md": b"words", file: data}
    with running(hub):
        trial = Trial(folder, hub, dict(zip(names, (verifier, others[1]), strict=True)))
        trial.run(direct[:1], "")
        for row, tier in ways(page).items():
            for kind in next((kinds for start, kinds in SERVERS.items() if row.startswith(start)), ()):
                if only in kind:
                    with server(kind, "gpu-box", verifier, "served/verifier") as how:
                        best = kind.partition("-")[2] if tier.startswith("score or") else tier
                        trial.run(direct[1:], f"{kind}, {how}", best)
        trial.pair()
        if only in "gateway":
            first, second = _named(several)
            with server("vllm-score", "gpu-box", verifier, first):
                trial.run(gateway, "gateway")
                with server("llama-server", "attic-box", others[1], second):
                    trial.run(several, "gateway to two")
    return trial.tried


def _drafts(page: str) -> list[str]:
    """Return the page's two draft models, in the order in which they come."""
    return list(dict.fromkeys(re.findall(r"(?:--draft|-m) ([a-z0-9.]+:[a-z0-9.]+)", page)))


def _named(steps: Sequence[Step]) -> list[str]:
    """Return the models of a gateway that its devices name, in the order in which they come."""
    return list(dict.fromkeys(re.findall(r"(?:desk|:\d+)#(\S+)", "\n".join(step.command for step in steps))))


@contextmanager
def results(only: str) -> Iterator[list[Tried]]:
    """Run this program in a network of its own, in which the page's machines have their names."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hosts, found = folder / "hosts", folder / "found.json"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {one}\n" for one, at in MACHINES.items()))
        setup = ["ip link set lo up", "ip link add home0 type veth peer name home1"]
        setup += [f"ip addr add {at}/24 dev home0" for at in MACHINES.values()]
        setup += ["ip link set home0 up", "ip link set home1 up", f"mount --bind {shlex.quote(str(hosts))} /etc/hosts"]
        words = [sys.executable, "-m", MODULE, "--only", only, "--inside", str(found)]
        script = " && ".join([*setup, f"exec {shlex.join(words)}"])
        subprocess.run(["unshare", "--net", "--mount", "sh", "-c", script], cwd=ROOT, check=True)
        yield [Tried(**one) for one in json.loads(found.read_text(encoding="utf-8"))]


def why_not() -> str:
    """Return why the page cannot be tried here; empty if it can."""
    if sys.platform != "linux" or shutil.which("unshare") is None or shutil.which("ip") is None:
        return "it needs Linux, util-linux and iproute2"
    script = "ip link add home0 type veth peer name home1"
    words = ["unshare", "--net", "--mount", "sh", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"no network of its own can be made: {done.stderr.strip()}" if done.returncode else ""


def table(found: dict[str, Any]) -> str:
    """Return a line for each command that was tried."""
    lines = [f"{'server':<24}{'as the page says':<18}command"]
    for one in found["tried"]:
        command = one["command"] if len(one["command"]) <= _WIDE else f"{one['command'][: _WIDE - 1]}…"
        lines.append(f"{one['server']:<24}{'no' if one['problems'] else 'yes':<18}{command}")
        lines += [f"{'':<24}{problem}" for problem in one["problems"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the name of a server, or gateway")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="server_page", help="of the result file")
    arguments = parser.parse_args()
    if arguments.inside:
        with tempfile.TemporaryDirectory() as folder:
            tried = inside(Path(folder), arguments.only)
        Path(arguments.inside).write_text(json.dumps([asdict(one) for one in tried]), encoding="utf-8")
        return
    if reason := why_not():
        sys.exit(reason)
    with results(arguments.only) as tried:
        found = {"tried": [asdict(one) for one in tried]}
    print(table(found), end="")
    print(f"written: {write(arguments.name, MODULE, found)}")
    sys.exit(any(one.problems for one in tried))


if __name__ == "__main__":
    main()
