"""Decoders of files of edgellm or its user: damaged, from another version, or foreign."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from bench.robustness.fuzz.mutate import tweaked_json
from bench.robustness.fuzz.target import Target
from edgellm.cli.app import app
from edgellm.cli.settings import read_file
from edgellm.engine import ModelFile
from edgellm.errors import InvalidOption
from edgellm.http.mesh_status import read_plan
from edgellm.llm.cost_curves import read_curve
from edgellm.mesh.fleet_file import read_fleet
from edgellm.mesh.fleet_profiler import doubt, read_doubts, read_links, stored_speed
from edgellm.rpc.trust.identity import Identity
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.profiler import OnlineProfiler
from edgellm.storage import History
from edgellm.storage.chat_log import Conversations, typed_lines
from edgellm.storage.fingerprint import quick_fingerprint
from edgellm.storage.layers.manifest import manifest_of
from edgellm.storage.layers.store import LayerStore
from edgellm.storage.retention import max_age
from testkit import ROOT

MODELS = ROOT / "models"
_VARIANTS = 100  # variants of each JSON file, beside the valid one
_MAKE = """
import sys
from pathlib import Path
from bench.robustness.attack.files.own_files import sound_home
sound_home(Path(sys.argv[1]))
"""
_DEVICE = """
[[device]]
name = "desk"
tflops = 20
util_a = 0.4
util_b = 0.001
disk_mb_s = 2000
memory_gb = 16
uplink_mbps = 400
downlink_mbps = 500
"""
_FLEET = (
    _DEVICE + _DEVICE.replace("desk", "lap") + "latency_ms = 2.5\nmemory_gb_s = 40\n"
    '[[link]]\nfrom = "lap"\nto = "desk"\nmbps = 90\nlatency_ms = 4\n'
    "[model]\nlayers = 4\nd_model = 64\nheads = 4\nkv_heads = 2\nd_head = 16\nd_ff = 128\nbytes_per_weight = 0.5\n"
)
_VALUES = ("-1", "0", "nan", "inf", "1e400", "1" + "0" * 400, "true", '"x"', "[]", "{}", "1979-05-27", "0.5", "")
_PLAN = {"ttft_s": 1.5, "advice": "Use both.", "stages": [
    {"device": "desk", "first_layer": 1, "last_layer": 6, "load_s": 0.1, "compute_s": 0.2, "finish_s": 0.3,
     "wait_s": 0.0, "network_s": 0.0}]}  # fmt: skip


@contextmanager
def _home(folder: Path) -> Iterator[Path]:
    """Yield a home with a valid file of every kind."""
    before = os.environ.get("EDGELLM_HOME")
    os.environ["EDGELLM_HOME"] = str(folder)
    subprocess.run(
        [sys.executable, "-c", _MAKE, str(folder)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    doubt("here", 1)
    try:
        yield folder
    finally:
        os.environ.pop("EDGELLM_HOME") if before is None else os.environ.update(EDGELLM_HOME=before)


def _variants(name: str, data: bytes) -> list[bytes]:
    """Return the file and, if it is JSON, lines of JSON, or TOML, variants with other values."""
    rng, made = random.Random(name), [data]
    if data.startswith(b"SQLite"):
        return made
    if b" = " in data:
        places = list(re.finditer(r"(?<= = ).*", data.decode()))
        chosen = (rng.choice(places) for _ in range(_VARIANTS))
        return made + [
            f"{at.string[: at.start()]}{rng.choice(_VALUES)}{at.string[at.end() :]}".encode() for at in chosen
        ]
    if data.lstrip().startswith((b"{", b"[")):
        for _ in range(_VARIANTS):
            odd = [tweaked_json(found, rng) for found in _read_json(data)]
            made.append("\n".join(map(json.dumps, odd)).encode())
    return made


def _read_json(data: bytes) -> list[Any]:
    """Return the JSON value of the file, or of each of its lines."""
    try:
        return [json.loads(data)]
    except ValueError:
        return [json.loads(line) for line in data.splitlines()]


@contextmanager
def targets(folder: Path) -> Iterator[list[Target]]:
    """Yield the readers of files of our own, in a home below `folder`."""
    with _home(folder) as home:
        yield _targets(home)


def _targets(home: Path) -> list[Target]:
    (home / "plan.json").write_text(json.dumps(_PLAN))
    (home / "fleet.toml").write_text(_FLEET)
    draft = MODELS / "draft.gguf"
    root = typer.Context(get_command(app), info_name="edgellm")
    readers: list[tuple[str, str, Callable[[Path], object], int]] = [
        ("settings", "config/config.toml", lambda _path: read_file(root), 10_000),
        ("chats", "data/history/chats.sqlite3", _use_chats, 3_000),
        ("greatest age", "data/history/max-age", lambda _path: max_age(), 5_000),
        ("profile", "data/profiles/*.json", lambda path: Profile.load(path, own=True), 20_000),
        ("first replies", "data/profiles/*.first.jsonl", lambda path: OnlineProfiler().load(path), 15_000),
        ("identity", "data/trust/identity.pem", lambda _path: Identity.load(), 2_000),
        ("cost curve", "cache/curves/*.json", lambda path: read_curve(path, "a processor"), 15_000),
        ("fingerprints", "cache/fingerprints.json", lambda _path: quick_fingerprint(draft), 5_000),
        ("recipe", "cache/recipes/*.json", lambda _path: manifest_of(ModelFile.open(draft)), 5_000),
        ("owners", "cache/layers/models/*/*.json", lambda _path: LayerStore().models(), 10_000),
        ("device figures", "cache/figures/device-*.json", lambda _path: stored_speed(None), 10_000),
        ("line figures", "cache/figures/lines.json", lambda _path: read_links(), 10_000),
        ("doubts", "cache/figures/doubts.json", lambda _path: read_doubts(), 5_000),
        ("plan", "plan.json", read_plan, 10_000),
        ("fleet", "fleet.toml", read_fleet, 10_000),
    ]
    return [_target(home, *reader) for reader in readers]


def _use_chats(path: Path) -> None:
    """Read everything in the database of chats, and add to it; remove files that were set aside."""
    try:
        for read in (History().recent, History().facts, typed_lines().recent, Conversations().all):
            read()
        History().add("Where is my mug?", "On the shelf.")
    finally:
        for beside in path.parent.glob(f"{path.name}?*"):
            beside.unlink()


def _target(home: Path, name: str, place: str, read: Callable[[Path], object], share: int) -> Target:
    paths = [path for path in sorted(home.glob(place)) if ".first" not in path.name or "first" in place]
    if not paths:
        raise InvalidOption(
            f"There is no {place} in the home.", "Have bench/robustness/attack/files/own_files.py make one."
        )
    path = paths[0]
    sound = path.read_bytes()

    def put(data: bytes) -> None:
        if path.is_symlink() or path.is_dir():
            raise AssertionError(f"{path} is no file any more")
        path.write_bytes(data)
        path.chmod(0o600)
        read(path)

    return Target(name, _variants(name, sound), put, share)
