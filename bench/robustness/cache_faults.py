"""Put a fault into each of the traps of llama.cpp's caches, 100 times: does the self-test at load find it?

    python -m bench.robustness.cache_faults [--times 100]

When a model is loaded for the first time, some twenty tokens show whether llama.cpp gives back what was rolled back,
branched and decoded in one batch (`edgellm/engine/trial/self_test.py`). Here each fault of `testkit/cache_faults.py` is
put in on purpose, with several architectures, other weights and other texts every time. *Caught* counts the trials in
which the self-test says what the fault breaks; *false alarms* those without a fault in which it says anything, over all
architectures of the faults but the one with which llama.cpp itself is wrong. Exit code 1 unless all are caught and
there is no false alarm.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness.report import write
from edgellm.engine import Model
from edgellm.engine.trial.self_test import self_test
from testkit.cache_faults import FAULTS, Fault
from testkit.gguf import architectures

_WEIGHTS = 2  # files of each architecture


class Files:
    """Small models in a folder, written when they are first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str, seed: int) -> Path:
        path = self._folder / f"{name}-{seed}.gguf"
        if not path.exists():
            architectures.write(name, path, seed=seed)
        return path


def caught(files: Files, fault: Fault, number: int) -> bool:
    """Return whether the self-test finds the fault, with an architecture, weights and a text chosen by `number`."""
    name = fault.architectures[number % len(fault.architectures)]
    path = files.path(name, number // len(fault.architectures) % _WEIGHTS)
    with Model.load(path, probe=False) as model, fault.put():
        return fault.found in self_test(model, number)


def false_alarms(files: Files, times: int) -> Counter[str]:
    """Return how many of `times` trials without a fault find one, by architecture, with their number as "trials"."""
    found = Counter(trials=times)
    wrong = set(FAULTS["several texts in one batch"].architectures)
    names = sorted({name for fault in FAULTS.values() for name in fault.architectures} - wrong)
    for number in range(times):
        name = names[number % len(names)]
        with Model.load(files.path(name, number // len(names) % _WEIGHTS), probe=False) as model:
            found[name] += bool(self_test(model, number))
    return found


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each fault."""
    lines = [f"{'fault':<38}{'found as':<12}{'architectures':>14}{'caught':>14}"]
    for name, row in found["faults"].items():
        caught = f"{row['caught']} of {row['times']}"
        lines.append(f"{name:<38}{row['found']:<12}{row['architectures']:>14}{caught:>14}")
    alarms = found["false_alarms"]
    count = sum(alarms.values()) - alarms["trials"]
    return "\n".join([*lines, "", f"{count} false alarms in {alarms['trials']} trials without a fault."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100, help="of each fault")
    parser.add_argument("--name", default="cache_faults", help="of the result file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder))
        faults: dict[str, dict[str, Any]] = {
            name: {
                "found": fault.found,
                "architectures": len(fault.architectures),
                "times": arguments.times,
                "caught": sum(caught(files, fault, number) for number in range(arguments.times)),
            }
            for name, fault in FAULTS.items()
        }
        alarms = false_alarms(files, arguments.times)
    found = {"faults": faults, "false_alarms": alarms}
    sys.stdout.write(table(found))
    write(arguments.name, "bench.robustness.cache_faults", found, 0)
    missed = any(row["caught"] < row["times"] for row in faults.values())
    sys.exit(1 if missed or sum(alarms.values()) > arguments.times else 0)


if __name__ == "__main__":
    main()
