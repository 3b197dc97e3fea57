"""Measure everything that a graphics card changes, in one run, from a machine with Python and a compiler.

    python -m bench gpu [--folder FOLDER] [--minutes 9] [--processor] [--tables plain sessions ...]

edgellm is set up, and llama.cpp is built for the card, with its server, in `--folder`; a later run uses both again.
Then `bench.gpu.tables` measures, with all other words. Without a card all of it runs on the processor, smaller, to see
that it works.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from time import time

from bench.gpu import build


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "edgellm-bench-gpu")
    arguments, others = parser.parse_known_args(words)
    began, folder = time(), arguments.folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    kind = build.kind_of_card() or "the processor"
    print(f"Setting up edgellm, and llama.cpp for {kind}, in {folder}.", file=sys.stderr, flush=True)
    try:
        server = build.set_up(folder)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error}; see the logs in {folder}.")
    print(f"Built after {time() - began:.0f} s.", file=sys.stderr, flush=True)
    os.environ["LLAMA_CPP_LIB_PATH"] = str(server.parent)
    measure = [
        str(build.PYTHON),
        "-m",
        "bench.gpu.tables",
        *others,
        "--llama-server",
        str(server),
        "--began",
        str(began),
    ]
    sys.exit(subprocess.call(measure, cwd=build.ROOT))


if __name__ == "__main__":
    main()
