"""The states of the web page, with made-up replies: for pictures of them, and for tests of what can be seen in them.

The server is real and has no model; what it would say of one is put in its place in the browser.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from edgellm.http.middleware import HttpConfig
from edgellm.http.server import HttpServer
from edgellm.rpc.address import Address
from edgellm.storage.chat_log import Conversation, History

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)
SIZES: dict[str, Any] = {"wide": {"width": 1280, "height": 800}, "narrow": {"width": 390, "height": 780}}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
KEY = "p" * 43

QUESTION = "How do I rename many files at once?"
ANSWER = """\
Use a loop. Each file gets a **number**, and keeps its *ending*:

```python
from pathlib import Path

for number, path in enumerate(sorted(Path("photos").glob("*.jpg")), start=1):
    path.rename(path.with_name(f"holiday-{number:03}{path.suffix}"))  # holiday-001.jpg
```

Then check what came of it:

1. `ls photos | head` shows the first names.
2. Count them; there should be as many as before.

| command | what it does |
|---|---|
| `ls` | lists the files |
| `wc -l` | counts lines |

> Try it on a copy first: a name that is taken is overwritten.
"""
SUMMARY = {
    "finish_reason": "stop", "stopped_by": None, "seed": 1, "rounds": 30, "tokens_per_round": 4.2, "drafted": 130,
    "share_verified": 1.0, "acceptance_rate": 0.78, "mean_acceptance_length": 4.2, "verifier_passes_per_token": 0.24,
    "share_offloaded": 1.0, "retrieved": 12, "rtt_ms_p50": 3.4, "bytes_up": 2210, "bytes_down": 1630,
}  # fmt: skip
_LINK = {"address": "192.168.1.20:50151", "up": True, "reason": "found in the home", "rtt_ms": 3.4}
_PAIR = {"name": "qwen3-8b", "draft": "qwen3-0.6b", "verifier": "qwen3-8b", "context_length": 32768, "link": _LINK}
STATUS: dict[str, Any] = {
    "model": "qwen3-8b", "models": [_PAIR],
    "requests": {"running": 0, "waiting": 0, "places": 2},
    "devices": [{"name": "desk", "short": "k3fa-9x2m", "addresses": ["192.168.1.20:50151"], "may_here": [],
                 "may_there": ["verify", "compute"]}],
    "anonymous": False, "mesh": None,
}  # fmt: skip
_TIMES = {"load_s": 1.0, "wait_s": 0.1, "network_s": 0.2, "compute_s": 0.5}
MESH: dict[str, Any] = {"last": {
    "ttft_s": None, "token_s": None, "planned_ttft_s": 2.4, "planned_token_s": 0.05, "stages": [
        {"device": "desk", "first_layer": 1, "last_layer": 16, "planned": {**_TIMES, "finish_s": 1.5}},
        {"device": "laptop", "first_layer": 17, "last_layer": 28, "planned": {**_TIMES, "finish_s": 2.4}},
    ],
}}  # fmt: skip
_SMOLLM2 = {"name": "smollm2:135m", "draft": "smollm2:draft", "verifier": "smollm2:135m", "link": None,
            "context_length": 8192}  # fmt: skip
SMOLLM2 = {**STATUS, "model": "smollm2:135m", "models": [_SMOLLM2], "devices": [], "anonymous": True}

_WRITERS = ("accepted", "accepted", "accepted", "bonus", "accepted", "retrieved", "retrieved", "corrected", "accepted",
            "verifier")  # fmt: skip

_FETCH = """
    window.replies = [];
    const asked = window.fetch;
    window.fetch = (path, options) => {
      if (path === "/phones" && window.name === "unanswered") return new Promise(() => {});
      if (path !== "/v1/chat/completions") return asked(path, options);
      const { chunks, status, ends, error } = window.replies.shift();
      if (status !== 200) return Promise.resolve(new Response(JSON.stringify({ error }), { status }));
      const body = new ReadableStream({
        start(control) {
          const encoder = new TextEncoder();
          for (const chunk of chunks) control.enqueue(encoder.encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
          if (ends) control.enqueue(encoder.encode("data: [DONE]\\n\\n"));
          options.signal.addEventListener("abort", () => control.error(options.signal.reason));
        },
      });
      return Promise.resolve(new Response(body, { status: 200 }));
    };
"""


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A made-up reply: tokens as texts and sources, and how it ends. `ends` is False where it goes on forever."""

    tokens: Sequence[tuple[str, str]]
    thought: Sequence[str] = ()
    notice: str = ""
    progress: Mapping[str, Any] | None = None
    ends: bool = True
    status: int = 200
    error: Mapping[str, Any] | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)

    def chunks(self) -> Iterator[dict[str, Any]]:
        if self.progress is not None:
            yield {"prompt_progress": self.progress}
        for text in self.thought:
            yield _tokens(text, "draft", "thinking")
        for number, (text, source) in enumerate(self.tokens):
            yield _tokens(text, source, "answer")
            if self.notice and number == len(self.tokens) // 2:
                yield {"edgellm": {"notice": self.notice}}
        if self.ends:
            count = len(self.tokens) + len(self.thought)
            timings = {"predicted_n": count, "predicted_ms": 30.0 * count, "prompt_ms": 214.0}
            timings["predicted_per_second"] = 33.3
            yield {"timings": timings, "edgellm": {"summary": {**SUMMARY, **self.summary}}}


def _tokens(text: str, source: str, channel: str) -> dict[str, Any]:
    sure = 0.93 if source in ("accepted", "draft", "parallel") else None
    token = {"id": 1, "text": text, "source": source, "channel": channel, "confidence": sure, "round": 3}
    return {"edgellm": {"tokens": [token]}}


def written(text: str, sources: Sequence[str] = _WRITERS) -> list[tuple[str, str]]:
    """Return `text` in tokens, with `sources` in turn."""
    pieces = re.findall(r" ?\w+|\s+|[^\w\s]+", text)
    return [(piece, sources[number % len(sources)]) for number, piece in enumerate(pieces)]


def _error(status: int, message: str) -> MadeUp:
    return MadeUp((), status=status, error={"message": message, "code": None})


def say(page: Page, text: str, *replies: MadeUp) -> None:
    """Ask `text` on the page, which gets the next of the made-up `replies`."""
    for one in replies:
        data = {"chunks": list(one.chunks()), "ends": one.ends, "status": one.status, "error": one.error}
        page.evaluate("reply => window.replies.push(reply)", data)
    page.fill("#question", text)
    page.press("#question", "Enter")


def ended(page: Page) -> None:
    expect(page.locator("#send")).to_be_visible()


def show_empty(page: Page) -> None:
    expect(page.locator("[data-models]:visible")).to_contain_text("SmolLM2 135M is small")
    expect(page.locator(".example").first).to_be_visible()


def show_waiting(page: Page) -> None:
    progress = {"model": "qwen3-8b", "processed": 2560, "total": 6120}
    say(page, "Sum up these notes.", MadeUp((), progress=progress, ends=False))
    expect(page.locator(".life")).to_contain_text("2,560 of 6,120")


def show_streaming(page: Page) -> None:
    say(page, QUESTION, MadeUp(written(ANSWER[:330]), ends=False))
    expect(page.locator(".code").first).to_be_visible()


def show_thinking(page: Page) -> None:
    thought = ["The user wants ", "all of them, ", "so a loop. ", "Which tool is there ", "on every machine?"]
    say(page, QUESTION, MadeUp(written("A loop does it."), thought=thought))
    ended(page)
    page.click(".thought summary")


def show_code(page: Page) -> None:
    say(page, QUESTION, MadeUp(written(ANSWER)))
    ended(page)
    expect(page.locator(".hljs-keyword").first).to_be_visible()


def show_provenance(page: Page) -> None:
    show_code(page)
    page.locator(".reply button.who").click()
    words = page.locator(".words .word.corrected")
    words.first.click()
    expect(page.locator("#who")).to_be_visible()


def show_away(page: Page) -> None:
    tokens = written("Use a loop. Each file gets a number, and keeps its ending. ")
    tokens += written("Then list the folder and count the names.", ("draft", "draft", "parallel"))
    notice = "The verifier is gone: the reply goes on unverified."
    say(page, QUESTION, MadeUp(tokens, notice=notice, summary={"share_verified": 0.6}))
    ended(page)
    expect(page.locator("#away")).to_contain_text("words unchecked")


def show_error(page: Page) -> None:
    say(page, QUESTION, _error(503, "The verifier on desk is busy with 8 other replies. Try again in 2 seconds."))
    expect(page.locator(".trouble")).to_be_visible()


def show_stopped(page: Page) -> None:
    say(page, QUESTION, MadeUp(written(ANSWER[:60]), ends=False))
    expect(page.locator(".words")).to_contain_text("number")
    page.click("#stop")
    expect(page.locator(".stopped")).to_be_visible()


def show_settings(page: Page) -> None:
    show_open_panel(page, "right")
    for title in ("System prompt", "Sampling"):
        page.locator("summary", has_text=title).click()
    page.fill("#system", "Answer in one sentence.")
    page.fill("#temperature", "0.7")
    page.locator("#reset").scroll_into_view_if_needed()


def show_conversations(page: Page) -> None:
    chats = History()
    chats.clear()
    for question in ("Which plants need water?", QUESTION, "A letter to the landlord", "Ideas for Anna's birthday"):
        chats.save(Conversation.new().with_turns([("user", question), ("assistant", "The fern, today.")]))
    page.reload()
    expect(page.locator("#conversations .open")).to_have_count(4)
    show_open_panel(page, "left")
    page.locator("#conversations .open").first.click()
    expect(page.locator(".reply")).to_be_visible()
    show_open_panel(page, "left")
    page.locator("#conversations li").nth(2).hover()


def show_versions(page: Page) -> None:
    say(page, QUESTION, MadeUp(written("With a loop.")))
    ended(page)
    data = {"chunks": list(MadeUp(written("With the command `rename`.")).chunks()), "ends": True, "status": 200}
    page.evaluate("reply => window.replies.push(reply)", data)
    page.locator(".reply button[aria-label^='Write']").click()
    expect(page.locator(".versions")).to_have_text("2/2")


def show_mesh(page: Page) -> None:
    show_open_panel(page, "right")
    page.locator("#gantt").scroll_into_view_if_needed()


def show_open_panel(page: Page, side: str) -> None:
    """Open a panel, unless it is."""
    button = page.locator(f"#{side}-button")
    if button.get_attribute("aria-expanded") != "true":
        button.click()
    page.wait_for_timeout(250)  # the transition of a drawer


def says(where: str, text: str) -> Callable[[Page], None]:
    return lambda page: expect(page.locator(where)).to_contain_text(text)


def show_unpaired(page: Page) -> None:
    page.evaluate("localStorage.clear(), location.reload()")
    says("#key-why", "not paired with the computer yet")(page)


def show_pairing(page: Page) -> None:
    page.evaluate("window.name = 'unanswered', location.hash = '#pair=K7QF-2MX9'")
    says("#key-why", "Pairing")(page)


def show_paired(page: Page) -> None:
    page.route("**/phones", partial(Route.fulfill, body=json.dumps({"name": "iPhone", "key": KEY})))
    page.evaluate("location.hash = '#pair=K7QF-2MX9'")
    says(".toast", "“iPhone”")(page)


_LOST = {**_LINK, "up": False, "rtt_ms": None, "reason": "lost 12 s ago"}
AWAY = {**STATUS, "models": [{**_PAIR, "link": _LOST}]}
REFUSED = {"error": {"message": "The API key is missing or wrong.", "code": "invalid_api_key"}}
STATES: dict[str, tuple[Callable[[Page], None], Mapping[str, Any]]] = {
    "empty": (show_empty, SMOLLM2),
    "waiting": (show_waiting, STATUS),
    "streaming": (show_streaming, STATUS),
    "thinking": (show_thinking, STATUS),
    "code": (show_code, STATUS),
    "provenance": (show_provenance, STATUS),
    "away": (show_away, AWAY),
    "error": (show_error, STATUS),
    "stopped": (show_stopped, STATUS),
    "versions": (show_versions, STATUS),
    "settings": (show_settings, STATUS),
    "conversations": (show_conversations, STATUS),
    "mesh": (show_mesh, {**STATUS, "mesh": MESH}),
    "unpaired": (show_unpaired, REFUSED),
    "pairing": (show_pairing, REFUSED),
    "paired": (show_paired, STATUS),
    "revoked": (says("#key-why", "not paired any more"), REFUSED),
    "gone": (says("#gone", "does not answer"), {}),
}


@contextmanager
def opened_browser(*words: str) -> Iterator[Browser]:
    """Open a headless Chromium, with `words` on its command line."""
    with sync_playwright() as playwright:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=[*root, *words])
        yield opened
        opened.close()


def window(browser: Browser, size: str, scheme: Literal["light", "dark"]) -> BrowserContext:
    """Open a window for pages in a size of SIZES and a colour scheme."""
    return browser.new_context(viewport=SIZES[size], color_scheme=scheme, has_touch=size == "narrow")


@contextmanager
def page_in_state(context: BrowserContext, server: HttpServer, name: str) -> Iterator[Page]:
    """Open the page of `server`, which was made with `KEY`, in a state."""
    show, status = STATES[name]
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.add_init_script(_FETCH)
    models = [{"id": one["name"], "context_length": one["context_length"]} for one in status.get("models", ())]
    answers = {"health": {"status": "ok"}, "status": status, "v1/models": {"object": "list", "data": models}}
    for path, answer in answers.items():
        answered = partial(Route.fulfill, body=json.dumps(answer), status=401 if "error" in answer else 200)
        page.route(f"**/{path}", answered if status else lambda route: route.abort())
    page.goto(server.page_url)
    expect(page.locator("#state")).not_to_have_text("connecting …")
    show(page)
    try:
        yield page
    finally:
        page.evaluate("localStorage.clear()")
        page.close()


def server_without_model() -> HttpServer:
    """Return a server for `page_in_state`, which is to be started. It stores conversations in EDGELLM_HOME."""
    server = HttpServer(Address.parse("127.0.0.1:0"), HttpConfig(page_key=KEY))
    server.models.open_without_model("This server has no model.")
    return server
