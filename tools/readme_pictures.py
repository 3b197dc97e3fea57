"""Makes the README's pictures: real replies of the default pair, at a terminal and on the page, with who wrote what.

    .venv/bin/python -m tools.readme_pictures [terminal|page|panels ...]

The models have to be here: `edgellm pull smollm2:135m`. Conversations go to a folder that is removed afterwards.
"""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import termios
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import expect
from rich.console import Console
from rich.text import Text

from edgellm.system import cache_dir
from testkit import ROOT
from testkit.browser.page_states import opened_browser
from tools.first_hour import two_devices

FOLDER = ROOT / "docs" / "pictures"
EDGELLM = (sys.executable, "-m", "edgellm")
QUESTION = "What is photosynthesis?"
TIPS = "Give me three tips for sleeping better."
SEED = 1
COLUMNS = 92
WINDOW: Any = {"width": 1180, "height": 680}
_FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # would be fetched from another host
_UP, _ERASED = "\x1b[1A", "\x1b[2K"
_REPLY_MS = 120_000


def draw_terminal() -> None:
    """Ask a question at a terminal, twice, as the first reply in a new home also measures, and draw what is shown."""
    for _ in range(2):
        shown = _at_terminal(*EDGELLM, "chat", "--no-history", "--colors", "--seed", str(SEED), QUESTION)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), f'edgellm chat --colors "{QUESTION}"'))
    console.print(Text.from_ansi(_last_screen(shown)))
    picture = console.export_svg(title="edgellm", unique_id="edgellm")
    (FOLDER / "terminal.svg").write_text(_FONT.sub("", picture), encoding="utf-8")


def _last_screen(shown: str) -> str:
    """Return the lines that stay when the bars that `shown` drew and erased are gone."""
    lines: list[str] = []
    for line in shown.replace("\r\n", "\n").strip().split("\n"):
        erased = line.count(_UP)
        lines = [*lines[: len(lines) - erased], line.rpartition(_ERASED)[2]]
    return "\n".join(lines)


def _at_terminal(*words: str) -> str:
    terminal, side = pty.openpty()
    termios.tcsetwinsize(side, (40, COLUMNS))
    shown = bytearray()
    with subprocess.Popen(words, stdin=side, stdout=side, stderr=side, cwd=ROOT) as child:
        os.close(side)
        while data := _read(terminal):
            shown += data
    os.close(terminal)
    if child.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {child.returncode}:\n{shown.decode()}")
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # the program has ended
        return b""


def draw_page() -> None:
    """Ask two questions on the page, with colours, and take a picture of it."""
    served = subprocess.Popen([*EDGELLM, "serve", "--http-port", "0"], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        url = next(found[1] for line in served.stderr or () if (found := re.search(r"Web page: (\S+)", line)))
        with opened_browser() as browser:
            page = browser.new_page(viewport=WINDOW)
            page.goto(url)
            expect(page.locator("#state")).to_have_text("ready", timeout=_REPLY_MS)
            page.check("#colours")
            page.evaluate(f"document.getElementById('seed').value = {SEED}")
            page.dispatch_event("#seed", "change")
            for count, question in enumerate((QUESTION, TIPS), start=1):
                page.fill("#question", question)
                page.press("#question", "Enter")
                expect(page.locator(".said")).to_have_count(count, timeout=_REPLY_MS)
                expect(page.locator(".said").last).to_contain_text("tokens", timeout=_REPLY_MS)
            page.locator("#model").scroll_into_view_if_needed()
            page.screenshot(path=FOLDER / "page.png")
    finally:
        served.send_signal(signal.SIGINT)
        served.wait()


def draw_panels() -> None:
    """Take pictures of the page's panel with one model, a pair, a paired desk, and once the desk is gone, and put them
    side by side."""
    shots = list[str]()
    with two_devices() as devices, opened_browser() as browser:
        laptop, desk = devices["laptop"], devices["desk"]

        def shoot(said: str, state: str) -> None:
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(re.findall(r"Web page: (\S+)", said)[0])
            expect(page.locator("#state")).to_have_text(state, timeout=_REPLY_MS)
            expect(page.locator("#model")).not_to_have_value("")
            shots.append(b64encode(page.locator("#panel").screenshot()).decode())
            page.close()

        for words in ("-m smollm2:135m --draft none", ""):
            shoot(laptop.run(f"edgellm serve --http-port 0 {words}&"), "ready")
            laptop.kill()
        code = re.findall(r"edgellm pair (127\S+ \S+)", desk.run("edgellm pair --name desk --port 0&"))[0]
        laptop.run(f"edgellm pair --name laptop {code}")
        verifier = desk.run("edgellm serve --role verifier -m smollm2:135m --paired-only --no-http --port 0&")
        at = re.findall(r"at (127\S+\d)", verifier)[0]
        said = laptop.run(f"edgellm serve --peer {at} --http-port 0&")
        shoot(said, "ready")
        desk.kill()
        shoot(said, "desk is away")
        whole = browser.new_page(viewport={"width": 1360, "height": 800})
        images = "".join(f'<img src="data:image/png;base64,{shot}">' for shot in shots)
        whole.set_content(f'<body style="margin: 0"><p style="display: inline-flex; margin: 0">{images}</p>')
        whole.locator("p").screenshot(path=FOLDER / "panels.png")


@contextmanager
def _empty_home() -> Iterator[None]:
    """Have edgellm use an empty home, with the models of the user's own."""
    models = cache_dir() / "models"
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "cache").mkdir()
        (Path(home) / "cache" / "models").symlink_to(models)
        os.environ["EDGELLM_HOME"] = home
        yield


PICTURES: dict[str, Callable[[], None]] = {"terminal": draw_terminal, "page": draw_page, "panels": draw_panels}


def main(*names: str) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with _empty_home():
        for name in names or PICTURES:
            PICTURES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
