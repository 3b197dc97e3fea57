"""The child that serves llama.cpp's RPC: where it listens, and that it never outlives what started it."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from edgellm.engine.hardware import Hardware
from edgellm.errors import EngineFailed
from edgellm.rpc_engine import backend


@pytest.mark.rpc
def test_it_listens_on_loopback_alone() -> None:
    running = backend.RpcServer(Hardware(threads=1))
    connections = psutil.Process(running.pid).net_connections(kind="inet")
    listening = {(at.laddr.ip, at.laddr.port) for at in connections if at.status == psutil.CONN_LISTEN}
    running.close()
    assert listening == {("127.0.0.1", running.port)}
    assert not running.alive


@pytest.mark.rpc
def test_a_server_without_its_device_does_not_start() -> None:
    with pytest.raises(EngineFailed, match="did not start"):
        backend.RpcServer(Hardware(threads=1), ("VOODOO0",))


def test_without_any_server_it_is_said_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "is_compiled_in", lambda: False)
    monkeypatch.setenv("PATH", "/none")
    assert backend.server_kind() == ("", "")
    with pytest.raises(EngineFailed, match="RPC"):
        backend.RpcServer(Hardware(threads=1))
    with pytest.raises(EngineFailed, match="RPC"):
        backend.add_server(1)


def test_a_program_of_llama_cpps_does_for_a_library_without_the_backend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in for it, which listens where it is told."""
    program = tmp_path / "rpc-server"
    program.write_text(
        f"#!{sys.executable}\nimport socket, sys, time\nwords = sys.argv[1:]\n"
        "host, port = words[words.index('-H') + 1], int(words[words.index('-p') + 1])\n"
        "with socket.create_server((host, port)): time.sleep(600)\n"
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(backend, "is_compiled_in", lambda: False)
    running = backend.RpcServer(Hardware(threads=1))
    (served,) = psutil.Process(running.pid).children()
    running.close()
    assert not served.is_running() or served.status() == psutil.STATUS_ZOMBIE
