"""Pictures of every state of the web page, wide and narrow, light and dark: to be looked at after each change of it.

    .venv/bin/python -m tools.page_shots FOLDER [STATE ...]

The replies are made up (testkit/browser/page_states.py), and conversations go to a folder that is removed afterwards.
"""

import os
import sys
import tempfile
from itertools import product
from pathlib import Path

from testkit.browser.page_states import (
    SCHEMES,
    SIZES,
    STATES,
    opened_browser,
    page_in_state,
    server_without_model,
    window,
)  # fmt: skip


def main(folder: str, *names: str) -> int:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    with opened_browser() as browser:
        for name, size, scheme in product(names or STATES, SIZES, SCHEMES):
            with tempfile.TemporaryDirectory() as home:
                os.environ["EDGELLM_HOME"] = home
                with (
                    server_without_model() as server,
                    window(browser, size, scheme) as context,
                    page_in_state(context, server, name) as page,
                ):
                    page.screenshot(path=out / f"{name}-{size}-{scheme}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
