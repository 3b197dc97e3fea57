"""A user's own servers are found by private files, asked with the user's key, and ended; no other process is."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.errors import ServerUnreachable
from edgellm.http.middleware import page_key
from edgellm.http.running_servers import RunningServer, recorded, running_servers
from edgellm.rpc.trust.identity import web_certificate
from edgellm.system import HAS_MODES, started_at, state_dir
from tests.http.conftest import configured

pytestmark = pytest.mark.usefixtures("home")


def files() -> list[Path]:
    return list((state_dir() / "servers").glob("*"))


def test_a_server_is_found_while_it_runs() -> None:
    assert running_servers() == []
    with recorded("127.0.0.1", 8081, None), recorded("::1", 8080, Path("/x.pem")):
        first, second = running_servers()
        assert (first.url, second.url) == ("https://[::1]:8080", "http://127.0.0.1:8081")
        assert first.process == os.getpid()
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 or not HAS_MODES for path in files())
    assert files() == []


@pytest.mark.parametrize(
    "damage",
    [
        {"started": 1.0},  # the number of the process was given to another one
        {"process": 2**22 + 5}, {"process": "1"}, {"process": -1}, {"port": 0}, {"host": None}, None,
    ],
)  # fmt: skip
def test_files_of_others_are_removed(damage: dict[str, object] | None) -> None:
    with recorded("127.0.0.1", 8081, None):
        (path,) = files()
        path.write_text("{" if damage is None else json.dumps(json.loads(path.read_text()) | damage))
        assert running_servers() == []
        assert files() == []


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield process
    process.kill()
    process.wait()


def test_only_the_process_that_was_meant_is_ended(child: subprocess.Popen[bytes]) -> None:
    started = started_at(child.pid)
    assert started is not None
    server = RunningServer(child.pid, started, "127.0.0.1", 1)
    assert replace(server, started=started - 100.0).stop(0.0)  # that one has ended already
    assert child.poll() is None
    server.stop(0.0)
    assert child.wait(60) != 0


@pytest.mark.parametrize("tls", [False, True])
def test_a_server_is_asked_with_the_users_key(tmp_path: Path, tls: bool) -> None:
    certificate, private_key = web_certificate(tmp_path, ["desk.local"])
    files = (certificate, private_key) if tls else None
    with configured(tls=files, key="k" * 43, page_key=page_key()) as server:
        server.models.open_without_model("There is none.")
        asked = RunningServer(os.getpid(), 0.0, server.reached_at, server.address.port, str(server.certificate or ""))
        status, answer = asked.ask("GET", "/status")
        assert (status, answer["models"]) == (200, [])
        assert asked.ask("POST", "/models/unload", {"model": "x"})[0] == 404
        other, _ = web_certificate(tmp_path / "other", ["desk.local"])
        with pytest.raises(ServerUnreachable, match="does not answer"):
            replace(asked, certificate=str(other)).ask("GET", "/status")
    with pytest.raises(ServerUnreachable, match=f"edgellm stop {asked.port}"):
        asked.ask("GET", "/status")
