"""`edgellm serve` as a process of its own: asked by `edgellm chat` and over HTTP, listed, stopped, logging."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.cli import http_serving
from edgellm.cli.commands import running
from edgellm.cli.commands.running import UNIT, unit_file
from edgellm.cli.server_options import HTTPOptions
from edgellm.engine import memory_fit
from edgellm.engine.hardware import Hardware
from edgellm.http.middleware import page_key
from edgellm.llm.model_loading import EngineConfig, place_pair
from edgellm.rpc.trust.identity import web_certificate
from edgellm.services.server.servers import WorkerServer
from testkit import free_port
from testkit.gguf.random_model import SHAPES, write
from tests.cli.conftest import Edge, ids
from tests.cli.serving import ROOT, Served, Start, start
from tests.cli.test_mesh_run import worker
from tests.programs import run_python

__all__ = ["start", "worker"]

QUESTION = [{"role": "user", "content": "Where is my mug?"}]
NEAR = ("chat", "--json", "Where is my mug?", "--max-tokens", "8")


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_verifies_tells_what_happens_and_stops_politely(edge: Edge, served: Served, number: signal.Signals) -> None:
    far, near = edge(*NEAR, "--verifier", served.address), edge(*NEAR)
    assert ids(far) == ids(near)
    assert far.lines[-1]["summary"]["bytes_up"] > near.lines[-1]["summary"]["bytes_up"] == 0
    served.wait_for("ends")
    served.process.send_signal(number)
    assert served.end() == (0, "")
    said = served.said
    assert "has stopped" in said
    assert not re.search("mug|Traceback", said)


def test_it_serves_and_stops_where_nobody_reads_what_it_says(edge: Edge) -> None:
    """As behind `| head -1`, or where the terminal was closed: what it says is said by the way."""
    words = [sys.executable, "-m", "edgellm", "serve", "--role", "verifier", "--port", "0", "--no-http"]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said += line
                if "Ctrl-C" in line:
                    break
            (address,) = re.findall(r"--verifier (\S+:\d+)", said)
            process.stderr.close()
            for _ in range(2):  # each of which it tells of
                done = edge(*NEAR, "--verifier", address)
                assert done.lines[-1]["summary"]["share_verified"] == 1.0
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()


# --- over HTTP ----------------------------------------------------------------------------------------------------


def ask(url: str, **body: object) -> Any:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def got(url: str, path: str) -> str:
    with urlopen(url.replace("/v1", path), timeout=60) as answer:
        return str(answer.read().decode())


def reply(url: str, model: str = "edgellm-verifier") -> Any:
    return ask(f"{url}/chat/completions", messages=QUESTION, model=model, max_tokens=8)


def tokens(reply: Any) -> list[int]:
    return [token["id"] for token in reply["edgellm"]["tokens"]]


def test_every_role_answers_lists_what_it_has_and_stops_gracefully(start: Start, edge: Edge) -> None:
    wanted = ids(edge(*NEAR))
    port = free_port()
    verifier, url = start("--role", "verifier", "--port", str(port))
    assert tokens(reply(url)) == wanted
    assert reply(url, "edgellm-draft")["model"] == "edgellm-draft"  # every model here can be named
    pair, url = start("--verifier", f"127.0.0.1:{port}", "--alias", "own=edgellm-verifier")
    edge("chat", "--verifier", url.split("/")[2], "Hi").told("speaks HTTP", code=1)
    found = reply(url, "own")
    assert tokens(found) == wanted
    assert found["model"] == "edgellm-verifier"  # as where both models are here
    assert min(found["edgellm"]["summary"][name] for name in ("bytes_up", "rtt_ms_p50")) > 0
    assert {"edgellm_peer_up 1.0", "edgellm_peer_rtt_seconds_count 1.0"} < {*got(url, "/metrics").splitlines()}
    assert {row["process"] for row in edge("ps", "--json").answer} == {pair.process.pid, verifier.process.pid}
    for server in (pair, verifier):
        server.process.send_signal(signal.SIGINT)
        assert server.end()[0] == 0


def test_a_base_model_continues_texts(start: Start, tmp_path: Path) -> None:
    write(path := tmp_path / "base.gguf", replace(SHAPES["tiny-draft"], n_ctx=512), "F32", chat_template="")
    server, url = start("-m", str(path))
    assert "base has no chat template: it continues texts, at /v1/completions" in server.said.replace("\n", " ")
    assert ask(f"{url}/completions", prompt="a b", max_tokens=4)["usage"]["completion_tokens"] == 4
    with pytest.raises(HTTPError, match="400") as refused:
        reply(url, "base")
    assert "this one only continues texts" in refused.value.read().decode()


def test_more_replies_at_once_than_fit_are_refused_to_who_asks_for_them(
    edge: Edge, draft_path: Path, verifier_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_fit, "_PLENTY", 0.0)
    one = place_pair(draft_path, verifier_path, EngineConfig(hardware=Hardware(n_ctx=1_024)))
    monkeypatch.setattr(memory_fit, "free_memory", lambda: one.taken["CPU"])
    edge("serve", "--http-port", "0", "--replies", "2").told("Give --replies 1", code=1)


def test_a_verifier_may_be_on_several_devices(start: Start, edge: Edge, worker: WorkerServer) -> None:
    server, url = start("--mesh", "here:1-5,desk:6-12", "--peer", f"desk={worker.address}")
    assert tokens(reply(url)) == ids(edge(*NEAR))
    mesh = json.loads(got(url, "/status"))["mesh"]
    assert [one["device"] for one in mesh["holders"]] == ["here", "desk"]
    server.process.send_signal(signal.SIGINT)
    assert server.end()[0] == 0


def test_a_server_is_listed_its_model_removed_and_it_is_ended(start: Start, edge: Edge) -> None:
    server, url = start("-m", "edgellm-draft", "--draft", "none")
    port = url.rpartition(":")[2].partition("/")[0]
    (listed,) = edge("ps", "--json").answer
    assert (listed["process"], str(listed["port"])) == (server.process.pid, port)
    assert [model["name"] for model in listed["models"]] == ["edgellm-draft"]
    edge("ps").told(f"{port} {server.process.pid} edgellm-draft")
    edge("stop", "edgellm-draft").told(f"port {port}")
    edge("ps").told("no model in memory")
    edge("stop", "edgellm-draft").told("is not in memory", code=1)
    assert reply(url, "edgellm-draft")["model"] == "edgellm-draft"
    edge("stop", port).told("has ended")
    assert server.end()[0] == 0
    edge("ps").told("No HTTP server of yours")
    assert edge("ps", "--json").answer == []
    edge("stop", "edgellm-draft").told("so edgellm-draft is not in memory", code=1)


def test_a_port_that_was_asked_for_is_not_exchanged_and_the_usual_one_is(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words in (("--http-port", str(port)), ("--role", "verifier", "--no-http", "--port", str(port))):
            assert edge("serve", *words).told(str(port), code=1).err.count("\n") == 1
        monkeypatch.setattr(http_serving, "HTTP_PORT", port)
        with http_serving.http_server(HTTPOptions(), 1, paired_only=False) as server:
            assert server is not None
            assert server.address.port != port
    assert f"Port {port} is in use" in capsys.readouterr().err


def test_the_link_for_all_addresses_names_one_that_can_be_opened(capsys: pytest.CaptureFixture[str]) -> None:
    with http_serving.http_server(HTTPOptions(http_host="0.0.0.0", http_port=0), 1, paired_only=False) as server:
        assert server is not None
        http_serving.print_urls(server)
    assert f"OpenAI's API: https://127.0.0.1:{server.address.port}/v1" in capsys.readouterr().err


def test_its_certificate_is_made_once_for_its_addresses(edge: Edge, tmp_path: Path) -> None:
    assert edge("serve", "--http-host", "192.0.2.1").told("Cannot listen at 192.0.2.1", code=2).err.count("\n") == 1
    certificate, private = web_certificate(tmp_path / "tls", ["127.0.0.1"])
    made = certificate.read_bytes()
    assert web_certificate(tmp_path / "tls", ["127.0.0.1"])[0].read_bytes() == made
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert web_certificate(tmp_path / "tls", ["other.local"])[0].read_bytes() != made


def test_the_link_has_the_pages_key_and_a_folder_that_cannot_be_used_stops_no_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def page() -> str:
        with http_serving.http_server(HTTPOptions(http_port=0), 1, paired_only=False) as server:
            assert server is not None
            http_serving.print_urls(server)
            return server.page_url.removeprefix(server.url)

    assert len(page_key()) >= 43
    assert page() == f"/#key={page_key()}"
    assert f"/#key={page_key()}" in capsys.readouterr().err.replace("\n", "")
    key = tmp_path / "home" / "data" / "http" / "page-key"
    key.unlink()
    key.symlink_to(tmp_path / "elsewhere")
    assert page() == "/"
    assert "The page stores no conversations" in capsys.readouterr().err


SECRET, KEY = "xylophone", "k" * 40


def test_requests_and_replies_are_logged_and_nothing_of_what_they_say(start: Start, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    server, url = start("--api-key-file", str(key), "--log-level", "debug")
    body = json.dumps({"messages": [{"role": "user", "content": f"Where is my {SECRET}?"}], "max_tokens": 4})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    urlopen(Request(f"{url}/chat/completions", body.encode(), headers), timeout=60).close()
    with pytest.raises(HTTPError, match="401") as refused:
        urlopen(Request(f"{url}/chat/completions?key={KEY}", body.encode(), {"Authorization": "Bearer wrong"}))
    refused.value.close()
    server.process.send_signal(signal.SIGTERM)
    server.end()
    log = server.said
    for line in (
        r"INFO +edgellm\.http\.middleware: POST '/v1/chat/completions' 200 in \d+ ms",
        r"WARNING +edgellm\.http\.middleware: POST '/v1/chat/completions' refused: 401",
        r"INFO +edgellm\.llm\.reply: reply of 4 tokens to a prompt of \d+: length",
        r"DEBUG +edgellm\.llm\.reply: ",
    ):
        assert re.search(line, log), log
    assert not re.search(f"{SECRET}|{KEY}|wrong", log)


def test_nobody_forges_a_line() -> None:
    done = run_python(r"""
        import logging
        from edgellm.cli.commands.serve import log_to_stderr
        log_to_stderr("info")
        logging.getLogger("edgellm.test").warning("lost: %s", "a device\n2026-01-01 INFO edgellm: all is well\x1b[2J")
        logging.getLogger("edgellm.test").debug("not this")
        logging.getLogger("another").info("nor that")
    """)
    (line,) = done.stderr.splitlines()
    assert "\\n2026" in line
    assert "\x1b" not in line


# --- at login -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a systemctl that writes its arguments to `asked`, and fails where there is a file `fails`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "systemctl"
    script.write_text(
        f'#!/bin/sh\nhere={folder}\necho "$*" >> $here/asked\n'
        "[ ! -e $here/fails ] || { cat $here/fails >&2; exit 1; }\n",
        encoding="utf-8",
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "a home"))
    return folder


def asked(tools: Path) -> list[str]:
    return (tools / "asked").read_text(encoding="utf-8").splitlines()


def test_a_unit_is_written_enabled_started_described_and_removed_again(edge: Edge, tools: Path, tmp_path: Path) -> None:
    unit = tmp_path / "config" / "systemd" / "user" / UNIT
    for words in (("--rle", "worker"), ("--role", "wrker"), ("--http-port", "x")):
        edge("service", "install", *words).told("See: edgellm serve --help", code=2)
    edge("service", "install", "--dry-run", "--http-port", "8081").told("would start: ")
    assert not (tools / "asked").exists()
    done = edge("service", "install", "--http-port", "8081", "--json")
    assert done.answer["command"] == [sys.executable, "-m", "edgellm", "serve", "--http-port", "8081"]
    text = unit.read_text(encoding="utf-8")
    assert f'ExecStart="{sys.executable}" "-m" "edgellm" "serve" "--http-port" "8081"\n' in text
    assert f'Environment="EDGELLM_HOME={tmp_path}/a home"\n' in text
    begun = ["show-environment", "daemon-reload", f"enable {UNIT}", f"restart {UNIT}"]
    assert asked(tools) == [f"--user {words}" for words in begun]
    edge("service", "uninstall").told()
    assert asked(tools)[-2:] == [f"--user disable --now {UNIT}", "--user daemon-reload"]
    assert not unit.exists()


def test_nothing_is_written_where_there_is_no_manager(edge: Edge, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tools / "fails").write_text("Failed to connect to bus: No medium found\n", encoding="utf-8")
    told = "there is no systemd for this user: Failed to connect", "edgellm serve"
    edge("service", "install").told(*told, code=1)
    assert not unit_file().exists()
    monkeypatch.setenv("PATH", "")
    edge("service", "install").told("systemctl is not on this system", code=1)


@given(st.lists(st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"])), min_size=1))
def test_words_come_through_a_units_quoting(words: list[str]) -> None:
    (line,) = [one for one in running.unit_text(words, {}).split("\n") if one.startswith("ExecStart=")]
    escapes = {"\\n": "\n", "\\t": "\t", '\\"': '"', "\\\\": "\\"}
    read = [
        re.sub(r"\\.", lambda found: escapes[found[0]], word).replace("%%", "%").replace("$$", "$")
        for word in re.findall(r'"((?:[^"\\]|\\.)*)"', line.removeprefix("ExecStart="))
    ]
    assert read == words
