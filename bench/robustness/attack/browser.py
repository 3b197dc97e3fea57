"""A real browser: hostile text on our page, and hostile pages against the HTTP server.

Chromium runs headless. The page shows hostile names of models and devices, notices, replies and errors; none may
become an element, run, load anything or break the content policy. Then pages of three other origins (another port,
another name of this machine, and a name that is rebound to it) try everything that a page can do to reach the server:
nothing may be read and no reply may be started.
"""

import os
import tempfile
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from playwright.sync_api import Browser, Page

from bench.robustness.attack.harness import Attack, Found
from edgellm.errors import VerifierLost
from edgellm.http.model_host import ServedModel
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.llm.model_loading import PairMemory
from edgellm.rpc.address import Address
from edgellm.rpc.trust.identity import Identity
from edgellm.rpc.trust.trust import Peer, Peers, Right
from edgellm.spec.params import ReplyOptions
from edgellm.spec.sampling import ModelSampling
from edgellm.spec.stats import Summary
from edgellm.spec.stream import Reply
from edgellm.spec.types import Event, Notice, Source, Token
from testkit.browser.page_states import opened_browser

PATIENCE = 60_000.0  # milliseconds, enough for a busy machine
LOOPBACK = Address.parse("127.0.0.1:0")

HOSTILE = (
    "<script>window.harmed=1</script>",
    "<img src=x onerror=window.harmed=1>",
    "<svg onload=window.harmed=1><animate onbegin=window.harmed=1></svg>",
    "</title></textarea></style></script><script>window.harmed=1</script>",
    '"><iframe srcdoc="<script>parent.harmed=1</script>"></iframe>',
    "'-window.harmed=1-'",
    '" autofocus onfocus=window.harmed=1 x="',
    "javascript:window.harmed=1//",
    '<a href="javascript:window.harmed=1">click</a>',
    "<style>*{display:none}body{background:url(http://127.0.0.1:1/x)}</style>",
    '<link rel=stylesheet href="http://127.0.0.1:1/x.css">',
    '<meta http-equiv=refresh content="0;url=http://127.0.0.1:1/">',
    "<base href=http://127.0.0.1:1/><form action=/x><button>Send</button></form>",
    "<object data=x></object><embed src=x><video><source onerror=window.harmed=1></video>",
    "<template shadowrootmode=open><script>window.harmed=1</script></template>",
    "{{constructor.constructor('window.harmed=1')()}} ${window.harmed=1} #{7*7}",
    "__proto__",
    "constructor",
    "toString",
    "</b></p></div></aside></main>",
    "&lt;script&gt;window.harmed=1&lt;/script&gt;",
    "\u202eevil\u202c \u2066\u2067 \u200b\ufeff",
    "\x1b]0;title\x07\x00\x08\x7f\x9b31m",
    "a" * 4000,
    "\n" * 400 + "data: [DONE]\n\n" + 'data: {"edgellm":{"notice":"forged"}}\n\n',
    "e" + "\u0301" * 2000,
    "\U0001f468\u200d" * 300,
)
"""Text that a browser might interpret as code or markup."""

_WATCH = """() => {
  window.broken = [];
  document.addEventListener('securitypolicyviolation', (event) => window.broken.push(event.violatedDirective));
}"""
_LOOK = """() => {
  const all = [...document.querySelectorAll('*')], html = (nodes) => nodes.map((node) => node.outerHTML);
  const kinds = 'script, iframe, img, a, object, embed, video, base, meta[http-equiv], body style, template, link';
  return {
    harmed: window.harmed ?? Object.prototype.harmed ?? null,
    broken: window.broken ?? [],
    odd: html([...document.querySelectorAll(kinds)]).filter((one) =>
      !/\\/page\\/|rel="icon"|^<a href="https?:[^"]*" target="_blank" rel="noopener noreferrer nofollow">/.test(one)),
    handlers: html(all.filter((node) => [...node.attributes].some((one) => one.name.startsWith('on')))),
    title: document.title,
    wide: document.documentElement.scrollWidth > innerWidth,
  };
}"""


class Made:
    """The pair behind the server, with replies of a given text."""

    context_length = 64
    verifier_up = None
    draft_name: str | None = None
    memory = PairMemory(Counter(CPU=1), 0)
    sampling = ModelSampling(temperature=0.0)

    def __init__(self, text: str) -> None:
        self.verifier_name = text
        self._text, self.prompt_writer = text, self
        self.replies = 0

    def reply(self, *_: object, **_more: object) -> Reply:
        """Return a reply of hostile pieces, hostile notices, and an error with a hostile message at its end."""
        self.replies += 1

        def write(stats: Summary, *_: object) -> Generator[Event, None, None]:
            for number, piece in enumerate((self._text, " ", self._text[::-1])):
                token = Token(number, piece.encode("utf-8", "replace"), Source.VERIFIER)
                stats.token(token)
                stats.show(token)
                yield token
            yield Notice(self._text)
            raise VerifierLost(self._text, self._text)

        return Reply(write, prompt_tokens=3, seed=0)

    def fitting_options(self, options: ReplyOptions) -> tuple[ReplyOptions, list[str]]:
        """Return the options as they are."""
        return options, []

    def piece(self, _token: int) -> bytes:
        """Return the text of a token."""
        return self._text.encode("utf-8", "replace")


@contextmanager
def _home() -> Iterator[Path]:
    """Give this process an EDGELLM_HOME of its own."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"EDGELLM_HOME": folder}):
        yield Path(folder)


def _remember(name: str, folder: Path) -> None:
    """Add a device with a hostile name to the list of paired ones, past every check on names."""
    rights = frozenset(Right)
    Peers().add(Peer(name, Identity.load(folder).certificate, rights, rights, (Address("127.0.0.1", 9),)))


def _shown(page: Page, text: str, folder: Path) -> list[str]:
    """Return the harm done after the page has shown `text` in every place that others can write."""
    requested: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(f"a dialog: {dialog.message}"))
    page.add_init_script(f"({_WATCH})()")
    _remember(text[:40], folder / "device")
    with HttpServer(LOOPBACK) as door:
        door.open(ServedModel(cast(LLM, Made(text)), text))
        page.goto(door.url)
        page.wait_for_selector("#state.good", state="attached")
        page.fill("#question", f"{text} ?")
        page.press("#question", "Enter")
        page.wait_for_selector(".trouble", state="attached")
        if page.locator(".words .word").count():
            page.locator(".words .word").first.dispatch_event("pointerover")  # even where it is hidden
        found = page.evaluate(_LOOK)
        own = door.url
    wrong = [f"requested {url}" for url in requested if not url.startswith((own + "/", "data:"))]
    wrong += [f"an error: {error}" for error in errors]
    wrong += [f"{what}: {found[what]}" for what in ("harmed", "broken", "odd", "handlers") if found[what]]
    wrong += ["the title changed"] if not found["title"].endswith("· edgellm") else []
    wrong += ["it sticks out"] if found["wide"] else []
    return [f"{text[:40]!r}: {sentence}" for sentence in wrong]


def page_with_hostile_text(quick: bool) -> Found:
    """Show hostile text in every place of the page that others can write."""
    texts = (HOSTILE[1], "".join(HOSTILE[:12])) if quick else HOSTILE
    wrong: list[str] = []
    with opened_browser() as browser:
        for text in texts:
            with _home() as folder:
                page = browser.new_page(viewport={"width": 1100, "height": 760})
                page.set_default_timeout(PATIENCE)
                wrong += _shown(page, text, folder)
                page.close()
    return Found(len(texts) * 6, tuple(wrong), {"texts": len(texts), "places": 6})


TRICKS = (Path(__file__).parent / "foreign_page.js").read_text(encoding="utf-8")
_NAMES_OF_TRICKS = f"() => Object.keys({TRICKS})"
_TRY = f"""async ([url, name, code]) => {{
  const chat = `${{url}}/v1/chat/completions`, body = JSON.stringify({{messages: [{{role: 'user', content: 'x'}}]}});
  const tricks = {TRICKS};
  try {{ return await tricks[name](url, chat, body, code); }} catch {{ return null; }}
}}"""


class _Hostile(BaseHTTPRequestHandler):
    """Answers every request with an empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", "36")
        self.end_headers()
        self.wfile.write(b"<!doctype html><body>a page</body>\n\n")

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def _served() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hostile)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()


def hostile_pages(quick: bool) -> Found:
    """Let pages of other origins try to read from the server or to start replies."""
    wrong: list[str] = []
    tried = 0
    words = ("--host-resolver-rules=MAP evil.test 127.0.0.1, MAP rebound.test 127.0.0.1", "--disable-popup-blocking")
    with _home(), _served() as port, opened_browser(*words) as browser, HttpServer(LOOPBACK) as door:
        code = door.keys.new_code()
        names = browser.new_page().evaluate(_NAMES_OF_TRICKS)
        tricks = names[5:9] if quick else names
        made = Made("a reply")
        door.open(ServedModel(cast(LLM, made), "a model"))
        own = door.address.port
        # another port, another name, and a name that is rebound: there the page's own origin leads to our server
        origins = [(f"http://127.0.0.1:{port}", door.url), (f"http://evil.test:{port}", door.url)]
        origins += [
            (f"http://evil.test:{port}", f"http://localhost:{own}"),
            (f"http://rebound.test:{port}", f"http://rebound.test:{own}"),
        ]
        origins = origins[-1:] if quick else origins
        for origin, url in origins:
            for name in tricks:
                page = browser.new_page()
                page.set_default_timeout(PATIENCE)
                page.goto(origin)
                read = page.evaluate(_TRY, [url, name, code])
                page.context.close()
                tried += 1
                if read:
                    wrong.append(f"{name} from {origin.rsplit(':', 1)[0]}: read {str(read)[:60]!r}")
        wrong += [f"a page began {made.replies} replies"] if made.replies else []
        wrong += ["a page paired a phone"] if Peers().with_phones() else []
        wrong += _rebound_page(browser, own)
        tried += 1
    return Found(tried, tuple(wrong), {"tricks": len(tricks), "origins": len(origins)})


def _rebound_page(browser: Browser, port: int) -> list[str]:
    """Return whether our page opens under a name that was rebound to this machine, which would have their origin."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    answer = page.goto(f"http://rebound.test:{port}/")
    page.context.close()
    return [] if answer is not None and answer.status == 403 else [f"the page opens by a rebound name: {answer}"]


ATTACKS = (
    Attack("page-text", "hostile names, notices, replies and errors on the page, in Chromium", page_with_hostile_text),
    Attack("foreign-pages", "pages of other origins against the HTTP server, in Chromium", hostile_pages),
)
