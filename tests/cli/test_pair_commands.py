"""`edgellm pair` and `edgellm peers`: two users, each with a home of their own, on one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgellm.cli.commands import peers as pair_command
from edgellm.rpc.trust.peer_store import Peers
from edgellm.rpc.trust.trust import Trust
from tests.cli.conftest import Done
from tests.rpc.strangers import befriend, device

Edge = Callable[..., Done]
ROOT = Path(__file__).parents[2]


@contextmanager
def other_user(home: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`edgellm ...` as a process of its own, with another home."""
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm", *words],
        cwd=ROOT,
        env=os.environ | {"EDGELLM_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves this machine."""
    monkeypatch.setenv("EDGELLM_INTERFACE", "lo" if sys.platform != "darwin" else "lo0")


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Another user's screen with a code on it, and what it says."""
    words = ("pair", "--json", "--name", "desk", "--port", "0", "--grant", "verify,files")
    with other_user(tmp_path / "desk", *words) as process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())


@pytest.fixture
def phone() -> Trust:
    """A paired device called phone that is never there."""
    there = Trust.load()
    made = device(Path(os.environ["EDGELLM_HOME"]) / "phone")
    befriend(there, made, "verify files")
    there.peers.rename(made.identity.id, "phone")
    return made


@pytest.mark.parametrize("address", [True, False])
def test_two_users_pair_with_and_without_an_address(
    edge: Edge, shown: tuple[subprocess.Popen[str], dict[str, Any]], tmp_path: Path, address: bool
) -> None:
    process, said = shown
    assert said["grants"] == ["files", "verify"]
    assert said["addresses"][0].startswith("127.0.0.1:")
    words = (said["addresses"][0], said["code"]) if address else (said["code"].replace("-", " ").upper(),)
    done = edge("pair", *words, "--name", "phone", "--grant", "none")
    assert done.code == 0, done.err
    for line in (
        "paired with desk",
        "rights of desk here",
        "nothing",
        "desk then reads the prompts and replies of this device",
        "this device then knows which models desk has",
    ):
        assert line in " ".join(done.err.split())
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    there, here = json.loads(out), Peers().all()[0]
    assert there["name"] == "phone"
    assert (there["may_here"], there["may_there"]) == (["files", "verify"], [])
    assert (here.name, sorted(here.rights), sorted(here.granted)) == ("desk", [], ["files", "verify"])
    assert there["short"] == Trust.load().identity.id.short
    assert here.id == Trust.load(tmp_path / "desk" / "data" / "trust").identity.id


def test_a_wrong_code_ends_both_sides_with_an_error(
    edge: Edge, shown: tuple[subprocess.Popen[str], dict[str, Any]]
) -> None:
    process, said = shown
    wrong = "7-lamp-otter" if said["code"] != "7-lamp-otter" else "7-lamp-owl"
    done = edge("pair", said["addresses"][0], wrong)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "The code is wrong" in done.err
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "The code is wrong" in err
    assert "Traceback" not in err
    assert Peers().all() == []


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("7-lmap-otter",), 2, "Is it 'lamp'"),
        (("127.0.0.1:5",), 2, "The code is missing"),
        (("127.0.0.1:99999", "7-lamp-otter"), 2, "Port 99999"),
        (("127.0.0.1:1", "7-lamp-otter"), 1, "No device is waiting at 127.0.0.1:1"),
        (("--grant", "everything"), 2, "There is no right 'everything'"),
        (("--grant", ""), 2, "No right is given"),
        (("--name", "\x1b[31m"), 2, "not a valid device name"),
        (("--interface", "nothing0"), 2, "There is no interface 'nothing0'"),
    ],
)
def test_what_cannot_be_meant(edge: Edge, words: tuple[str, ...], code: int, says: str) -> None:
    done = edge("pair", *words)
    assert (done.code, done.err.count("\n"), done.out) == (code, 1, "")
    assert says in done.err


def test_a_code_that_nobody_shows_is_said(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_command, "SEARCH_SECONDS", 0.2)
    monkeypatch.setattr(pair_command, "LONGEST_SEARCH", 1.0)
    done = edge("pair", "7-lamp-otter")
    assert done.code == 1
    assert done.err.count("still looking (") == 3  # after 0.2, 0.4 and 0.8 seconds
    assert "edgellm pair HOST:PORT 7-lamp-otter" in done.err


def test_the_list_says_what_there_is_to_know(edge: Edge, phone: Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.rpc.discovery.peer_probe.MAX_BROWSE_SECONDS", 0.0)
    done = edge("peers")
    assert done.code == 0
    for word in ("phone", phone.identity.id.short, "files, verify", "just now"):
        assert word in done.out
    assert "No address of phone is known" in done.err
    row = edge("peers", "--json", "--no-ask").answer[0]
    assert (row["name"], row["short"], row["there"]) == ("phone", phone.identity.id.short, False)
    assert (row["may_here"], row["may_there"], row["round_trip_ms"]) == (["files", "verify"], [], None)


def test_rights_and_names_are_changed(edge: Edge, phone: Trust) -> None:
    assert edge("peers", "revoke", "phone", "verify", "--json").answer["may_here"] == ["files"]
    assert edge("peers", "grant", phone.identity.id.short, "all", "--json").answer["may_here"] == [
        "compute",
        "files",
        "verify",
    ]
    assert "is now called tablet here" in edge("peers", "rename", "phone", "tablet").err
    done = edge("peers", "rm", "tablet")
    assert "is unpaired" in done.err
    assert Peers().all() == []


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("rm",), 2, "needs a device"),
        (("rm", "attic"), 1, "No paired device is called 'attic'. Paired devices: phone"),
        (("rm", "phone", "now"), 2, "takes no value"),
        (("grant", "phone"), 2, "needs a value"),
        (("grant", "phone", "fly"), 2, "There is no right 'fly'"),
        (("rename", "phone", ""), 2, "not a valid device name"),
        (("list", "phone"), 2, "takes no device"),
    ],
)
def test_what_cannot_be_done(edge: Edge, phone: Trust, words: tuple[str, ...], code: int, says: str) -> None:
    before = Peers().path.read_bytes()
    done = edge("peers", *words)
    assert (done.code, done.err.count("\n")) == (code, 1)
    assert says in done.err
    assert Peers().path.read_bytes() == before


def test_a_damaged_list_is_told_and_not_touched(edge: Edge, phone: Trust) -> None:
    Peers().path.write_text("nonsense")
    for words in (("peers",), ("peers", "rm", "phone")):
        done = edge(*words)
        assert done.code == 1
        assert "is damaged" in done.err
    assert Peers().path.read_text() == "nonsense"
