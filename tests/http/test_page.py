"""The page in a real browser, headless. Set EDGELLM_SHOTS to a folder to look at it."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import cast

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from edgellm.engine import Message, Model
from edgellm.errors import InvalidOption
from edgellm.http.mesh_status import PlanOut, read_plan
from edgellm.http.model_host import ServedModel
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.services.client.verifier_client import RemotePending
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.loop import Event
from edgellm.spec.params import ReplyOptions
from edgellm.spec.stats import Stats
from edgellm.spec.stream import Reply
from edgellm.spec.types import Channel, Source
from tests.http.conftest import HOME, QUESTION, Ask, asker
from tests.http.test_streaming import Scripted, endless, failing, said

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)
PHONE = {"width": 390, "height": 780}
STAGE = {"first_layer": 1, "last_layer": 5, "load_s": 1.0, "wait_s": 0.1, "network_s": 0.2, "compute_s": 0.5}
PLAN = PlanOut.model_validate(
    {
        "ttft_s": 2.4,
        "advice": "Split it over desk and laptop: 2.40 s.",
        "stages": [
            {"device": "desk", **STAGE, "finish_s": 1.5},
            {"device": "laptop", **STAGE, "first_layer": 6, "last_layer": 9, "finish_s": 2.4},
        ],
    }
)
expect.set_options(timeout=60_000)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed here (Debian: chromium; or set CHROMIUM to its path)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        words = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=words)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that asks its own server alone, and reports no errors."""
    opened = browser.new_page(viewport={"width": 1100, "height": 760})
    opened.set_default_timeout(60_000)
    asked: list[str] = []
    complaints: list[str] = []

    def collect(message: ConsoleMessage) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    opened.on("console", collect)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    yield opened
    own = re.match(r"https?://[^/]+", opened.url)
    assert own is not None
    assert {url for url in asked if not url.startswith((own[0], "data:"))} == set()
    assert complaints == []
    opened.close()


def shot(page: Page, name: str, whole: bool = False) -> None:
    if folder := os.environ.get("EDGELLM_SHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=whole)


def say(page: Page, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


@needs_browser
def test_a_conversation_shows_who_wrote_each_word(page: Page, own: LLM) -> None:
    with HttpServer(HOME) as server:
        server.open(ServedModel(own, "edgellm-verifier"), PLAN)
        page.goto(server.url)
        expect(page.locator("#state")).to_have_text("ready", timeout=60_000)
        expect(page.locator("#model")).to_have_text("edgellm-verifier")
        say(page, QUESTION)
        expect(page.locator(".said").first).to_contain_text("tokens", timeout=60_000)
        reply = own.reply(QUESTION)
        tokens = list(reply)
        assert page.locator(".words").first.inner_text() == reply.summary.text
        spans = page.locator(".words span")
        assert spans.count() == len(tokens)
        titles = spans.evaluate_all("all => all.map(one => one.title)")
        assert all(
            re.match(r"(accepted|corrected|bonus|retrieved|verifier): .+ · round \d+", title) for title in titles
        )
        colours = set(spans.evaluate_all("all => all.map(one => getComputedStyle(one).color)"))
        assert len(colours) == len({title.split(":")[0] for title in titles})
        counts = page.locator("#legend .count").all_inner_texts()
        assert sum(int(count or 0) for count in counts) == len(tokens)
        expect(page.locator("#devices")).to_contain_text("this device")
        expect(page.locator("#plan-advice")).to_have_text(PLAN.advice)
        assert page.locator("#gantt rect").count() >= 8
        say(page, "And where is it?")
        expect(page.locator(".said")).to_have_count(2)
        expect(page.locator(".said").nth(1)).to_contain_text("tokens", timeout=60_000)
        spans.nth(2).hover()
        shot(page, "conversation")
        page.emulate_media(color_scheme="dark")
        shot(page, "conversation-dark")
        page.click("#new")
        expect(page.locator(".words")).to_have_count(0)


@needs_browser
def test_each_source_has_a_colour_and_a_count_of_its_own(page: Page) -> None:
    def script(_stats: Stats, _stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        for number, source in enumerate(Source, 1):
            yield from (replace(token, source=source) for token in said(*[b"word "] * number))

    with HttpServer(HOME) as server:
        server.open(ServedModel(cast(LLM, Scripted(script)), "made-up"))
        page.goto(server.url)
        say(page, "Who wrote it?")
        expect(page.locator(".said").first).to_contain_text("tokens")
        spans = page.locator(".words span")
        colours = spans.evaluate_all("all => all.map(one => getComputedStyle(one).color)")
        by_source = [source for number, source in enumerate(Source, 1) for _ in range(number)]
        assert len(colours) == len(by_source)
        assert len(set(zip(by_source, colours, strict=True))) == len(set(colours)) == len(Source)
        counts = page.locator("#legend .count").all_inner_texts()
        assert sorted(int(count or 0) for count in counts) == list(range(1, len(Source) + 1))


@needs_browser
def test_a_thought_is_folded_and_no_part_of_the_conversation(page: Page) -> None:
    asked: list[list[Message]] = []

    def script(_stats: Stats, _stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        for token in said(b"", b"<b>hm", b" hm", b""):
            yield replace(token, channel=Channel.THINKING)
        yield from said(b"On the", b" shelf.")

    class Asked(Scripted):
        def reply(self, *words: object, **options: object) -> Reply:
            asked.append(cast(list[Message], words[0]))
            return super().reply(*words, **options)

    with HttpServer(HOME) as server:
        server.open(ServedModel(cast(LLM, Asked(script)), "made-up"))
        page.goto(server.url)
        say(page, "Where?")
        expect(page.locator(".said").first).to_contain_text("tokens")
        thought = page.locator("details.thought")
        expect(thought.locator("summary")).to_have_text(re.compile(r"thought for \d+ s, \d tokens"))
        expect(thought.locator("div")).not_to_be_visible()
        expect(page.locator(".words")).to_have_text("On the shelf.")
        thought.locator("summary").click()
        expect(thought.locator("div")).to_have_text("<b>hm hm")
        answer, dim = (
            page.locator(where).evaluate("one => getComputedStyle(one).color") for where in ("body", "details.thought")
        )
        assert answer != dim
        shot(page, "thought")
        say(page, "And now?")
        expect(page.locator(".said")).to_have_count(2)
        expect(page.locator(".said").nth(1)).to_contain_text("tokens")
    assert [(turn.content, turn.thinking) for turn in asked[1]] == [
        ("Where?", ""), ("On the shelf.", ""), ("And now?", ""),
    ]  # fmt: skip


@needs_browser
def test_on_a_phone_nothing_sticks_out(page: Page, own: LLM) -> None:
    with HttpServer(HOME) as server:
        server.open(ServedModel(own, "a-model-with-quite-a-long-name-that-has-no-room-on-a-telephone"), PLAN)
        page.set_viewport_size({"width": PHONE["width"], "height": PHONE["height"]})
        page.goto(server.url)
        expect(page.locator("#state")).to_have_text("ready", timeout=60_000)
        say(page, QUESTION + " " + "w" * 200)
        expect(page.locator(".said").first).to_contain_text("tokens", timeout=60_000)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        for what in ("#send", ".said"):  # the end of the reply, and the way to go on, are in sight
            box = page.locator(what).bounding_box()
            assert box is not None
            assert 0 <= box["y"] <= box["y"] + box["height"] <= PHONE["height"]
        shot(page, "phone")
        shot(page, "phone-whole", whole=True)


@needs_browser
def test_stop_stops_the_work(page: Page) -> None:
    with HttpServer(HOME) as server:
        server.open(ServedModel(cast(LLM, Scripted(endless)), "made-up"))
        page.goto(server.url)
        say(page, "Go on")
        expect(page.locator(".words span").nth(20)).to_be_attached()
        expect(page.locator("#speed")).to_contain_text("tokens/s")
        shot(page, "writing")
        page.click("#stop")
        expect(page.locator(".said")).to_have_text("stopped")
        expect(page.locator("#send")).to_be_visible()
        _until(lambda: 'outcome="cancelled"} 1.0' in asker(server)("GET", "/metrics").body.decode())


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@needs_browser
def test_a_verifier_that_is_killed_is_reported_and_the_reply_goes_on(
    page: Page, f32_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, killed, rounds = RemotePending.result, threading.Event(), count()

    def waiting(self: RemotePending) -> object:
        if next(rounds) > 1:  # the prompt is read and the first verdict comes; the others wait for the verifier's end
            assert killed.wait(60)
        return result(self)

    monkeypatch.setattr(RemotePending, "result", waiting)
    with Model.load(f32_pair[1]) as model:
        verifier = VerifierServer(model, Address.parse("127.0.0.1:0"), context=512, sessions=2, threads=1)
        address = str(verifier.start())
        with LLM.open(f32_pair[0], address, threads=1) as pair, HttpServer(HOME) as server:
            server.open(ServedModel(pair, "edgellm-verifier", in_turns=False, options=ReplyOptions(retrieval="off")))
            page.goto(server.url)
            expect(page.locator(".device.up")).to_have_count(2)
            say(page, "Where is my mug?")  # to which the reply takes several questions
            expect(page.locator(".words span").first).to_be_attached()
            verifier.stop(0)
            killed.set()
            expect(page.locator(".notice")).to_contain_text("verifier is gone", timeout=60_000)
            expect(page.locator(".said").first).to_contain_text("tokens", timeout=60_000)
            assert page.locator(".words .draft, .words .parallel").count() > 0
            expect(page.locator("#state")).to_have_text("the verifier is gone", timeout=60_000)
            expect(page.locator(".device.down")).to_have_count(1)
            shot(page, "verifier-killed")


@needs_browser
def test_errors_and_a_missing_key_are_shown(page: Page) -> None:
    with HttpServer(HOME, key="k" * 43) as server:
        page.goto(server.url)
        expect(page.locator("#state")).to_contain_text("being loaded")
        server.open(ServedModel(cast(LLM, Scripted(failing)), "made-up"))
        expect(page.locator("#key-form")).to_be_visible(timeout=60_000)
        say(page, "Hello")
        expect(page.locator(".trouble").first).to_contain_text("API key is missing")
        shot(page, "key")
        page.fill("#key", "k" * 43)
        page.press("#key", "Enter")
        expect(page.locator("#state")).to_have_text("ready", timeout=60_000)
        say(page, "Hello")
        expect(page.locator(".words")).to_have_text("It goes")
        expect(page.locator(".notice")).to_have_text("Something happened.")
        expect(page.locator(".trouble").nth(1)).to_contain_text("verifier is gone")
        page.fill("#budget", "20")
        expect(page.locator("#budget-value")).to_have_text("20 %")
        server.stop(0)
        expect(page.locator("#state")).to_have_text("the server is gone", timeout=60_000)


def test_its_files_have_a_content_policy_and_no_other_file_is_served(ask: Ask) -> None:
    for path, kind in (("/", "text/html"), ("/page/page.css", "text/css"), ("/page/chat.js", "text/javascript")):
        answer = ask("GET", path)
        assert answer.status == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not re.search(rb"https?://(?!www\.w3\.org/)|//[a-z]+\.[a-z]+/", answer.body)
    for path in ("/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/app.py", "/page/"):
        assert ask("GET", path).status == 404


def test_a_link_from_another_page_may_lead_to_it(ask: Ask) -> None:
    follows = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert ask("GET", "/", None, follows).status == 200
    assert ask("GET", "/v1/models", None, follows).status == 403


def test_the_status_has_devices_and_links(ask: Ask) -> None:
    status = ask("GET", "/status").json
    assert status["model"] == "edgellm-verifier"
    assert status["link"] is None
    assert status["devices"] == []
    assert status["requests"]["places"] == 2


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"stages": []}', "null", json.dumps({"ttft_s": 1, "advice": "", "stages": [{}]}), "[" * 9999],
)
def test_a_file_without_a_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(InvalidOption, match="cannot be read"):
        read_plan(path)
    path.write_text(text)
    with pytest.raises(InvalidOption, match="holds no plan"):
        read_plan(path)
    path.write_text(json.dumps({**PLAN.model_dump(), "more": 1}))
    assert read_plan(path) == PLAN
