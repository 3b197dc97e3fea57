"""The tables of a graphics card, one after another while there is time; `python -m bench gpu` sets up what they need.

    python -m bench.gpu.tables [--llama-server PATH] [--tables plain sessions ...] [--minutes 9] [--processor]

- `plain`: decoding without speculation beside llama-server, the same file, random weights in shapes of 0.5B, 1.5B, 7B;
- `speculation`: our retrieval and pair beside plain decoding, and llama-server's n-gram and draft speculation;
- `sessions`: tokens a second of one verifier for 1, 16 and 64 sessions;
- `costs`: capturing attention and gates, beside a drafted token;
- `quality`: the replies of the made pairs beside those on the processor, every chunk verified, and at a budget;
- `long`: prompts of 8k and 32k tokens beside llama-server.

Without a card, or with `--processor`, less of everything is measured on the processor, to see that it works. The result
has the tables of each device by its name. On a card, a table for which no time is left is not begun, and says so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, NamedTuple

from bench.gpu import costs, decoding, quality, sessions, speculation
from bench.gpu.machine import Machine
from bench.harness.report import read, write

MODULE = "bench.gpu.tables"


class Table(NamedTuple):
    """A table: what it is, how it is measured and shown, whether it needs llama-server, and about how many seconds it
    takes on a card."""

    about: str
    measured: Callable[[Machine], dict[str, Any]]
    shown: Callable[[dict[str, Any]], str]
    with_server: bool
    seconds: float


TABLES = {
    "plain": Table("plain decoding beside llama-server", decoding.plain, decoding.table, True, 60),
    "speculation": Table("speculation beside llama-server's", speculation.measured, speculation.table, True, 60),
    "sessions": Table("verification for several sessions", sessions.measured, sessions.table, False, 40),
    "costs": Table("capture and gates", costs.measured, costs.table, False, 20),
    "quality": Table("the replies beside those on the processor", quality.measured, quality.table, False, 40),
    "long": Table("long prompts beside llama-server", decoding.long_prompts, decoding.table, True, 60),
}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, help="the program, of the same llama.cpp")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole run, with building")
    parser.add_argument("--processor", action="store_true", help="measure the processor, even if there is a card")
    parser.add_argument("--began", type=float, default=time(), help=argparse.SUPPRESS)
    parser.add_argument("--name", default="tables", help="of the result file")
    arguments = parser.parse_args(words)
    chosen = {name: one for name, one in TABLES.items() if name in arguments.tables}
    if arguments.llama_server is None and (needy := [name for name, one in chosen.items() if one.with_server]):
        parser.error(f"{', '.join(needy)} need --llama-server; `python -m bench gpu` builds it")
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine.here(arguments.llama_server, Path(folder), processor=arguments.processor)
        for name, one in chosen.items():
            since = time()
            left = 60.0 * arguments.minutes - (since - arguments.began)
            if machine.on_card and left < one.seconds:
                found: dict[str, Any] = {"left_out": f"{left:.0f} s were left"}
            else:
                found = {**one.measured(machine), "took_s": time() - since}
            sys.stdout.write(f"\n{one.about} ({machine.name}):\n{_shown(name, found)}")
            sys.stdout.flush()
            _keep(arguments, machine.name, name, found)
    sys.stdout.write(f"\n{(time() - arguments.began) / 60:.1f} minutes in all\n")


def _keep(arguments: argparse.Namespace, device: str, name: str, found: dict[str, Any]) -> None:
    """Write a table beside those of other devices; the command names no folder of this machine."""
    devices: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        devices = read(MODULE, arguments.name)["devices"]
    devices.setdefault(device, {})[name] = found
    command = f"python -m {MODULE} --llama-server PROGRAM{' --processor' if arguments.processor else ''}"
    write(arguments.name, MODULE, {"command": command, "devices": devices}, 0)


def _shown(name: str, found: dict[str, Any]) -> str:
    return f"not measured: {found['left_out']}\n" if "left_out" in found else TABLES[name].shown(found)


def table(found: dict[str, Any]) -> str:
    """Return all tables of all devices."""
    return "\n".join(
        f"{device}: {TABLES[name].about}\n\n{_shown(name, one)}"
        for device, tables in found["devices"].items()
        for name, one in tables.items()
    )


if __name__ == "__main__":
    main()
