"""Wrong measurements: curves and figures of devices, disks and lines that are 300 times too long or too short."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import exp, log
from pathlib import Path

from bench.robustness.attack.harness import Attack, Found
from bench.robustness.busy import busy
from edgellm.coldstart.home import Home
from edgellm.coldstart.plan import PlanOption, predict
from edgellm.engine import Context, ContextSpec, Model, ModelFile
from edgellm.engine.gguf.synthetic_layers import blocks_of
from edgellm.layer_range import HERE
from edgellm.llm import LLM
from edgellm.llm.cost_curves import CurveMeasurement
from edgellm.llm.mesh_timeline import disproved_figures
from edgellm.mesh.fleet_profiler import Survey, read_links, store_links, survey
from edgellm.mesh.home_workers import discover_workers
from edgellm.mesh.layer_sources import StoredLayers, WholeModel
from edgellm.mesh.model_costs import model_costs
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.layers.bandwidth_probe import LinkSpeed
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.servers import WorkerServer
from edgellm.spec.types import Source
from edgellm.storage import resolve
from edgellm.storage.layers.store import LayerStore
from testkit import ROOT

FACTOR = 300.0
TOKENS = 200
NEAR = 16.0
"""A corrected figure is off by at most this factor, as its new measurement may have been disturbed, too."""
PROMPT = "Repeat this sentence word by word, three times: the blue mug stands beside the old lamp in the kitchen."
BUSY = 4  # processes
NOTES = ROOT / "docs" / "notes.txt"
QUESTIONS = ("When is the film night?", "Who has the drill?", "Where is the blue umbrella?", "Where is the ladder?")
LEAST_COPIED = 0.5  # share of the copied tokens with a curve that was measured on a quiet machine

Spoil = Callable[[list[float]], list[float]]


def _curves() -> dict[str, Spoil]:
    """Return functions that spoil the seconds of a curve, by name."""
    rows: dict[str, tuple[int, int | None]]
    rows = {"all": (0, None), "one row": (0, 1), "three rows": (2, 3), "drafts": (1, None)}
    return {
        f"{name} {sign} 300": partial(_scaled, factor=factor, first=first, end=end)
        for sign, factor in (("x", FACTOR), ("/", 1.0 / FACTOR))
        for name, (first, end) in rows.items()
    }


def _scaled(seconds: list[float], *, factor: float, first: int, end: int | None) -> list[float]:
    """Return the seconds with those from place `first` up to `end` times `factor`."""
    return [
        *seconds[:first],
        *(factor * one for one in seconds[first:end]),
        *(seconds[end:] if end is not None else []),
    ]


def spoil_curves(quick: bool) -> Iterator[str]:
    """Yield a sentence for each spoiled curve ("" if it was corrected) after a reply of at most `TOKENS` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGELLM_HOME"] = folder
        with LLM.open("none", "edgellm-verifier") as pair:
            pair.curve()
        (path,) = (Path(folder) / "cache" / "curves").iterdir()
        good = json.loads(path.read_text(encoding="utf-8"))
        for name, spoil in list(_curves().items())[: 2 if quick else None]:
            spoiled = {**good, "seconds": spoil(good["seconds"]), "waited": 0.0}
            if name.startswith("all"):
                spoiled["change"] = spoil([good["change"]])[0]
            path.write_text(json.dumps(spoiled), encoding="utf-8")
            _write(TOKENS)
            found = json.loads(path.read_text(encoding="utf-8"))
            off = max(abs(log(a / b)) for a, b in zip(found["seconds"], good["seconds"], strict=False))
            yield "" if exp(off) <= NEAR else f"curve, {name}: {exp(off):.0f} times off after {TOKENS} tokens"


def _write(tokens: int, prompt: str = PROMPT) -> tuple[int, int]:
    """Write a reply; return the number of its tokens, and of copied ones."""
    with LLM.open("none", "edgellm-verifier") as pair:
        written = list(pair.reply(prompt, max_tokens=tokens))
    return len(written), sum(token.source is Source.RETRIEVED for token in written)


def _copied() -> float:
    """Return the share of copied tokens in answers that stand in the notes."""
    notes = NOTES.read_text(encoding="utf-8")
    done = [_write(TOKENS, f"{notes}\n\n{question}") for question in QUESTIONS]
    return sum(copied for _, copied in done) / sum(tokens for tokens, _ in done)


def spoil_figures() -> Iterator[str]:
    """Yield a sentence for each spoiled figure of this device ("" if it was corrected) after one reply at home."""
    file = ModelFile.open(resolve("edgellm-verifier"))
    blocks, planned = blocks_of(file), model_costs(file)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGELLM_HOME"] = folder

        def look() -> Survey:
            return survey(Trust.load(), (), blocks, planned.name, planned.shape)

        home = look()
        good = home.speeds[HERE].figures
        fleet = home.fleet()
        real = predict(Home(fleet.devices, planned, 64, 16), ((0, planned.shape.layers),))  # seconds of a reply
        for what in ("seconds", "disk"):
            for sign, factor in (("x", FACTOR), ("/", 1.0 / FACTOR)):
                path = next(one for one in (Path(folder) / "cache" / "figures").glob(f"{blocks.key[:16]}-*.json"))
                kept = json.loads(path.read_text(encoding="utf-8"))
                kept[what] = [factor * one for one in kept[what]] if what == "seconds" else factor * kept[what]
                path.write_text(json.dumps({**kept, "waited": 0.0, "taken": kept["taken"] - 5}), encoding="utf-8")
                wrong = look().fleet()
                plan = predict(Home(wrong.devices, planned, 64, 16), ((0, planned.shape.layers),))
                disproved_figures(real, plan, {})
                found = look().speeds[HERE].figures
                pairs = (
                    zip(found.seconds, good.seconds, strict=False) if what == "seconds" else ((found.disk, good.disk),)
                )
                off = exp(max(abs(log(a / b)) for a, b in pairs))
                yield "" if off <= NEAR else f"{what} {sign} 300: {off:.0f} times off after one reply"


def spoil_lines() -> Iterator[str]:
    """Yield a sentence for each spoiled line figure ("" if it was corrected) after one reply at home."""
    file = ModelFile.open(resolve("edgellm-verifier"))
    blocks, planned = blocks_of(file), model_costs(file)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGELLM_HOME"] = folder
        store = LayerStore(Path(folder) / "layers", 10**9)
        cache = WeightCache(WholeModel(file, store))
        with WorkerServer(cache, Address("127.0.0.1", 0), stored=StoredLayers(store)) as running:
            workers = discover_workers((), [("desk", running.address)])

            def look() -> Survey:
                return survey(Trust.load(), workers, blocks, planned.name, planned.shape)

            home, half = look(), planned.shape.layers // 2
            good = home.lines[HERE, "desk"].line
            cut = ((0, half), (1, planned.shape.layers - half))

            def reply(over: Survey) -> PlanOption:
                fleet = over.fleet()
                return predict(Home(fleet.devices, planned, 64, 16, links=fleet.links, cold=False), cut)

            real = reply(home)
            for sign, factor in (("x", FACTOR), ("/", 1.0 / FACTOR)):
                lines = read_links()
                spoiled = LinkSpeed(factor * good.round_trip, good.up / factor, good.down / factor)
                older = {
                    ends: replace(kept, line=spoiled, waited=0.0, taken=kept.taken - 5) for ends, kept in lines.items()
                }
                store_links(older)
                disproved_figures(real, reply(look()), {"desk": workers[0]})
                found = look().lines[HERE, "desk"].line
                off = max(abs(log(a / b)) for a, b in ((found.up, good.up), (found.round_trip, good.round_trip)))
                yield "" if exp(off) <= NEAR else f"line {sign} 300: {exp(off):.0f} times off after one reply"


def measured_while_busy() -> dict[str, float]:
    """Return the error of a curve measured beside `BUSY` processes, and the share that is copied with it later."""
    path = resolve("edgellm-verifier")
    with Model.load(path) as model, Context(model, ContextSpec(n_ctx=128)) as context:
        quiet = CurveMeasurement().run(context)
        with busy(BUSY):
            loaded = CurveMeasurement().run(context)
    ratios = [loaded.table()[rows] / quiet.table()[rows] for rows in (1, 2, 4, 8, 16, 64)]
    copied = []
    for processes in (0, BUSY):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["EDGELLM_HOME"] = folder
            with busy(processes):
                _write(4)  # measures the curve
            copied.append(_copied())
    return {
        "curve_off_most": max(*ratios, 1.0 / min(ratios)),
        "curve_off_median": sorted(ratios)[len(ratios) // 2],
        "copied_quiet": copied[0],
        "copied_after_busy": copied[1],
    }


def run(quick: bool) -> Found:
    """Spoil every kind of figure, and count those that are not corrected within `TOKENS` tokens or one reply."""
    tried = [*spoil_curves(quick)]
    if not quick:
        tried += [*spoil_figures(), *spoil_lines()]
    figures = {} if quick else measured_while_busy()
    if figures:
        kept = figures["copied_after_busy"] >= LEAST_COPIED * figures["copied_quiet"]
        tried.append("" if kept else "a curve that was measured on a busy machine keeps replies from copying")
    return Found(len(tried), tuple(filter(None, tried)), figures)


ATTACKS = (Attack("spoiled-figures", "curves, devices, disks and lines measured 300 times too long or too short", run),)
