"""A real browser: hostile text on our page, and hostile pages against the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.robustness.attack import browser
from edgellm.http import app as files
from tests.http.test_page import needs_browser


@needs_browser
def test_hostile_text_on_the_page_stays_text() -> None:
    assert browser.page_with_hostile_text(quick=True).wrong == ()


@needs_browser
def test_text_that_became_elements_would_be_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = Path(files.__file__).parent / "page"
    (tmp_path / "page").mkdir()
    for path in ours.iterdir():
        text = path.read_text(encoding="utf-8").replace("node.textContent = text", "node.innerHTML = text")
        (tmp_path / "page" / path.name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(files, "files", lambda _package: tmp_path)
    monkeypatch.setattr(browser, "HOSTILE", ("", "<img src=x>"))  # others would lead the page away
    assert browser.page_with_hostile_text(quick=True).wrong != ()


@needs_browser
def test_pages_of_other_origins_read_nothing_and_begin_no_reply() -> None:
    assert browser.hostile_pages(quick=True).wrong == ()
