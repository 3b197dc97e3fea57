"""The services of compose.yaml do together what its comment says. Docker is not needed: their commands run as processes
here, on other ports, and the Dockerfile copies what the wheel needs."""

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from testkit import free_port
from tests.cli.serving import Server

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Path]]:
    """The services as processes, each with a home of its own, in the order that `depends_on` asks for: yields the port
    of HTTP and the folder of the homes."""
    ports = {"50151": str(free_port()), "8080": str(free_port())}
    with ExitStack() as closing:
        for name in ("verifier", "pair"):
            serve, *words = [str(word) for word in SERVICES[name]["command"]]
            assert serve == "serve"
            if name == "verifier":
                words += ["--port", "50151"]  # the default, which the pair's command names
            for port, free in ports.items():
                words = [word.replace(port, free) for word in words]
            monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / name))
            closing.callback(Server(*words, ready="Ctrl-C").close)
        yield int(ports["8080"]), tmp_path


def test_the_pair_answers_over_https_and_the_verifier_checks(services: tuple[int, Path]) -> None:
    port, homes = services
    trusted = ssl.create_default_context(cafile=homes / "pair/data/http/certificate.pem")
    key = (homes / "pair/data/http/api-key").read_text(encoding="utf-8").strip()
    body = {
        "messages": [{"role": "user", "content": "Notes: The mug is on the shelf.\n\nWhere is the mug?"}],
        "require_verified": True,
    }
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=trusted, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    reply = json.load(connection.getresponse())
    connection.close()
    assert "choices" in reply, reply
    assert reply["choices"][0]["message"]["content"] == "The mug is on the shelf."


def test_the_pair_shares_the_network_of_the_service_that_publishes_its_port() -> None:
    assert list(SERVICES) == ["verifier", "pair"]
    assert SERVICES["pair"]["network_mode"] == "service:verifier"
    port = SERVICES["pair"]["command"][-1]
    assert SERVICES["verifier"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert {name.partition(":")[0] for one in SERVICES.values() for name in one["volumes"]} == set(COMPOSE["volumes"])


def test_the_dockerfile_copies_what_is_there_and_nothing_that_is_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        source
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / source).exists() for source in copied)
