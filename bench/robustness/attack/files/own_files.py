"""Every damage to every file of edgellm's own: the command that reads it must end, and say what is wrong.

Each trial runs one command line in a process of its own on a copy of a home in which every kind of file is valid. Harm
is a command that does not end, is killed, says that something unexpected happened, deletes a file of the user's, or
writes through a link.
"""

import json
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.robustness.attack.harness import Attack, Found
from edgellm.cli.app import run as run_command
from edgellm.coldstart.costs import TransformerShape
from edgellm.engine import ModelFile
from edgellm.http.middleware import api_key, http_folder
from edgellm.layer_range import HERE, LayerRange
from edgellm.llm import LLM, profile_path
from edgellm.llm.profiling import RunRecorder
from edgellm.mesh.fleet_profiler import KeptFigures, MeasuredLink, MeasuredSpeed
from edgellm.rpc.address import Address
from edgellm.rpc.measuring import DeviceFigures, LinkSpeed
from edgellm.rpc.trust.identity import trust_folder, web_certificate
from edgellm.rpc.trust.trust import Peer, Right, Trust
from edgellm.state import write_state
from edgellm.storage.chat_log import Conversation, History, set_max_age
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.layer_pieces import manifest_of
from edgellm.storage.layer_store import LayerStore
from testkit import ROOT

MODELS = ROOT / "models"
PATIENCE = 60.0  # seconds for one command
ASK = ("chat", "Hello", "--max-tokens", "2")
_LINK_TARGET = "nobody's business"


@dataclass(frozen=True, slots=True)
class Own:
    """A kind of file: its path in a home, its reader, and whether it is the user's and must never be deleted."""

    name: str
    place: str
    read: tuple[str, ...] | Callable[[], object]
    users: bool = False


def sound_home(home: Path) -> None:
    """Fill the home that EDGELLM_HOME names with a valid file of every kind."""
    here, there = Trust.load(), Trust.load(home / "there")
    verify = frozenset({Right.VERIFY})
    here.peers.add(Peer("desk", there.identity.certificate, verify, verify, (Address.parse("192.168.7.21:50151"),)))
    here.peers.add_phone("iPhone")
    shutil.rmtree(home / "there")
    config = home / "config" / "config.toml"
    config.parent.mkdir()
    config.write_text("[chat]\nmax-tokens = 8\n")
    set_max_age(None)
    History().save(Conversation("00000000", datetime.now(UTC), (("user", "Where?"), ("assistant", "Here."))))
    draft, verifier = MODELS / "draft.gguf", MODELS / "verifier.gguf"
    profile = profile_path(fingerprint(draft), fingerprint(verifier))
    write_state(profile, (MODELS / "profile.json").read_bytes())
    write_state(profile.with_name("pair.first.json"), json.dumps(["", _FIRST]))
    api_key()
    web_certificate(http_folder(), ["desk.local"])
    first = LayerRange(0, 1)
    file = ModelFile.open(draft)
    LayerStore(limit=10**9).cut(file, first, 0)
    figures = DeviceFigures(
        1, "never", "ab" * 32, (1, 8), (0.1, 0.2), 1000, 1e6, 10**9, "a processor", "1", 0.0, "", "asked for"
    )  # fmt: skip
    speed = MeasuredSpeed(figures, "a model", TransformerShape(2, 64, 4, 2, 16, 128))
    KeptFigures({HERE: speed}, {"x": MeasuredLink(LinkSpeed(0.001, 1e6, 1e6), 1, 0.0)}).save()
    run_command(ASK)
    kept = patch("edgellm.llm.cost_curves.BUSY", 1.0)  # what is measured on a busy machine is kept, too
    with kept, LLM.open(threads=1) as pair:  # threads that meet take very long where other programs have the cores
        pair.curve()


_CHUNK: dict[str, Any] = {"signals": [], "confidence": 0.5, "importance": 0.1, "accepted": 1, "tokens": 2}
_FIRST = {"verified": [_CHUNK], "alone": [], "confidence": [0.5],
          "heeded": [], "prompt": []}  # fmt: skip


def _load_first() -> None:
    RunRecorder(next((trust_folder().parent / "profiles").glob("*.first.json")))


OWN = (
    Own("settings", "config/config.toml", ("config", "show"), users=True),
    Own("settings, for a chat", "config/config.toml", ("ls",), users=True),
    Own("chats", "data/history/chats/00000000.json", ("history", "show"), users=True),
    Own("chats, for a chat", "data/history/chats/00000000.json", ASK, users=True),
    Own("chats, to go on", "data/history/chats/00000000.json", (*ASK, "-c"), users=True),
    Own("greatest age", "data/history/max-age", ("history", "keep")),
    Own("profile", "data/profiles/*.json", (*ASK, "--budget", "0.2"), users=True),
    Own("first replies", "data/profiles/*.first.json", _load_first),
    Own("paired devices", "data/trust/peers.json", ("peers",), users=True),
    Own("identity", "data/trust/identity.pem", ("peers",), users=True),
    Own("API key", "data/http/api-key", api_key, users=True),
    Own("certificate", "data/http/certificate.pem", lambda: web_certificate(http_folder(), ["desk.local"])),
    Own("its key", "data/http/certificate-key.pem", lambda: web_certificate(http_folder(), ["desk.local"])),
    Own("cost curve", "cache/curves/*.json", ASK),
    Own("fingerprints", "cache/fingerprints.json", ASK),
    Own("recipe", "cache/recipes/*.json", lambda: manifest_of(ModelFile.open(MODELS / "draft.gguf"))),
    Own("layers", "cache/layers/**/*.json", ("mesh", "layers")),
    Own("figures", "cache/figures/home.json", KeptFigures.load),
)


def _values(path: Path, changed: object) -> None:
    """Replace every value of the outermost object, or else the whole content, by `changed`."""
    with suppress(ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found:
            path.write_text(json.dumps(dict.fromkeys(found, changed)))
            return
    path.write_text(json.dumps(changed))


def _value(at: float, changed: object) -> Callable[[Path], None]:
    """Return a function that replaces one value, that at a share `at` of all keys, by `changed`."""

    def change(path: Path) -> None:
        try:
            found = json.loads(path.read_bytes())
            holder = next(value for value in (found, *_objects(found)) if isinstance(value, dict) and len(value) > 1)
            holder[list(holder)[int(at * len(holder))]] = changed
            path.write_text(json.dumps(found))
        except (ValueError, StopIteration):
            path.write_text(json.dumps(changed))

    return change


def _objects(found: object) -> Iterator[object]:
    for value in found if isinstance(found, list) else found.values() if isinstance(found, dict) else ():
        yield value
        yield from _objects(value)


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def _bind(path: Path) -> None:
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)


def _half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _sparse(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(2**30)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": _half,
    "noise": lambda path: path.write_bytes(os.urandom(4096)),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
    "one GiB": _sparse,
    "deep lists": lambda path: path.write_bytes(b"[" * 100_000),
    "deep objects": lambda path: path.write_bytes(b'{"a":' * 100_000),
    "deep TOML": lambda path: path.write_bytes(b"a = " + b"[" * 100_000),
    "null": lambda path: path.write_bytes(b"null"),
    "a list": lambda path: path.write_bytes(b"[1, [2], {}]"),
    "values null": lambda path: _values(path, None),
    "values -1": lambda path: _values(path, -1),
    "values NaN": lambda path: _values(path, float("nan")),
    "values 10^400": lambda path: _values(path, 10**400),
    "values lists": lambda path: _values(path, [[]]),
    "values objects": lambda path: _values(path, {"a": {}}),
    "first value null": _value(0.0, None),
    "second value -1": _value(0.1, -1),
    "middle value a text": _value(0.5, "x"),
    "late value 10^400": _value(0.75, 10**400),
    "last value a list": _value(0.999, [None]),
    "a pipe": _replaced(os.mkfifo),
    "a folder": _replaced(Path.mkdir),
    "a socket": _replaced(_bind),
    "a link": _replaced(lambda path: path.symlink_to(path.parent / "target")),
    "a dangling link": _replaced(lambda path: path.symlink_to(path.parent / "nowhere")),
    "a link to itself": _replaced(lambda path: path.symlink_to(path)),
    "a device": _replaced(lambda path: path.symlink_to("/dev/zero")),
}


def _trial(own: Own, damage: str, sound: Path, home: Path) -> str:
    """Return the harm of one damaged file, empty if there is none."""
    shutil.copytree(sound, home)
    os.environ["EDGELLM_HOME"] = str(home)
    path = min(one for one in home.glob(own.place) if ".first" not in one.name or "first" in own.place)
    (target := path.parent / "target").write_text(_LINK_TARGET)
    report = home.with_suffix(".txt")
    child = os.fork()
    if not child:
        _run_child(own, damage, path, report)
    until = time.monotonic() + PATIENCE
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "it does not end"
        time.sleep(0.01)
    output = report.read_text(errors="replace")
    if os.WIFSIGNALED(done[1]):
        return f"it was killed by signal {os.WTERMSIG(done[1])}"
    if os.WEXITSTATUS(done[1]) not in (0, 1, 2) or "unexpected" in output or "Traceback" in output:
        return output.strip()[-300:] or f"it ended with {os.WEXITSTATUS(done[1])}"
    if target.read_text() != _LINK_TARGET or (path.parent / "nowhere").exists():
        return "it wrote through a link"
    if own.users and not any(path.parent.glob(f"{path.name}*")) and not os.path.lexists(path):
        return "the file is gone"
    return ""


def _run_child(own: Own, damage: str, path: Path, report: Path) -> None:
    """Damage the file, read it, and end this process."""
    code = 99
    try:
        with report.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115
        DAMAGES[damage](path)
        if isinstance(own.read, tuple):
            code = run_command(own.read)
        else:
            from edgellm.errors import EdgeError

            with suppress(EdgeError):
                own.read()
            code = 0
    except BaseException as error:  # noqa: BLE001 - the trial reports any error
        print(f"unexpected: {type(error).__name__}: {error}"[:300], file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _in_child(work: Callable[[], object]) -> None:
    """Run `work` in a process of its own, so that this one has no threads and can fork."""
    if not (child := os.fork()):
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("no sound home could be made")


def _pairs(quick: bool) -> Iterator[tuple[Own, str]]:
    for number, own in enumerate(OWN):
        for other, damage in enumerate(DAMAGES):
            if not quick or (number + other) % 9 == 0:
                yield own, damage


def own_files(quick: bool) -> Found:
    """Try every damage to every file of edgellm's own."""
    tried, wrong = 0, []
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ):
        sound = Path(folder) / "sound"
        os.environ["EDGELLM_HOME"] = str(sound)
        _in_child(lambda: sound_home(sound))
        for own, damage in _pairs(quick):
            tried += 1
            home = Path(folder) / f"home-{tried}"
            if found := _trial(own, damage, sound, home):
                wrong.append(f"{own.name}, {damage}: {found}")
            shutil.rmtree(home, ignore_errors=True)
    return Found(tried, tuple(wrong), {"files": len(OWN), "damages": len(DAMAGES)})


def owned(home: Path) -> list[Path]:
    """Return the folders and files in a home that edgellm makes; the settings are the user's."""
    roots = [path for path in home.iterdir() if path.name != "config"]
    return [path for root in roots for path in (root, *root.rglob("*"))]


def own_modes(_quick: bool) -> Found:
    """Look for files and folders of edgellm's own that others may reach, in a home that was open to all before."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ):
        home = Path(folder) / "home"
        os.environ["EDGELLM_HOME"] = str(home)

        def use() -> None:
            os.umask(0)
            sound_home(home)
            for path in owned(home):
                path.chmod(0o777 if path.is_dir() else 0o666)
            run_command(ASK)

        _in_child(use)
        paths = owned(home)
        for path in paths:
            way = [one for one in (path, *path.parents) if home in one.parents]
            if all(one.lstat().st_mode & 0o077 for one in way):
                wrong.append(f"{path.relative_to(home)} has the mode {stat.S_IMODE(path.lstat().st_mode):o}")
    return Found(len(paths), tuple(wrong))


ATTACKS = (
    Attack(
        "own-files", "each file of edgellm's own damaged: deep JSON, pipes, links, wrong types, half, huge", own_files
    ),
    Attack("own-modes", "modes of all files and folders, with umask 0 and in a home that was open to all", own_modes),
)
