"""Search every file for typed text, request information on paired devices without the key, and try a phone's code."""

import json
import os
import pty
import re
import secrets
import select
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from bench.robustness.attack.harness import Attack, Found
from edgellm.http.middleware import HttpConfig, Keys
from edgellm.http.server import HttpServer
from edgellm.rpc.address import Address
from edgellm.rpc.trust.identity import DeviceID
from edgellm.rpc.trust.trust import Peer, Right, Trust
from testkit import ROOT
from testkit.processes.http_server import serving

_API = "a" * 43
PHRASE = "my PIN is 4711 zebra"
PATIENCE = 120.0  # seconds for one answer
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>])")
_NO_PROFILE = ("--draft", "edgellm-draft", "--verifier", "edgellm-draft", "--budget", "0.5")
CHATS: tuple[tuple[str, ...], ...] = (
    (), _NO_PROFILE, ("--draft", "none"), ("--budget", "0.2"), ("--mesh", "here:1-12"), ("--retrieval", "off"),
)  # fmt: skip
SWITCHES = ("--no-history", "history off", "history clear", "history clear, a year later")


def _environment(home: Path) -> dict[str, str]:
    return {**os.environ, "EDGELLM_HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1", "EDGELLM_INTERFACE": "127.0.0.1"}


def _edge(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edgellm", *words], cwd=ROOT, env=_environment(home), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip


def _chat(home: Path, words: Sequence[str]) -> str:
    """Type the phrase at the prompt of a chat, three times, and leave; return the output."""
    own, other = pty.openpty()
    termios.tcsetwinsize(other, (40, 100))
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm", "chat", "--max-tokens", "4", *words], cwd=ROOT, stdin=other, stdout=other,
        stderr=other, env=_environment(home), start_new_session=True,
    )  # fmt: skip
    os.close(other)
    shown, until = "", time.monotonic() + PATIENCE

    def wait_for(text: str, count: int) -> None:
        nonlocal shown
        while _ESCAPES.sub("", shown).count(text) < count and time.monotonic() < until:
            if select.select([own], [], [], 0.2)[0]:
                shown += os.read(own, 65536).decode(errors="replace")

    with suppress(OSError):  # the other end is closed
        wait_for("type /help", 1)
        for number, line in enumerate((f"{PHRASE}\r", f"Say\\\r{PHRASE}\r", f" /{PHRASE}\r"), 1):
            os.write(own, line.encode())
            wait_for(" · ", number)
        while process.poll() is None and time.monotonic() < until:
            os.write(own, b"\x04")  # is lost if the prompt is not back yet
            if select.select([own], [], [], 0.5)[0]:
                shown += os.read(own, 65536).decode(errors="replace")
    if process.poll() is None:
        process.kill()
    process.wait()
    os.close(own)
    return shown


def _leftovers(home: Path) -> list[str]:
    """Return the files under a home that contain the phrase, or a part of it that reveals it."""
    return [
        str(path.relative_to(home))
        for path in home.rglob("*")
        if path.is_file() and any(part in path.read_bytes() for part in (b"PIN is", b"zebra"))
    ]


def typed_text(quick: bool) -> Found:
    """Type a phrase with each switch, and search every file for it afterwards."""
    tried, wrong, before = 0, [], 0
    for words in CHATS[: 2 if quick else None]:
        for switch in SWITCHES:
            tried += 1
            with tempfile.TemporaryDirectory() as folder:
                home = Path(folder)
                if switch == "history off":
                    _edge(home, "history", "off")
                shown = _chat(home, [*words, *([switch] if switch.startswith("--") else [])])
                case = f"{' '.join(words) or 'chat'}, {switch}"
                if " · " not in shown:
                    wrong.append(f"{case}: no reply came: {shown[-200:]!r}")
                if switch.startswith("history clear"):
                    before += len(_leftovers(home))
                    if "year" in switch:
                        _set_back(home)
                        _edge(home, "history", "keep", "365d")
                    else:
                        _edge(home, "history", "clear", "--yes")
                if left := _leftovers(home):
                    wrong.append(f"{case}: left in {', '.join(left)}")
    return Found(tried, tuple(wrong), {"files with the phrase before they were cleared": before})


def _set_back(home: Path) -> None:
    """Make everything in a home look as if it had been written two years ago."""
    two_years = 2 * 366 * 86_400
    for path in home.rglob("*"):
        os.utime(path, (time.time() - two_years,) * 2)


def _paired(home: Path, other: Path) -> list[str]:
    """Pair the device at `home` with another one; return all text that identifies the other one."""
    here, there = Trust.load(home / "data" / "trust"), Trust.load(other / "data" / "trust")
    rights = frozenset({Right.VERIFY})
    addresses = (Address.parse("192.168.77.21:50151"), Address.parse("[fd00:7::9]:50151"))
    for trust, name, certificate in (
        (here, "Grandmas attic", there.identity.certificate), (there, "desk", here.identity.certificate),
    ):  # fmt: skip
        trust.peers.add(Peer(name, certificate, rights, rights, addresses))
    device = there.identity.id
    return ["Grandmas attic", str(device), device.short, "192.168.77.21", "fd00:7::9"]


PATHS = ("/", "/health", "/status", "/metrics", "/v1/models", "/v1/models/x", "/openapi.json", "/page/chat.js",
         "/conversations",
         "/page/../status", "//status", "/STATUS", "/status/", "/health/../status", "/page/%2e%2e/status")  # fmt: skip
POSTS = ("/v1/chat/completions", "/v1/completions", "/status")
_HEADERS: tuple[dict[str, str], ...] = (
    {}, {"Authorization": "Bearer -"}, {"Authorization": "Bearer " + "k" * 43}, {"X-Forwarded-For": "127.0.0.1"},
    {"Host": "evil.example"}, {"Origin": "http://evil.example"},
)  # fmt: skip
_BODIES = (
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "stream": True},
    {"prompt": "Hello", "max_tokens": 2}, {"prompt": 5},
)  # fmt: skip


def _requested(url: str, quick: bool) -> Iterator[tuple[str, int, str]]:
    """Yield each request without a key, the status, and the whole answer."""
    for headers in _HEADERS[: 2 if quick else None]:
        requests = [Request(url + path, headers=headers) for path in PATHS]
        requests += [
            Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
            for path in POSTS
            for body in _BODIES[: 1 if quick else None]
        ]
        for request in requests:
            try:
                with urlopen(request, timeout=PATIENCE) as answer:
                    status, answered = answer.status, answer.read().decode() + str(answer.headers)
            except HTTPError as error:
                with error:
                    status, answered = error.code, error.read().decode() + str(error.headers)
            yield f"{request.get_method()} {request.full_url.removeprefix(url)} {headers}", status, answered


def paired_only(quick: bool) -> Found:
    """Send requests without a key over HTTP on loopback to every role that serves paired devices only."""
    tried, wrong = 0, []
    for role in ("verifier", "worker"):
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder) / "home"
            told = _paired(home, Path(folder) / "other")
            with serving(home, "--role", role, "--port", "0", "--paired-only", "--no-announce") as (_, url):
                for what, status, answered in _requested(url, quick):
                    tried += 1
                    open_ = re.match(r"GET /(?:page/chat.js|health|) ", what)
                    if status == 200 and not open_:
                        wrong.append(f"{role}, {what}: {status}, {answered[:100]!r}")
                    if any(secret.casefold() in answered.casefold() for secret in told):
                        wrong.append(f"{role}, {what}: it names a device")
                key = (home / "data" / "http" / "api-key").read_text().strip()
                with urlopen(Request(f"{url}/status", headers={"Authorization": f"Bearer {key}"})) as answer:
                    tried += 1
                    if answer.status != 200:
                        wrong.append(f"{role}: the key does not open it")
    return Found(tried, tuple(wrong))


def status_strangers(quick: bool) -> Found:
    """Request names of paired devices from servers that need no key, while their verifier comes and goes."""
    tried, wrong = 0, []
    with tempfile.TemporaryDirectory() as folder:
        home, other = Path(folder) / "home", Path(folder) / "other"
        told = _paired(home, other)
        for words in (["--role", "verifier", "--port", "0"], ["--role", "worker", "--port", "0"], []):
            with serving(home, *words, *(["--no-announce"] if words else [])) as (_, url):
                for what, _, answered in _requested(url, quick):
                    tried += 1
                    if any(secret.casefold() in answered.casefold() for secret in told):
                        wrong.append(f"{' '.join(words) or 'pair'}, {what}: it names a device: {answered[:200]!r}")
    return Found(tried, tuple(wrong))


def _opens(port: int, code: str, path: str = "/phones", **headers: str) -> bool:
    """Return whether a request with a phone's code is answered as its sender wants."""
    body = json.dumps({"code": code}).encode()
    try:
        request = Request(f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json", **headers})
        with urlopen(request, timeout=PATIENCE):
            return True
    except HTTPError as error:
        error.close()
        return False


def _codes_tried(door: HttpServer, guesses: int) -> Iterator[tuple[str, bool]]:
    """Yield each trial of a phone's code, and whether it did harm."""
    opens, new = partial(_opens, door.address.port), door.keys.new_code
    for key in ("-", _API, "x" * 43):
        yield "a code for a stranger", opens("", "/phones/code", Authorization=f"Bearer {key}")
    code = new()
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        yield f"a code from {origin}", opens(code, Origin=origin)
    with ThreadPoolExecutor(16) as several:
        yield "a code by many at once", sum(several.map(opens, [code] * Keys.GUESSES)) != 1
        yield from (("a code again", one) for one in several.map(opens, [code] * 64))
        code, wrong = new(), [DeviceID(secrets.token_bytes(32)).short for _ in range(guesses)]
        yield from (("a guess", one) for one in several.map(opens, wrong))
    yield "the code after the guesses", opens(code)
    with patch.object(Keys, "CODE_SECONDS", 0.0):
        yield "a code that is too old", opens(new())


def phone_codes(quick: bool) -> Found:
    """Try to pair a phone without the code on the screen, or twice with it."""
    with tempfile.TemporaryDirectory() as home, ExitStack() as opened:
        opened.enter_context(patch.dict("os.environ", {"EDGELLM_HOME": home}))
        door = HttpServer(Address.parse("127.0.0.1:0"), HttpConfig(key=_API, page_key="p" * 43))
        tried = list(_codes_tried(opened.enter_context(door), 50 if quick else 5000))
    return Found(len(tried), tuple(name for name, harmed in tried if harmed))


ATTACKS = (
    Attack("phone-codes", "the code that pairs a phone: guessed, used twice or late, by others", phone_codes),
    Attack("typed-text", "a phrase typed with --no-history, off, clear or after a year, in every file", typed_text),
    Attack("paired-only", "many HTTP requests on loopback without the key, while --paired-only is on", paired_only),
    Attack("status-strangers", "names, IDs and addresses of paired devices, requested without a key", status_strangers),
)
