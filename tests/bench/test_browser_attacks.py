"""A real browser: hostile text on our page, and hostile pages against the server."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.robustness.attack import browser
from edgellm.http import app
from tests.http.test_page import needs_browser


@needs_browser
def test_hostile_text_on_the_page_stays_text() -> None:
    assert browser.page_with_hostile_text(quick=True).wrong == ()


@needs_browser
def test_text_that_became_elements_would_be_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = Path(app.__file__).parent / "page"
    shutil.copytree(ours, tmp_path / "page")
    helpers = tmp_path / "page" / "dom.js"
    text = helpers.read_text(encoding="utf-8")
    assert "node.append(...content)" in text
    markup = 'content.map((one) => one.nodeType ? node.append(one) : node.insertAdjacentHTML("beforeend", one))'
    helpers.write_text(text.replace("node.append(...content)", markup), encoding="utf-8")
    monkeypatch.setattr(app, "_PAGE", tmp_path / "page")
    monkeypatch.setattr(browser, "HOSTILE", ("", "<img src=x>"))  # others would lead the page away
    assert browser.page_with_hostile_text(quick=True).wrong != ()


@needs_browser
def test_pages_of_other_origins_read_nothing_and_begin_no_reply() -> None:
    assert browser.hostile_pages(quick=True).wrong == ()
