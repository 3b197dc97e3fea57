"""A model hub on loopback, small enough to misbehave on demand, and everything set to use it."""

import hashlib
import json
import re
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from huggingface_hub import constants

from edgellm.storage.hub.download import OnTransfer
from edgellm.storage.hub.pull import DownloadPlan, plan
from edgellm.storage.model_files import list_models
from testkit.upstream.loopback import LoopbackHandler, LoopbackServer

REPO = "ann/tiny-GGUF"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Pulled(NamedTuple):
    plan: DownloadPlan
    path: Path
    sent: int


def pull(name: str, progress: OnTransfer = lambda _: None) -> Pulled:
    planned = plan(name)
    return Pulled(planned, *planned.fetch(progress))


def tiny_gguf(elements: int = 1000, fill: int = 0) -> bytes:
    """A sound GGUF with one metadata entry and one F32 tensor of `elements` values."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    head += text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    head += text(b"x") + struct.pack("<IQIQ", 1, elements, 0, 0)
    head += b"\0" * (-len(head) % 32)
    return head + bytes([fill]) * (4 * elements)


@dataclass
class Hub:
    """`repos[repo_id][file]` are the bytes it serves. The knobs below make it misbehave.

    It answers as the hub does: a list of files with sizes and SHA-256, files behind a redirect, redirects from former
    names of a repository, and codes and reasons of errors in headers.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, tuple[str, dict[str, bytes]]] = field(default_factory=dict)  # name -> commit, files
    renamed: dict[str, str] = field(default_factory=dict)  # former name -> name
    moved: int = 307  # the status that redirects from a former name
    gated: dict[str, str] = field(default_factory=dict)  # repository -> token with access to its files
    names_only: bool = False  # list files without sizes and hashes, as some mirrors do
    cut_after: list[int] = field(default_factory=list)  # for the next file answers: close after so many bytes
    ignore_range: bool = False
    announce: int | None = None  # a size to lie with
    status: int | None = None  # answer this to everything
    listing: tuple[bytes, str] | None = None  # what it lists a repository's files by, and its content encoding
    chatter: int = 0  # bytes behind each error status
    sent: list[tuple[str, int, int]] = field(default_factory=list)  # (file, first byte, bytes sent)
    tokens: set[str] = field(default_factory=set)  # when not empty, one of them is needed
    url: str = ""
    files_at: str = ""  # the host to which it sends for files
    seen: set[str] = field(default_factory=set)  # the tokens that it was given

    def bytes_sent(self) -> int:
        return sum(count for _, _, count in self.sent)


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    with _HubServer(hub) as server:
        hub.url = server.url
        yield hub


class _HubServer(LoopbackServer):
    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        super().__init__(_Handler)


class _Handler(LoopbackHandler):
    @property
    def state(self) -> Hub:
        hub: Hub = self.owner.hub
        return hub

    def do_HEAD(self) -> None:  # noqa: N802
        self.answer(with_body=False)

    def get(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        hub = self.state
        if hub.status is not None:
            return self.fail(hub.status)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        hub.seen.add(token)
        if token and hub.tokens and token not in hub.tokens:
            return self.fail(401, message="Invalid credentials in Authorization header")
        if hub.tokens and not token:
            return self.fail(401, "RepoNotFound")
        for former, now in hub.renamed.items():
            if f"/{former}/" in self.path or self.path.split("?")[0].endswith(f"/{former}"):
                return self.redirect(hub.moved, self.path.replace(f"/{former}", f"/{now}", 1))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/?]+)(?:/revision/([^/?]+))?(\?.*)?", self.path):
            return self.model_info(match[1], match[2], match[3] == "?blobs=true" and not hub.names_only)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path):
            repo = match[1]
            if repo in hub.gated and not token:
                return self.fail(401, "GatedRepo", f"Access to model {repo} is restricted. Please log in.")
            if repo in hub.gated and token != hub.gated[repo]:
                return self.fail(403, "GatedRepo", f"Access to model {repo} is restricted: awaiting a review.")
            if with_body:
                return self.redirect(302, f"{hub.files_at}/storage{self.path}")
            return self.file(repo, match[2], match[3], with_body)
        if match := re.fullmatch(r"/storage/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path):
            return self.file(match[1], match[2], match[3], with_body)
        return self.fail(404)

    def redirect(self, status: int, place: str) -> None:
        self.send(status, b"", {"Location": place})

    def model_info(self, repo: str, revision: str | None, blobs: bool) -> None:
        if repo not in self.state.repos:
            return self.fail(404, "RepoNotFound")
        if revision not in (None, "main", COMMIT, *self.state.revisions):
            return self.fail(404, "RevisionNotFound")
        commit, files = self.state.revisions.get(revision or "", (COMMIT, self.state.repos[repo]))
        siblings = [{"rfilename": file, **(self.described(data) if blobs else {})} for file, data in files.items()]
        body, encoding = json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode(), "identity"
        body, encoding = self.state.listing or (body, encoding)
        return self.send(200, body, {"Content-Encoding": encoding})

    def described(self, data: bytes) -> dict[str, Any]:
        size = len(data) if self.state.announce is None else self.state.announce
        large = {"sha256": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 134}
        return {"size": size, "blobId": "0" * 40, "lfs": large}

    def file(self, repo: str, commit: str, name: str, with_body: bool) -> None:
        files = dict(self.state.revisions.values()).get(commit, self.state.repos.get(repo, {}))
        data = files.get(name)
        if data is None:
            return self.fail(404, "EntryNotFound")
        start = 0
        if (asked := self.headers.get("Range")) and not self.state.ignore_range:
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])  # type: ignore[index]
            if start >= len(data):
                return self.fail(416)
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        length = len(data) - start
        if self.state.announce is not None and not with_body:
            length = self.state.announce
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if with_body:
            body = memoryview(data)[start:]
            if self.state.cut_after:
                body = body[: self.state.cut_after.pop(0)]
                self.close_connection = True
            self.state.sent.append((name, start, len(body)))  # before the client can know
            self.wfile.write(body)
        return None

    def fail(self, status: int, code: str = "", message: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        body = bytes(self.state.chatter) if self.command == "GET" else b""
        self.send(status, body, {name: said for name, said in headers.items() if said})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub with one repository, and everything set to use it."""
    files = {
        "README.md": b"words",
        "tiny-Q4_K_M.gguf": tiny_gguf(50_000, 1),
        "tiny-Q8_0.gguf": tiny_gguf(90_000, 2),
        "mmproj-tiny-f16.gguf": tiny_gguf(10),
    }
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with running(Hub({REPO: files})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def names() -> list[str]:
    """The names of the pulled models."""
    return [model.name for model in list_models() if model.origin == "hub"]
