"""`edgellm serve` over HTTP, as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from edgellm.cli import serving as options
from edgellm.cli.commands.serve import HTTPOptions
from edgellm.engine import ModelFile, memory_fit
from edgellm.engine.hardware import Hardware
from edgellm.http.middleware import page_key
from edgellm.http.server import Credentials, HttpConfig, HttpServer
from edgellm.llm.model_loading import EngineConfig, place_pair
from edgellm.mesh.layer_sources import WholeModel
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.trust.identity import web_certificate
from edgellm.services.server.servers import WorkerServer
from edgellm.storage.layers.store import LayerStore
from tests.cli.conftest import Done
from tests.cli.test_serve_command import WITH_LITTLE_MEMORY, Server
from tests.services.conftest import ANYWHERE

ROOT = Path(__file__).parents[2]
Start = Callable[..., tuple[Server, str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `edgellm serve ...` and returns it with the address of its API, or what else is `ready`."""
    running: list[Server] = []

    def call(
        *words: str, program: Sequence[str] = ("-m", "edgellm"), ready: str = r"OpenAI's API: (\S+)"
    ) -> tuple[Server, str]:
        running.append(server := Server("--http-port", "0", *words, program=program, ready=ready))
        return server, server.address

    yield call
    for server in running:
        server.close()


def ask(url: str, **body: object) -> Any:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


QUESTION = [{"role": "user", "content": "Where is my mug?"}]


@pytest.mark.parametrize("words", [(), ("--role", "verifier", "--port", "0")], ids=["pair", "verifier"])
def test_every_role_answers_and_stops_gracefully(
    start: Start, edge: Callable[..., Done], words: tuple[str, ...]
) -> None:
    server, url = start(*words)
    reply = ask(f"{url}/chat/completions", messages=QUESTION, model="edgellm-verifier", max_tokens=8)
    near = edge("chat", "--json", "Where is my mug?", "--max-tokens", "8").lines
    assert [token["id"] for token in reply["edgellm"]["tokens"]] == [row["id"] for row in near[:-1]]
    server.process.send_signal(signal.SIGINT)
    assert server.end()[0] == 0


def test_a_pair_writes_no_more_replies_at_once_than_fit(
    start: Start, draft_path: Path, verifier_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_fit, "_PLENTY", 0.0)
    hardware = Hardware(n_ctx=1_024)
    one = place_pair(draft_path, verifier_path, EngineConfig(hardware=hardware))
    free = str(one.taken["CPU"])
    _, url = start(program=("-c", WITH_LITTLE_MEMORY, free))
    with urlopen(url.replace("/v1", "/status"), timeout=60) as answer:
        assert json.loads(answer.read())["requests"]["places"] == 1
    words = (sys.executable, "-c", WITH_LITTLE_MEMORY, free, "serve", "--http-port", "0", "--replies", "2")
    refused = subprocess.run(words, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1
    assert "Give --replies 1" in " ".join(refused.stderr.split())


def test_a_pair_may_have_its_verifier_elsewhere(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    _, _ = start("--role", "verifier", "--port", str(port))
    _, url = start("--verifier", f"127.0.0.1:{port}")
    reply = ask(f"{url}/chat/completions", messages=QUESTION, max_tokens=8, model="edgellm-verifier")
    assert reply["model"] == "edgellm-verifier"  # as where both models are here
    assert reply["edgellm"]["summary"]["bytes_up"] > 0
    assert reply["edgellm"]["summary"]["rtt_ms_p50"] > 0
    with urlopen(url.replace("/v1", "/metrics"), timeout=60) as answer:
        metrics = answer.read().decode()
    assert "edgellm_peer_up 1.0" in metrics
    assert "edgellm_peer_rtt_seconds_count 1.0" in metrics


def test_a_pair_may_have_its_verifiers_layers_on_several_devices(
    start: Start, edge: Callable[..., Done], verifier_path: Path, tmp_path: Path
) -> None:
    cache = WeightCache(WholeModel(ModelFile.open(verifier_path), LayerStore(tmp_path / "layers", 10**9)))
    with WorkerServer(cache, ANYWHERE) as worker:
        server, url = start("--mesh", "here:1-5,desk:6-12", "--peer", f"desk={worker.address}")
        reply = ask(f"{url}/chat/completions", messages=QUESTION, model="edgellm-verifier", max_tokens=8)
        near = edge("chat", "--json", "Where is my mug?", "--max-tokens", "8").lines
        assert [token["id"] for token in reply["edgellm"]["tokens"]] == [row["id"] for row in near[:-1]]
        with urlopen(url.replace("/v1", "/status"), timeout=60) as answer:
            mesh = json.loads(answer.read())["mesh"]
        assert [one["device"] for one in mesh["holders"]] == ["here", "desk"]
        server.process.send_signal(signal.SIGINT)
        assert server.end()[0] == 0


@pytest.mark.parametrize(
    ("replies", "waiting", "room", "says"),
    [
        (2, 16, None, "2 replies are written at once (--replies), as each takes memory and slows the others; 16 more"),
        (2, 16, 2, "2 replies are written at once (--replies), as each takes memory"),
        (8, 0, 3, "3 replies are written at once (--replies), as there is no memory for more; 0 more requests wait"),
        (2, 16, 1, "1 reply is written at once (--replies), as there is no memory for more"),
    ],
)
def test_it_says_how_many_replies_it_writes_at_once(
    replies: int, waiting: int, room: int | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with HttpServer(Address.parse("127.0.0.1:0"), HttpConfig(replies=replies, waiting=waiting)) as server:
        options.print_urls(server, room)
    assert says in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--announce",), "--announce belongs to the roles verifier and worker"),
        (("--rpc",), "--rpc belongs to the role worker"),
        (("--host", "192.0.2.1"), "Use --http-host"),
        (("--keep", "5"), "--keep belongs to the role worker"),
        (("--role", "verifier", "--mesh", "here:1-12"), "--mesh belongs to the role pair"),
        (("--role", "worker", "--draft", "none"), "--draft belongs to the roles pair and verifier"),
        (("--mesh", "here:1-12,nobody"), "is not a part of a split"),
        (("--no-http",), "HTTP only"),
        (("-m", "edgellm-draft"), "--draft and --verifier"),
        (("--http-port", "70000"), "70000"),
        (("--replies", "0"), "replies is 0"),
        (("--tls-cert", "c.pem"), "--tls-key"),
        (("--http-host", "192.0.2.1"), "192.0.2.1"),
        (("--draft", "none.gguf"), "There is no file none.gguf"),
    ],
)
def test_impossible_options_are_refused(edge: Callable[..., Done], words: tuple[str, ...], says: str) -> None:
    done = edge("serve", *(() if "--http-port" in words else ("--http-port", "0")), *words)
    assert done.code in (1, 2)
    assert says in done.err
    assert "Traceback" not in done.err


def test_a_port_that_was_asked_for_is_not_exchanged_and_the_usual_one_is(
    edge: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = edge("serve", "--http-port", str(port))
        assert (done.code, str(port) in done.err) == (1, True)
        monkeypatch.setattr(options, "HTTP_PORT", port)
        with options.http_server(HTTPOptions(), 1, paired_only=False) as server:
            assert server is not None
            assert server.address.port != port
    assert f"Port {port} is in use" in capsys.readouterr().err


def test_off_this_machine_it_takes_tls_and_the_key(tmp_path: Path) -> None:
    certificate, private = web_certificate(tmp_path / "tls", ["127.0.0.1", "desk.local"])
    made = certificate.read_bytes()
    assert web_certificate(tmp_path / "tls", ["desk.local"])[0].read_bytes() == made
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    with HttpServer(
        Address.parse("127.0.0.1:0"),
        HttpConfig(credentials=Credentials("k" * 43, certificate, private), names=["desk.local"]),
    ) as server:
        assert server.url.startswith("https://")

        def curl(*words: str) -> str:
            where = f"desk.local:{server.address.port}:127.0.0.1"
            done = subprocess.run(
                ["curl", "-s", "--cacert", str(certificate), "--resolve", where, "-o", os.devnull, "-w", "%{http_code}",
                 *words], capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
            return done.stdout

        assert curl(f"{server.url}/v1/models") == "401"
        assert curl(f"{server.url}/v1/models", "-H", f"Authorization: Bearer {'k' * 43}") == "503"  # nothing is loaded
        assert curl(f"https://desk.local:{server.address.port}/health") == "503"
        assert curl(f"http://127.0.0.1:{server.address.port}/health") != "503"  # not in the clear
    assert web_certificate(tmp_path / "tls", ["other.local"])[0].read_bytes() != made


def test_the_link_has_the_pages_key_and_a_folder_that_cannot_be_used_stops_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    chosen = HTTPOptions(http_port=0)
    with options.http_server(chosen, 1, paired_only=False) as server:
        assert server is not None
        options.print_urls(server)
        said = capsys.readouterr().err.replace("\n", "")
        assert f"Web page: {server.url}/#key={page_key()}" in said
    key = tmp_path / "data" / "http" / "page-key"
    key.unlink()
    key.symlink_to(tmp_path / "elsewhere")
    with options.http_server(chosen, 1, paired_only=False) as server:
        assert server is not None
        assert server.page_url == f"{server.url}/"
    assert "The page stores no conversations" in capsys.readouterr().err
