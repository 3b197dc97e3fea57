"""Measure progressive graph scheduling on a real mesh, alone and with copied drafts (CoordGen, 3.2, Table 3).

CoordGen changes each block of a model from a graph for the prompt to a graph for decoding. Here the two are placements:
two devices begin a cold reply, each of which loads half of the layers; a third one writes faster by itself, but has to
load all of them. The workers are processes on this machine, behind a relay with the network's bandwidth and round trip,
and layers are loaded and computed at the pace of a device (`testkit.processes.paced_mesh`). The times given are of all
layers. The model is the pair's verifier, its text is compared with that of the uncut model, and every reply is cold.

Schedules:

- `wide`, `narrow`: the reply stays on the two devices, or is on the third one from the start;
- `synchronous`: the third device loads after the first token, and nothing is written meanwhile;
- `naive`: the same, but it begins to load with the last chunk of the prompt;
- `progressive`: it loads from the start, and takes over a third of the layers after the other, behind the reply;
- `one move`: it loads from the start, and takes over once it has all layers.

Drafts: none, copies from the prompt, and those with draft reuse. Calibration needs the logits of the prompt, which
never leave the last stage.

Columns: seconds to the first token; milliseconds for each token after it; seconds of whole replies; and their speed as
a multiple of `wide` without drafts, beside the paper's speeds of three models, which without graph switching have one
graph for the prompt and the reply.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Annotated, Any, Literal
from unittest.mock import patch

from bench.coordgen.tasks import SEED, TASKS
from bench.harness.figures import bar_groups
from bench.harness.progress import track
from bench.harness.results import Figures
from bench.papers.claims import TABLE_3, speeds
from edgellm.engine import Message, ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.layer_range import HERE, LayerRange, read_split
from edgellm.llm import LLM
from edgellm.llm.mesh_llm import open_mesh
from edgellm.llm.model_loading import EngineConfig
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.placement import model_costs
from edgellm.storage.model_files import HOME, resolve
from models.pairs import PAIRS
from testkit.network.relay import Network
from testkit.processes.paced_mesh import Pace, paced, paced_workers

WIDE = ("desk", "phone")
MOVES = 3
CHUNK = 64
"""Tokens of a part of the prompt, as CoordGen's prefill graph has a fixed length."""
CONTEXT, MOST = 1024, 96
LOAD, PASS, ROW = 1.5, 0.06, 0.001
"""Seconds to load all layers, of a pass through them, and more for each row of it."""
NETWORK = Network(100.0, 0.02)
"""Mbit/s, and the seconds of a round trip."""
PLAIN = ("wide", "off")
CLAIMED = {
    PLAIN: "NPU", ("progressive", "off"): "+G", ("wide", "context"): "+SD", ("progressive", "context"): "+G+SD",
    ("progressive", "context,reuse"): "Ours",
}  # fmt: skip
"""The paper's column of Table 3 for a schedule with drafts. Without +G it has one graph for prompt and reply, as `wide`
has one placement; its last one also has calibration."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Where a reply begins, the placements that take over, when these begin to load, and whether the reply waits."""

    split: str
    following: tuple[str, ...] = ()
    begins: Literal["start", "last chunk", "first token"] = "start"
    waits: bool = False


def schedules(layers: int) -> dict[str, Schedule]:
    """Return all schedules for a model of so many layers."""
    wide, narrow = placed(layers, 0), placed(layers, layers)
    moved = tuple(placed(layers, round(layers * step / MOVES)) for step in range(1, MOVES + 1))
    return {
        "wide": Schedule(wide),
        "narrow": Schedule(narrow),
        "synchronous": Schedule(wide, (narrow,), "first token", waits=True),
        "naive": Schedule(wide, (narrow,), "last chunk", waits=True),
        "progressive": Schedule(wide, moved),
        "one move": Schedule(wide, (narrow,)),
    }


def placed(layers: int, here: int) -> str:
    """Return the split of a model whose last layers are on this device, `here` in number, and the others where a reply
    begins."""
    half, stop = layers // 2, layers - here
    parts = {WIDE[0]: (0, min(half, stop)), WIDE[1]: (half, stop), HERE: (stop, layers)}
    return ",".join(f"{name}:{LayerRange(first, last)}" for name, (first, last) in parts.items() if last > first)


@dataclass(frozen=True, slots=True)
class Written:
    """A cold reply: its tokens, their seconds from when the devices began to load, and after which tokens a placement
    took over."""

    tokens: list[int]
    seconds: list[float]
    moves: list[int]


class Home:
    """Writes cold replies over the workers at the addresses `peers`."""

    def __init__(self, file: ModelFile, peers: Sequence[str], pace: Pace) -> None:
        self._file, self._peers, self._pace = file, tuple(peers), pace
        self.layers = model_costs(file).shape.layers
        self._first: dict[int, float] = {}  # of wide replies, by the tokens of the prompt: seconds to the first token

    def write(self, schedule: Schedule, prompt: Sequence[Message], drafts: str) -> Written:
        """Write one reply."""
        hardware = Hardware(n_batch=CHUNK, n_ctx=CONTEXT)
        config = EngineConfig(None, hardware=hardware, peers=self._peers, history=False)
        with open_mesh(self._file, schedule.split, config) as opened:
            mesh, times, tokens = opened.verifier.mesh, list[float](), list[int]()
            move = partial(mesh.move, [read_split(one) for one in schedule.following])
            read = len(opened.pair.prompt_writer.ids(prompt))
            if schedule.begins == "start":
                move()
            elif schedule.begins == "last chunk":
                begins = opened.began + self._first[read] - self._last_chunk(read)
                threading.Timer(max(0.0, begins - perf_counter()), move).start()
            for token in opened.pair.reply(prompt, max_tokens=MOST, retrieval=drafts):
                tokens.append(token.id)
                times.append(perf_counter() - opened.began)
                if len(tokens) == 1:
                    if schedule.begins == "first token":
                        move()
                    if schedule.waits:
                        wait(mesh)
            if not schedule.following and schedule.split != placed(self.layers, self.layers):
                self._first[read] = times[0]
            return Written(tokens, times, [one.tokens - read for one in mesh.take_overs])

    def _last_chunk(self, read: int) -> float:
        """Return the seconds that the last chunk of a prompt takes through all layers."""
        return self._pace.of_pass(self.layers, (read - 1) % CHUNK + 1)


def wait(mesh: Mesh) -> None:
    """Wait until the placement that takes over has loaded its layers."""
    until = monotonic() + 60.0
    while (coming := mesh.coming()) is None or coming.busy:
        if monotonic() > until:
            sys.exit("The placement that is to take over does not load.")
        sleep(0.002)


def figures(replies: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return the times of replies, and their speed over plain ones."""

    def whole(some: Sequence[Mapping[str, Any]]) -> float:
        return float(sum(one["seconds"][-1] for one in some))

    first = sum(one["seconds"][0] for one in replies)
    return {
        "first_token_s": first / len(replies),
        "later_token_ms": 1e3 * (whole(replies) - first) / sum(len(one["seconds"]) - 1 for one in replies),
        "reply_s": whole(replies) / len(replies),
        "speed": whole(plain) / whole(replies) if plain else None,
        "same_text": sum(one["same"] for one in replies),
    }


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table: a line for each schedule with each kind of drafts, and the paper's numbers."""
    lines = [
        "| schedule | drafts | first token, s | ms a token after it | reply, s | speed | the paper |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = found["ways"]
    for row in rows:
        claimed = CLAIMED.get((row["schedule"], row["drafts"]))
        speed = "" if row["speed"] is None else f"{row['speed']:.2f}"
        lines.append(
            f"| {row['schedule']} | {row['drafts']} | {row['first_token_s']:.2f} | {row['later_token_ms']:.0f} |"
            f" {row['reply_s']:.2f} | {speed} | {speeds(claimed) if claimed else ''} |"
        )
    same, replies = sum(row["same_text"] for row in rows), sum(len(row["replies"]) for row in rows)
    lines += ["", f"text of the uncut model: {same} of {replies} replies", f"{TABLE_3}; the last one with calibration"]
    return "\n".join(lines) + "\n"


def plot(found: dict[str, Any], path: Path) -> Path | None:
    """Draw the speed of whole replies by every schedule, with each kind of drafts."""
    names = list(dict.fromkeys(row["schedule"] for row in found["ways"]))
    title = "whole replies"
    speed = {(row["schedule"], row["drafts"]): row["speed"] or 0.0 for row in found["ways"]}
    kinds = list(dict.fromkeys(row["drafts"] for row in found["ways"]))
    bars = {f"drafts: {drafts}": [speed[name, drafts] for name in names] for drafts in kinds}
    return bar_groups(path, {title: bars}, {title: names}, "speed over the wide placement without drafts")


def measure(
    cases: Annotated[int, "of each task"] = 2,
    tasks: Annotated[Sequence[str], "none for all"] = (),
    drafts: Annotated[Sequence[str], "as --retrieval"] = ("off", "context", "context,reuse"),
) -> Figures:
    """Write all replies by every schedule in turn, with each of the drafts."""
    path, families = resolve(HOME.verifier), {task: TASKS[task] for task in tasks or TASKS}
    file = ModelFile.open(path)
    layers = model_costs(file).shape.layers
    pace = Pace(LOAD / layers, PASS / layers, ROW / layers)
    ways = [(name, one) for one in drafts for name in schedules(layers)]
    found: dict[tuple[str, str], list[Figures]] = {way: [] for way in ways}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {"EDGELLM_HOME": folder}),  # for the pieces that are cut
        paced(pace),
        paced_workers(WIDE, path, Path(folder), pace, NETWORK) as peers,
        LLM.open("none", path, threads=1, history=False) as whole,
    ):
        home = Home(file, peers, pace)
        for name in ("wide", "narrow"):  # all pieces are cut
            home.write(schedules(layers)[name], [Message("user", "?")], "off")
        for task, family in track(families.items(), "tasks"):
            for case in PAIRS["home"].held_out(family, cases, SEED):
                prompt = [Message(turn.role, turn.text) for turn in case.prompt]
                own = [token.id for token in whole.reply(prompt, max_tokens=MOST, retrieval="off")]
                for name, one in ways:
                    reply = home.write(schedules(layers)[name], prompt, one)
                    row = {"seconds": reply.seconds, "moves": reply.moves, "same": reply.tokens == own}
                    found[name, one].append({"task": task, **row})
    rows = [
        {"schedule": name, "drafts": one, **figures(replies, found.get(PLAIN)), "replies": replies}
        for (name, one), replies in found.items()
    ]
    return {"ways": rows}


def failures(found: Figures) -> list[str]:
    """Return the ways in which a text is not that of the uncut model."""
    return [
        f"{row['schedule']}, {row['drafts']}: another text"
        for row in found["ways"]
        if row["same_text"] < len(row["replies"])
    ]
