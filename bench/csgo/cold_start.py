"""Measure cold starts in a home of throttled machines: the planned split and others, predicted and measured.

Homes are drawn at random: two to four machines in namespaces (`testkit.network.home`), with disks, lines and processors
that are really throttled. In each, the laptop measures the devices, plans, and then starts cold, one split after
another: new workers, no file in memory, `edgellm mesh run` with the split. Every machine has the whole model on its
disk, already cut, so that every split can run. Linux, as root.

Columns: devices; seconds to the first token with the planned split, the best single device, an even split and a split
by strength, with the planner's prediction in brackets; and the planned split.
"""

import json
import math
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from bench.harness import results
from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.statistics import spread
from edgellm.engine import Model
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import InvalidOption
from edgellm.layer_range import HERE, read_split
from edgellm.llm import compose
from testkit.gguf.random_model import SHAPES, write
from testkit.network.home import Spec, Throttled, home, why_not

NAMES = ("laptop", "desk", "phone", "box")
BUSY = 0.95  # share of the machine's cores, in all; the rest is for the measuring process
MODEL = "model.gguf"


def fleet(rng: random.Random, cores: float) -> tuple[Spec, ...]:
    """Draw a home at random, log-uniform in disk, line and processor.

    The laptop, which also runs the coordinator's Python, has most of a core.
    """

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    count = rng.randint(2, 4)
    cpus = [between(0.6, 0.9), *(between(0.25, 0.5) for _ in range(count - 1))]
    scale = min(1.0, BUSY * cores / sum(cpus))
    return tuple(
        Spec(
            name, round(between(40, 300)), round(between(40, 300)), round(between(6, 30), 1), round(cpu * scale, 2)
        )
        for name, cpu in zip(NAMES, cpus, strict=False)
    )  # fmt: skip


def prepare(machines: Sequence[Throttled], splits: Sequence[str]) -> None:
    """Try the model on each machine, and cut the pieces that a split needs there, as the first run would."""
    for machine in machines:
        name = HERE if machine is machines[0] else machine.spec.name
        shares = [share for split in splits for share in read_split(split) if share.name == name]
        words = (str(machine.home / MODEL), *(f"{share.layers.start}-{share.layers.last}" for share in shares))
        with machine.hurried():
            _, err = machine.start(*words, module="bench.csgo.cut_pieces").communicate(timeout=300)
        assert not err.strip(), err


@contextmanager
def worker(machine: Throttled, *words: str) -> Iterator[None]:
    """Run a worker, started and stopped without throttling."""
    with ExitStack() as running:
        with machine.hurried():
            running.enter_context(machine.worker(*words))
        yield
        running.enter_context(machine.hurried())


def plans(machines: Sequence[Throttled], model: Path, module: str, *words: str) -> Any:
    """Give each machine the model, and return what the program `module` plans on the first one over all of them."""
    for machine in machines:
        if not (machine.home / MODEL).is_file():
            shutil.copyfile(model, machine.home / MODEL)
    with ExitStack() as running:
        for other in machines[1:]:
            running.enter_context(worker(other))
        process = machines[0].start(str(machines[0].home / MODEL), *words, module=module)
        out, err = process.communicate(timeout=600)
    assert out, err
    return json.loads(out.splitlines()[-1])


def cold(machines: Sequence[Throttled], split: str, prompt: str) -> dict[str, Any]:
    """Start cold once and return the output of `edgellm mesh run --json`."""
    laptop, *others = machines
    names = {share.name for share in read_split(split)}
    with ExitStack() as running:
        for other in others:
            if other.spec.name in names:
                running.enter_context(worker(other, "-m", str(other.home / MODEL)))
        for machine in machines:
            machine.forget()
        command = ("mesh", "run", str(laptop.home / MODEL), prompt, "--split", split)
        out, err = laptop.start(*command, "--max-tokens", "1", "--retrieval", "off", "--json").communicate(timeout=300)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    found = [line["mesh"] for line in lines if "mesh" in line]
    if not found:
        sys.exit(f"{split} did not run:\n{err}")
    return dict(found[-1])


def one_home(specs: Sequence[Spec], folder: Path, model: Path, prompt: str, tokens: int) -> Any:
    with home(specs, folder) as machines:
        planned = plans(machines, model, "bench.csgo.list_plans", "--tokens", str(tokens))
        splits = {name: option["split"] for name, option in planned["ways"].items()}
        prepare(machines, list(splits.values()))
        measured: dict[str, Any] = {}
        for split in dict.fromkeys(splits.values()):
            measured[split] = cold(machines, split, prompt)
        return {"specs": [asdict(spec) for spec in specs], "planned": planned, "measured": measured}


SPLITS = ("planned", "best single", "even", "by strength")


def row(found: dict[str, Any]) -> list[str]:
    """Return the cells of a home: each split, measured (predicted), and the planned split."""
    options, words = found["planned"]["ways"], [str(len(found["specs"]))]
    for name in SPLITS:
        option = options.get(name)
        took = "" if option is None else f"{found['measured'][option['split']]['ttft_s']:.2f} ({option['ttft_s']:.2f})"
        words.append(took)
    return [*words, options["planned"]["split"]]


def table(found: dict[str, Any]) -> str:
    """Return a line for each home, and a summary."""
    head = ["devices", *(name.upper() for name in SPLITS), "SPLIT"]
    rows = [head, *map(row, found["each"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in rows]
    some = found["prediction"]
    rivals = ", ".join(f"{share:.0%} of {name}" for name, share in found["of_rival"].items())
    model = f"{found['tokens']} tokens, {found['shape']} with {found['layers']} layers"
    lines.append(f"seconds from cold to the first token, measured (predicted): {model}")
    first = f"the planned split came first in {found['first']} of {found['homes']} homes (within 2%)"
    lines.append(f"{first}; in the median it took {rivals}")
    within = f"{found['planned_within_15']:.0%} of the planned splits, {found['within_15']:.0%} of all splits"
    far = f"{some['min']:+.0%} to {some['max']:+.0%}, in the median {some['median']:+.0%}"
    lines.append(f"predicted within 15%: {within}; {far}")
    return "\n".join(lines)


def figures(homes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return over all homes the plan's errors, how often the planned split came first, and its savings."""
    off, first = [], 0
    rivals: dict[str, list[float]] = {}
    for found in homes:
        options = found["planned"]["ways"]
        took = {name: found["measured"][option["split"]]["ttft_s"] for name, option in options.items()}
        different = {option["split"]: name for name, option in options.items()}
        off += [options[name]["ttft_s"] / took[name] - 1.0 for name in different.values()]
        first += took["planned"] <= min(took.values()) * 1.02
        for name, seconds in took.items():
            if name != "planned":
                rivals.setdefault(name, []).append(took["planned"] / seconds)
    planned = [
        found["planned"]["ways"]["planned"]["ttft_s"]
        / found["measured"][found["planned"]["ways"]["planned"]["split"]]["ttft_s"] - 1.0
        for found in homes
    ]  # fmt: skip
    return {
        "homes": len(homes), "first": first, "prediction": spread(off),
        "within_15": sum(abs(x) <= 0.15 for x in off) / len(off),
        "planned_within_15": sum(abs(x) <= 0.15 for x in planned) / len(planned),
        "of_rival": {name: statistics.median(values) for name, values in rivals.items()},
    }  # fmt: skip


def measure(
    fleets: int = 20,
    shape: Literal["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"] = "qwen2.5-0.5b",
    layers: int = 12,
    words: Annotated[int, "of the prompt"] = 60,
    seed: int = 0,
) -> Iterator[Figures]:
    """Yield the figures of all homes so far, after each."""
    if reason := why_not():
        raise InvalidOption(f"No home can be made here: {reason}.", "Run it on Linux, as root.")
    rng = random.Random(seed)
    prompt = " ".join(rng.choice(("mug", "book", "lamp", "chair", "garden", "letter")) for _ in range(words))
    homes = list[Figures]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / MODEL
        write(model, replace(SHAPES[shape], n_layer=layers, n_vocab=8192), "Q4_0", seed)
        with Model.load(model, TEXT_ONLY) as text:
            tokens = len(text.chat_prompt(compose(prompt)))
        for _ in track(range(fleets), "homes"):
            homes.append(one_home(fleet(rng, results.cores()), folder, model, prompt, tokens))
            yield {"shape": shape, "layers": layers, "tokens": tokens} | figures(homes) | {"each": homes}
