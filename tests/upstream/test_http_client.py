"""Addresses and keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.errors import InvalidOption
from edgellm.llm.model_loading import is_remote
from edgellm.upstream.http_client import ServerURL, read_key


@pytest.mark.parametrize(
    ("text", "base", "model"),
    [
        ("http://gpu-box:8000", "http://gpu-box:8000", ""),
        ("http://gpu-box:8000/", "http://gpu-box:8000", ""),
        ("https://box.example/v1/", "https://box.example", ""),
        ("https://box.example/llm/v1#org/model-7b", "https://box.example/llm", "org/model-7b"),
        ("http://[::1]:8000", "http://[::1]:8000", ""),
    ],
)
def test_addresses(text: str, base: str, model: str) -> None:
    url = ServerURL.parse(text)
    assert (str(url), url.model) == (base, model)
    assert is_remote(text)


@pytest.mark.parametrize(
    "text", ["http://", "ftp://box", "http://box:port", "http://me:secret@box", "http://box?key=1"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidOption) as raised:
        ServerURL.parse(text)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "loopback", "encrypted"),
    [("http://127.0.0.1:1", True, False), ("https://localhost", True, True), ("http://box", False, False)],
)
def test_what_leaves_the_machine(text: str, loopback: bool, encrypted: bool) -> None:
    url = ServerURL.parse(text)
    assert (url.is_loopback, url.is_encrypted) == (loopback, encrypted)


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGELLM_VERIFIER_KEY", raising=False)
    assert read_key() == ""
    monkeypatch.setenv("EDGELLM_VERIFIER_KEY", "from-the-environment")
    assert read_key() == "from-the-environment"
    path = tmp_path / "key"
    path.write_text("from-a-file\n")
    assert read_key(path) == "from-a-file"
    for bad in ("", "two words", "line\nline"):
        path.write_text(bad)
        with pytest.raises(InvalidOption) as raised:
            read_key(path)
        assert "words" not in str(raised.value)
    with pytest.raises(InvalidOption, match="no key file"):
        read_key(tmp_path / "missing")
