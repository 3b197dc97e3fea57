"""The page in a real browser, headless. `python -m tools.page_shots` makes pictures of its states."""

import hashlib
import re
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import replace
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from playwright.sync_api import BrowserContext, ConsoleMessage, Page, expect

from edgellm.engine import Model
from edgellm.http.model_host import ServedModel
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.rpc.trust.trust import Peers
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.params import ReplyOptions
from edgellm.spec.protocols import Session
from edgellm.spec.stats import Summary
from edgellm.spec.types import Channel, Event, Source, Verdict
from edgellm.storage.chat_log import History
from testkit.browser import page_states
from testkit.browser.page_states import CHROMIUM, KEY, SCHEMES, SIZES, STATES, opened_browser, page_in_state, window
from tests.http.conftest import HOME, QUESTION, Ask, asker, configured, serving
from tests.http.test_streaming import Scripted, endless, failing, said
from tests.waiting import until

COLOURS = ["color-contrast"]
LOOKS: list[tuple[str, str, list[str]]] = [
    ("wide", "light", []), ("wide", "dark", COLOURS), ("narrow", "dark", []), ("narrow", "light", COLOURS),
]  # fmt: skip
PANELS = {"settings": "right", "mesh": "right", "conversations": "left"}
OFTEN = {"streaming", "code", "provenance", "error", "pairing", *PANELS}  # in each run, others every night
PAGE_FILES = (
    ("/page/page.css", "text/css"), ("/page/chat.js", "text/javascript"), ("/page/vendor/marked.js", "text/javascript"),
    ("/page/app.webmanifest", "application/manifest+json"), ("/page/icon.png", "image/png"),
)  # fmt: skip
expect.set_options(timeout=60_000)
WITHOUT = "no Chromium is installed here (Debian: chromium; or set CHROMIUM to its path)"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)


@pytest.fixture(scope="module")
def context() -> Iterator[BrowserContext]:
    """A window, which takes as long to open as a test with its page."""
    if CHROMIUM is None:
        pytest.skip(WITHOUT)
    with opened_browser() as browser, window(browser, "wide", "light") as opened:
        yield opened


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A page that asks its own server alone, of its state ten times a second, and reports no errors."""
    opened = context.new_page()
    opened.set_default_timeout(60_000)
    opened.add_init_script("const wait = setTimeout; setTimeout = (then, ms) => wait(then, ms === 2000 ? 100 : ms)")
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
    opened.evaluate("localStorage.clear()")
    opened.close()


def say(page: Page, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def talk(page: Page, text: str, number: int = 1) -> None:
    """Say it, and wait for the end of the reply, which is the page's one of this `number`."""
    say(page, text)
    expect(page.locator(".said")).to_have_count(number)
    expect(page.locator(".said").nth(number - 1)).to_contain_text("tokens")


def test_a_conversation_shows_who_wrote_each_word(page: Page, own: LLM, server: HttpServer) -> None:
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#title-model")).to_have_text("edgellm-verifier")
    expect(page.locator("[data-models]:visible")).to_contain_text("toy pair")
    expect(page.locator("#examples")).to_be_hidden()  # it cannot answer them
    talk(page, QUESTION)
    reply = own.reply(QUESTION)
    tokens = [token for token in reply if token.piece]
    assert page.locator(".words").first.inner_text() == reply.summary.text
    words = page.locator(".words .word")
    assert words.count() == len(tokens)
    assert "".join(words.all_text_contents()) == reply.summary.text
    words.nth(2).hover()
    expect(page.locator("#who")).to_have_text(re.compile(r"(accepted|corrected|bonus|retrieved|verifier) .+round \d+"))
    page.mouse.move(5, 5)
    expect(page.locator("#who")).to_be_hidden()
    page.locator(".words").first.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    expect(words.nth(1)).to_be_focused()
    expect(page.locator("#who")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#who")).to_be_hidden()
    words.nth(0).click()
    expect(page.locator("#who")).to_be_visible()
    counts = page.locator("#legend .count").all_inner_texts()
    assert sum(int(count or 0) for count in counts) == len(list(own.reply(QUESTION)))
    expect(page.locator("#costs-rows tr.now th")).to_have_text("everything")
    expect(page.locator("#devices")).to_contain_text("this device")
    expect(page.locator("#plan")).to_be_hidden()
    talk(page, "And where is it?", 2)
    page.click("#new")
    expect(page.locator(".words")).to_have_count(0)
    page.fill("#budget", "20")
    expect(page.locator("#budget-value")).to_have_text("20 %")


def test_the_marks_of_sources_are_told_apart_also_without_colour(page: Page) -> None:
    def script(_stats: Summary, _stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        for number, source in enumerate(Source, 1):
            yield from (replace(token, source=source) for token in said(*[b"word "] * number))

    with serving(Scripted(script), "made-up") as server:
        page.goto(server.url)
        talk(page, "Who wrote it?")
        plain = page.locator(".words .word").evaluate_all("all => all.map(one => getComputedStyle(one).color)")
        assert len(set(plain)) == 1, "most of the time people read"
        page.locator("button.who").click()
        expect(page.locator("#colours")).to_be_checked()
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            looks: dict[str, Any] = {
                source: page.locator(f".words .{source}").first.evaluate(
                    "one => { const look = getComputedStyle(one); return [look.color, look.textDecorationLine,"
                    " look.textDecorationStyle, look.textDecorationThickness]; }"
                )
                for source in Source
            }
            assert len({look[0] for look in looks.values()}) == len(Source)
            assert len({tuple(look[1:]) for look in looks.values()}) == len(Source), "a line of its own for each"
        counts = page.locator("#legend .count").all_inner_texts()
        assert sorted(int(count or 0) for count in counts) == list(range(1, len(Source) + 1))


def test_a_thought_is_folded_and_no_part_of_the_conversation(page: Page) -> None:
    def script(_stats: Summary, _stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        for token in said(b"", b"<b>hm", b" hm", b""):
            yield replace(token, channel=Channel.THINKING)
        yield from said(b"On the", b" shelf.")

    pair = Scripted(script)
    with serving(pair, "made-up") as server:
        page.goto(server.url)
        talk(page, "Where?")
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
        talk(page, "And now?", 2)
    assert [(turn.content, turn.thinking) for turn in pair.asked[1]] == [
        ("Where?", ""), ("On the shelf.", ""), ("And now?", ""),
    ]  # fmt: skip


def test_on_a_phone_nothing_sticks_out(page: Page, own: LLM) -> None:
    phone = SIZES["narrow"]
    with serving(own, "a-model-with-quite-a-long-name-that-has-no-room-on-a-telephone") as server:
        page.set_viewport_size(phone)
        page.goto(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        talk(page, QUESTION + " " + "w" * 200)
        assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
        for what in ("#send", ".said"):  # the end of the reply, and the way to go on, are in sight
            box = page.locator(what).bounding_box()
            assert box is not None
            assert 0 <= box["y"] <= box["y"] + box["height"] <= phone["height"]
        for side, panel in (("left", "#library"), ("right", "#panel")):
            expect(page.locator(panel)).to_be_hidden()
            page.click(f"#{side}-button")
            expect(page.locator(panel)).to_be_in_viewport(ratio=0.5)
            page.keyboard.press("Escape")
            expect(page.locator(panel)).to_be_hidden()
            expect(page.locator(f"#{side}-button")).to_be_focused()


def test_stop_stops_the_work_and_leaves_what_was_written(page: Page, store: History) -> None:
    with serving(Scripted(endless), "made-up", page_key=KEY) as server:
        page.goto(server.page_url)
        say(page, "Go on")
        expect(page.locator(".words .word").nth(20)).to_be_attached()
        expect(page.locator("#speed")).to_contain_text("tokens/s")
        page.click("#stop")
        expect(page.locator(".stopped")).to_have_text("You stopped this reply here.")
        expect(page.locator("#send")).to_be_visible()
        until(lambda: 'outcome="cancelled"} 1.0' in asker(server)("GET", "/metrics").body.decode())
        expect(page.locator("#conversations .open")).to_have_count(1)
        [kept] = store.all()
        assert [role for role, _ in kept.turns] == ["user", "assistant"]
        assert kept.turns[1][1].startswith("on on on")
        page.reload()
        expect(page.locator(".stopped")).to_have_text("You stopped this reply here.")
        page.click("#new")  # which stops a reply, too
        say(page, "On and on")
        expect(page.locator(".words .word").nth(2)).to_be_attached()
        page.click("#new")
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator(".words")).to_have_count(0)
        expect(page.locator("#conversations .open")).to_have_count(2)
        page.goto(f"{server.url}/#key={'x' * 43}")  # a link that is too old
        expect(page.locator("#kept")).to_contain_text("stay in this tab")


def test_a_verifier_that_is_killed_is_reported_and_the_reply_goes_on(
    page: Page, f32_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, killed, rounds = Session.wait, threading.Event(), count()

    def waiting(self: Session, pending: Future[Verdict]) -> Verdict:
        if next(rounds) > 1:  # the prompt is read and the first verdict comes; the others wait for the verifier's end
            assert killed.wait(60)
        return wait(self, pending)

    monkeypatch.setattr(Session, "wait", waiting)
    with Model.load(f32_pair[1]) as model:
        verifier = VerifierServer(model, Address.parse("127.0.0.1:0"), context=512, sessions=2, threads=1)
        address = str(verifier.start())
        with LLM.open(f32_pair[0], address, threads=1) as pair, HttpServer(HOME) as server:
            server.open(ServedModel(pair, "edgellm-verifier", options=ReplyOptions(retrieval="off")))
            page.goto(server.url)
            expect(page.locator(".device.up")).to_have_count(2)
            say(page, "Where is my mug?")  # to which the reply takes several questions
            expect(page.locator(".words .word").first).to_be_attached()
            verifier.stop(0)
            killed.set()
            expect(page.locator(".notice")).to_contain_text("verifier is gone")
            expect(page.locator(".said").first).to_contain_text("tokens")
            assert page.locator(".words .draft, .words .parallel").count() > 0
            expect(page.locator("#state")).to_have_text("the verifier is away")
            expect(page.locator("#away")).to_have_text(re.compile(r"the verifier is away: \d+ words? unchecked\."))
            expect(page.locator(".device.down")).to_have_count(1)
            expect(page.locator("#budget-meaning")).to_contain_text("Nothing is verified while the verifier is away")
            check = page.get_by_role("button", name="Have the verifier check this reply")
            check.click()
            expect(page.locator("#toasts")).to_contain_text("is still away")
            with VerifierServer(model, Address.parse(address), context=512, sessions=2, threads=1):
                expect(page.locator(".device.up")).to_have_count(2, timeout=60_000)
                check.click()
                expect(page.locator(".versions")).to_have_text("2/2")
                expect(page.locator(".said")).to_contain_text("tokens")
                assert page.locator(".words .draft, .words .parallel").count() == 0  # a busy machine may draft nothing
                expect(check).to_have_count(0)


def test_a_missing_key_and_errors_are_shown_and_the_question_is_kept(page: Page) -> None:
    scripts = [failing, failing]

    def script(stats: Summary, stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        if scripts:
            return scripts.pop()(stats, stopped)
        return (token for token in said(b"Here."))

    with configured(key="k" * 43) as server:
        page.goto(server.url)
        expect(page.locator("#state")).to_contain_text("being loaded")
        server.open(ServedModel(cast(LLM, Scripted(script)), "made-up"))
        expect(page.locator("#key-form")).to_be_visible()
        say(page, "Hello")
        expect(page.locator(".trouble")).to_contain_text("does not accept this page's key")
        expect(page.locator(".asked")).to_have_text("Hello")
        page.fill("#key", "k" * 43)
        page.press("#key", "Enter")
        expect(page.locator("#state")).to_have_text("ready")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".words")).to_have_text("It goes")
        expect(page.locator(".notice")).to_have_text("Something happened.")
        expect(page.locator(".trouble")).to_contain_text("verifier is gone")
        expect(page.locator(".asked")).to_have_count(1)
        page.get_by_role("button", name="Write this reply again").click()
        expect(page.locator(".versions")).to_have_text("2/2")
        page.get_by_role("button", name="Write this reply again").click()
        expect(page.locator(".words")).to_have_text("Here.")
        expect(page.locator(".versions")).to_have_text("3/3")
        expect(page.locator("#budget")).to_be_hidden()  # a model that is alone has none
        expect(page.locator("#kept")).to_contain_text("stay in this tab")
        page.reload()
        expect(page.locator(".words")).to_have_text("Here.")
        server.stop(0)
        expect(page.locator("#state")).to_have_text("the server is gone")


def test_a_phone_is_paired_by_a_link_or_a_typed_code_until_it_is_revoked(page: Page, store: History) -> None:
    with serving(
        Scripted(lambda *_: (token for token in said(b"Yes."))), "made-up", key="k" * 43, page_key=KEY
    ) as server:
        page.goto(server.url)
        expect(page.locator("#key-why")).to_contain_text("not paired with the computer yet")
        code = server.keys.new_code()
        page.goto(f"{server.url}/#pair={code}")
        expect(page.locator(".toast")).to_contain_text("Paired.")
        expect(page.locator("#state")).to_have_text("ready")
        assert code not in page.url
        say(page, "Hello")
        expect(page.locator("#conversations .open")).to_have_count(1)
        [phone] = Peers().with_phones()
        Peers().remove(phone.id)
        expect(page.locator("#key-why")).to_contain_text("not paired any more")
        page.goto(f"{server.url}/#pair={code}")
        expect(page.locator("#key-why")).to_contain_text("was used")
        page.fill("#key", server.keys.new_code().lower())
        page.press("#key", "Enter")
        expect(page.locator(".toast")).to_contain_text("Paired.")
        expect(page.locator("#conversations .open")).to_have_count(1)


def test_it_can_be_installed_and_opens_while_the_server_is_away(page: Page) -> None:
    with page_states.server_without_model() as server:
        page.goto(server.url)
        kept = "async () => (await (await caches.open('edgellm')).keys()).length"
        until(lambda: page.evaluate(kept) >= len([*(files("edgellm.http") / "page").iterdir()]))  # but for the worker
        server.stop(0)
        page.reload()
        expect(page.locator("#state")).to_have_text("the server is gone")
        expect(page.locator("#gone")).to_be_visible()
        expect(page.locator("#question")).to_be_visible()


def test_conversations_stay_in_the_store_of_the_command_line(page: Page, store: History) -> None:
    pair = Scripted(lambda *_: (token for token in said(b"Reply ", str(len(pair.asked)).encode())))
    with serving(pair, "made-up", page_key=KEY) as server:
        page.goto(server.page_url)
        assert KEY not in page.url
        page.locator("summary", has_text="System prompt").click()
        page.fill("#system", "Be brief.")
        for number, text in enumerate(("First?", "Second?"), 1):
            talk(page, text, number)
        expect(page.locator("#conversations .current")).to_contain_text("First?")
        until(lambda: bool(store.all()) and len(store.latest().turns) == 5)
        assert store.latest().turns[0] == ("system", "Be brief.")
        # editing a question keeps the earlier version
        page.press("#question", "ArrowUp")
        page.locator(".edit textarea").fill("Third?")
        page.locator(".edit").get_by_role("button", name="Send").click()
        expect(page.locator(".words").nth(1)).to_have_text("Reply 3")
        assert [turn.content for turn in pair.asked[-1]] == ["Be brief.", "First?", "Reply 1", "Third?"]
        until(lambda: store.latest().turns[-1] == ("assistant", "Reply 3"))
        page.get_by_role("button", name="Earlier version").click()
        expect(page.locator(".words").nth(1)).to_have_text("Reply 2")
        until(lambda: store.latest().turns[-1] == ("assistant", "Reply 2"))
        page.reload()
        expect(page.locator(".words").nth(1)).to_have_text("Reply 2")
        expect(page.locator(".versions")).to_have_text("1/2")
        expect(page.locator("#system")).to_have_value("Be brief.")
        # what the command line adds is shown
        stored = store.latest()
        store.save(stored.with_turns([*stored.turns, ("user", "Fourth?"), ("assistant", "From the terminal.")]))
        page.locator("#conversations .open").click()
        expect(page.locator(".words").nth(2)).to_have_text("From the terminal.")
        # and not lost when the page goes on from an older state
        store.save(store.latest().with_turns([*store.latest().turns, ("user", "Fifth?"), ("assistant", "Later.")]))
        say(page, "Sixth?")
        expect(page.locator(".words").nth(3)).to_have_text("Reply 4")
        until(lambda: "Later." in store.latest().page and "Reply 4" in store.latest().page)
        page.get_by_role("button", name="Continue from here in a new conversation").first.click()
        expect(page.locator("#conversations .open")).to_have_count(2)
        expect(page.locator(".words")).to_have_count(1)
        # rename, search, delete, undo
        page.locator("#conversations li").nth(1).hover()
        page.get_by_role("button", name="Rename").nth(1).click()
        with page.expect_response("**/conversations"):  # the list is drawn again, as when a reply is stored
            page.evaluate("document.getElementById('search').dispatchEvent(new Event('input'))")
        page.evaluate("new Promise((drawn) => setTimeout(drawn, 100))")
        page.fill(".rename", "My talk")
        page.press(".rename", "Enter")
        expect(page.locator("#conversations")).to_contain_text("My talk")
        page.fill("#search", "TERMINAL")
        expect(page.locator("#conversations .open")).to_have_count(1)
        expect(page.locator("#conversations small")).to_contain_text("From the terminal.")
        page.locator("#conversations li").hover()
        page.get_by_role("button", name="Delete").click()
        expect(page.locator("#conversations .none")).to_be_visible()
        assert "My talk" not in [one.title for one in store.all()]
        page.get_by_role("button", name="Undo").click()
        expect(page.locator("#conversations .open")).to_have_count(1)
        assert "My talk" in [one.title for one in store.all()]
        store.turn_off()
        page.fill("#search", "")
        expect(page.locator("#kept")).to_contain_text("history is off")


HOSTILE = """\
# Title <script>alert(1)</script>

**bo*ld* &amp;** `co``de` <img src=x onerror=alert(2)> [go](javascript:alert(3)) [out](https://example.org/a*b*c "t")

![picture](https://example.org/x.png)
- one \\*not\\*
  continued & more
  1. nested `x < 1`
> quoted
> lines

```python
def f(x):
    return "<b>" + x  # &lt;
```
<iframe src="https://example.org"></iframe><style>body { display: none }</style>

| a | b |
|---|:-:|
| 1 | **2** |
"""


def test_markdown_is_shown_and_what_a_model_writes_is_not_trusted(page: Page) -> None:
    pieces = re.findall(r"\w+|\s+|[^\w\s]", HOSTILE)
    sources = list(Source)

    def script(_stats: Summary, _stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        for number, token in enumerate(said(*[piece.encode() for piece in pieces])):
            yield replace(token, source=sources[number % len(sources)])

    with serving(Scripted(script), "made-up") as server:
        page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
        page.goto(server.url)
        page.evaluate(
            "document.addEventListener('securitypolicyviolation', (event) => console.error(event.violatedDirective))"
        )
        talk(page, "Show it")
        expect(page.locator(".hljs-keyword").first).to_have_text("def")
        words = page.locator(".words")
        assert words.locator("script, iframe, style, img, [onerror]").count() == 0
        assert words.locator("a").evaluate_all("all => all.map(one => one.href)") == ["https://example.org/a*b*c"]
        expect(words.locator("h1")).to_have_text("Title <script>alert(1)</script>")
        expect(words.locator("strong").first).to_have_text("bold &")
        expect(words).to_contain_text("one *not*")
        expect(words.locator("table td").nth(1)).to_have_text("2")
        assert words.locator("pre").inner_text().rstrip() == 'def f(x):\n    return "<b>" + x  # &lt;'
        # each piece of text that is shown belongs to the token that it came from
        for text, token in words.locator(".word").evaluate_all(
            "all => all.map(one => [one.textContent, one.dataset.token])"
        ):
            assert text.strip() in pieces[int(token)], (text, pieces[int(token)])


DEMANDING = {
    "lists in quotes": "> - " * 5_000 + "x",
    "lists by their indentation": "".join("  " * level + "- item\n" for level in range(200)),
    "emphasis": "*a " * 6_000 + "x" + " a*" * 6_000,
    "cells beyond the header": "| a | b |\n|---|---|\n| x | y | extra |\n",
    "addresses by themselves": "[mug]: http://shelf.example/ladder\n[go](javascript:here)\n",
    "one long word": "x" * 60_000,
    "entities": "a&copy; " * 5_000,
    "tags": "<b><i " * 5_000 + "<!-- never closed\n\nafter",
    "code: tags": "```html\n" + "<a " * 20_000 + "\n```\n\nafter",
    "code: lines of tags": "```html\n" + ("<a " * 200 + "\n") * 100 + "```\n\nafter",
    "code: many functions": "~~~python\n" + "def f(x):\n    return x\n\n" * 800 + "~~~\nafter",
}
"""Replies that overflow a parser's stack, keep it busy for long, or have parts that Markdown leaves out."""
MOST_AT_ONCE = 6_000  # characters of a block or of a piece of code, as in markdown.js


@pytest.mark.nightly
@pytest.mark.parametrize("text", DEMANDING.values(), ids=DEMANDING)
def test_no_word_of_a_demanding_reply_is_lost(page: Page, text: str) -> None:
    def script(_stats: Summary, _stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        yield from said(*[text[at : at + 500].encode() for at in range(0, len(text), 500)])

    words = re.sub(r"[^a-z]", "", re.sub(r"(```|~~~)[a-z]+|&copy;", "", text))
    shown = """wanted => {
        const blocks = [...document.querySelectorAll(".words .block")].map((one) => one.cloneNode(true));
        for (const block of blocks) for (const head of block.querySelectorAll(".code-head")) head.remove();
        return blocks.map((one) => one.textContent).join("").replace(/[^a-z]/g, "") === wanted;
    }"""
    with serving(Scripted(script), "made-up") as server:
        page.goto(server.url)
        page.evaluate("sessionStorage.clear()")
        talk(page, "Show it")
        page.wait_for_function(shown, arg=words)
        if text.startswith("```html"):
            expect(page.locator(".hljs-tag").first).to_be_attached()
        sizes = page.locator(".block:not(:has(.code)), .code code > span").evaluate_all(
            "all => all.map((one) => one.textContent.trim().length)"
        )
        assert max(sizes) <= MOST_AT_ONCE
        assert page.locator(".words :is(blockquote, ol, ul, em)" + " > * " * 44).count() == 0
        page.reload()  # a stored reply is shown at once, and needs no less
        page.wait_for_function(shown, arg=words)


def test_files_go_before_the_question(page: Page) -> None:
    pair = Scripted(lambda *_: (token for token in said(b"Yes.")))
    with serving(pair, "made-up") as server:
        page.goto(server.url)
        drop = """texts => {
            const files = new DataTransfer();
            for (const [name, bytes] of texts) files.items.add(new File([new Uint8Array(bytes)], name));
            document.querySelector("#ask").dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true }));
        }"""
        page.evaluate(drop, [["notes.txt", list(b"The bus leaves at 8.\n")], ["x.bin", [0, 255, 1]]])
        expect(page.locator("#files li")).to_have_count(1)
        expect(page.locator(".toast")).to_contain_text("x.bin is no text")
        talk(page, "When does it leave?")
        question = pair.asked[0][0]
        assert (question.context, question.content) == (("The bus leaves at 8.\n",), "When does it leave?")
        expect(page.locator(".asked .text")).to_have_text("When does it leave?")
        expect(page.locator(".asked .files")).to_have_text("notes.txt")
        expect(page.locator("#files li")).to_have_count(0)


@pytest.mark.parametrize(
    "looks", [LOOKS[:1], pytest.param(LOOKS[1:], marks=pytest.mark.nightly)], ids=["wide and light", "narrow or dark"]
)
@pytest.mark.parametrize(
    "name", [one if one in OFTEN else pytest.param(one, marks=pytest.mark.nightly) for one in STATES]
)
def test_there_is_no_barrier_in_any_state(
    context: BrowserContext, store: History, name: str, looks: list[tuple[str, str, list[str]]]
) -> None:
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    with page_states.server_without_model() as server, page_in_state(context, server, name) as page:
        page.emulate_media(reduced_motion="reduce")
        page.evaluate(axe)
        for size, scheme, rules in looks:
            page.set_viewport_size(SIZES[size])
            page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            if size == "narrow" and name in PANELS:
                page_states.show_open_panel(page, PANELS[name])
            found = page.evaluate("rules => axe.run(rules.length ? { runOnly: rules } : {})", rules)["violations"]
            shown = [(one["id"], part["html"][:150], part["failureSummary"]) for one in found for part in one["nodes"]]
            assert shown == [], (size, scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]["width"]


def test_its_files_have_a_content_policy_and_no_other_file_is_served(ask: Ask) -> None:
    for path, kind in (("/", "text/html"), *PAGE_FILES):
        answer = ask("GET", path)
        assert answer.status == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        if "/vendor/" not in path:
            assert not re.search(rb"https?://(?!www\.w3\.org/)|//[a-z]+\.[a-z]+/", answer.body)
    others = ("..%2fapp.py", "%2e%2e/app.py", "vendor/..%2f..%2fapp.py", "app.py", "", "vendor/")
    assert [ask("GET", f"/page/{path}").status for path in others] == [404] * len(others)
    follows = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}  # a link on another page
    assert [ask("GET", path, None, follows).status for path in ("/", "/v1/models")] == [200, 403]


def test_the_vendored_libraries_are_those_that_are_named() -> None:
    folder = Path(str(files("edgellm.http") / "page" / "vendor"))
    rows = re.findall(
        r"^\| `(\w+)\.js` .* ([0-9a-f]{64}) \|$", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {f"{name}.js" for name, _ in rows} == {path.name for path in folder.glob("*.js")}
    for name, digest in rows:
        assert hashlib.sha256((folder / f"{name}.js").read_bytes()).hexdigest() == digest
        assert (folder / f"{name}.LICENSE.txt").is_file()
