"""A verifier that sleeps in the middle of a reply, and machines that are kept awake while they work for others."""

from contextlib import closing
from pathlib import Path

import pytest

from edgellm.http import replies
from edgellm.llm import LLM
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.link import Endpoint
from edgellm.services.client.stage_client import RemoteDevice
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server import mesh_service, verification_service
from edgellm.services.server.servers import WorkerServer
from edgellm.sleeping import KeepAwake, waking
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import Chunk, Ids
from tests.http.conftest import asker, conversation, serving
from tests.mesh.household import Cut
from tests.services.conftest import ANYWHERE
from tests.services.meshing import PROMPT, replying
from tests.waiting import until


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What programs in the place of the systems' own have written."""
    log = tmp_path / "log"
    for name in ("systemd-inhibit", "caffeinate"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho begun >> {log}\ncat\necho ended >> {log}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return log


@pytest.fixture
def log(written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    awake = KeepAwake("linux")
    awake.begin(0.0, pytest.fail)
    for module in (verification_service, mesh_service, replies):
        monkeypatch.setattr(module, "AWAKE", awake)
    return written


def test_a_verifier_is_kept_awake_for_a_verdict_not_a_session(remote: RemoteVerifier, prompt: Ids, log: Path) -> None:
    with closing(remote.open(GenerationState())) as session:
        session.submit(prompt, Chunk()).result()
        until(lambda: log.exists() and log.read_text() == "begun\nended\n")


def test_a_worker_is_kept_awake_for_requests_and_not_for_a_stage(verifier_cut: Cut, log: Path) -> None:
    with (
        WorkerServer(WeightCache(verifier_cut.layers), ANYWHERE) as worker,
        replying([RemoteDevice(Endpoint("a", worker.address))], verifier_cut.work) as (_, session),
    ):
        session.submit(PROMPT, Chunk()).result()
        until(lambda: log.exists() and log.read_text().endswith("ended\n"))


def test_a_server_is_kept_awake_for_a_reply(pair: LLM, log: Path) -> None:
    with serving(pair, "edgellm-verifier") as server:
        assert asker(server)("POST", "/v1/chat/completions", conversation(max_tokens=8)).status == 200
        until(lambda: log.read_text() == "begun\nended\n")


# --- the inhibitor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_it_is_kept_awake_until_all_work_ends(written: Path, system: str) -> None:
    awake, told = KeepAwake(system), list[str]()
    with awake.working():
        """Nothing is done before it is wanted."""
    awake.begin(0.0, told.append)
    with awake.working(), awake.working():
        awake.touch()
        until(lambda: written.exists() and written.read_text() == "begun\n")  # a shell opens a file before it writes
    until(lambda: written.read_text() == "begun\nended\n")
    assert not told


def test_if_it_cannot_stay_awake_it_works_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for system in ("linux", "plan9"):
        awake, told = KeepAwake(system), list[str]()
        awake.begin(0.0, told.append)
        with awake.working():
            until(lambda told=told: bool(told))  # type: ignore[misc]
        awake.touch()
        assert len(told) == 1
        assert told[0].startswith("This machine may fall asleep while it works for others")


LINUX = "Supports Wake-on: pumbg\n\tWake-on: {}\n"
ARMED = "HID Keyboard Device\n{}\n"


@pytest.mark.parametrize(
    ("system", "printed", "state", "says"),
    [
        ("linux", LINUX.format("g"), "ok", "wakes this machine by lan0 (wired)"),
        ("linux", LINUX.format("d"), "note", "sudo ethtool -s lan0 wol g"),
        ("linux", "", "note", "unknown"),
        ("darwin", " womp                 1\n", "ok", "wakes"),
        ("darwin", " womp                 0\n", "note", "sudo pmset -a womp 1"),
        ("win32", ARMED.format("Intel(R) Ethernet Connection I219-V"), "ok", "wakes"),
        ("win32", ARMED.format(""), "note", "powercfg /deviceenablewake"),
        ("plan9", "", "note", "unknown"),
    ],
)
def test_doctor_says_by_what_it_can_be_woken(tmp_path: Path, system: str, printed: str, state: str, says: str) -> None:
    power = tmp_path / "lan0" / "device" / "power"
    power.mkdir(parents=True)
    (power / "wakeup").write_text("enabled\n")
    found = waking("lan0", system, lambda _words: printed, tmp_path)
    assert found[0] == state
    assert says in " ".join(found)
    if system == "linux":  # the card would, but the system does not let it
        (power / "wakeup").write_text("disabled\n")
        (tmp_path / "lan0" / "wireless").mkdir()
        assert waking("lan0", system, lambda _words: printed, tmp_path)[2].endswith("wowlan enable magic-packet")
        assert waking("lo", system, lambda _words: printed, tmp_path)[0] == "note"
