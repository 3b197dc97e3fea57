"""Compare the RPC engine with llama.cpp's own RPC, in a home of throttled machines.

    python -m bench.mesh.rpc_engine [--repeats 3] [--names qwen35 lfm2 glm4 'small glm4']

Three machines (`testkit.network.home`): the laptop asks, and two others hold all layers. Each model is of an
architecture whose layers cannot be cut, in float32 with random weights. Ours is `edgellm serve --role worker --rpc` on
the others, with mutual TLS; llama.cpp's own is its server, unprotected, from the same library. Both take the same
layers, prompt and tokens, and take turns. `first`: no weight is kept on the others, and nothing is in memory; `kept`:
the others keep large weights on their disks; a token is timed warm. Before either, the devices are measured, and the
planner says what it expects of the same split. Linux, as root.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.harness import report
from bench.harness.statistics import spread
from edgellm.layer_range import read_split
from testkit.gguf.architectures import Value, write
from testkit.network.home import Spec, Throttled, home, why_not

HOME = (Spec("laptop", 400, 400, 200, 0.6), Spec("desk", 400, 400, 200, 0.6), Spec("box", 200, 200, 100, 0.5))
AIM = 0.97  # of the speed of llama.cpp's own RPC, warm
MODEL = "model.gguf"
SPLIT = "desk:1-2,box:3-4"
WIDE: dict[str, Value] = {
    "embedding_length": 2048, "feed_forward_length": 6144, "attention.head_count": 32, "attention.head_count_kv": 8,
}  # fmt: skip
NARROW: dict[str, Value] = {
    "embedding_length": 1024, "feed_forward_length": 3072, "attention.head_count": 16, "attention.head_count_kv": 4,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Value]]] = {
    "qwen35": ("qwen35", WIDE | {
        "attention.key_length": 64, "attention.value_length": 64, "ssm.inner_size": 4096, "ssm.state_size": 128,
        "ssm.time_step_rank": 32, "ssm.group_count": 16, "rope.dimension_count": 32,
        "rope.dimension_sections": [8, 4, 4, 0],
    }),
    "lfm2": ("lfm2", WIDE | {"attention.head_count_kv": [0, 0, 8, 0]}),
    "glm4": ("glm4", WIDE | {"rope.dimension_count": 32}),
    "small glm4": ("glm4", NARROW | {"rope.dimension_count": 32}),
}  # fmt: skip
"""Each model's architecture and sizes."""


def ours(machines: Sequence[Throttled], tokens: int, more: int, *asked: str) -> dict[str, Any]:
    """Return the seconds over the RPC engine, cold; `asked`: further words for `bench.mesh.rpc_reply`."""
    laptop, *others = machines
    with ExitStack() as running:
        for other in others:
            with other.hurried():
                serve = ("serve", "--role", "worker", "--rpc", "--host", other.address, "--port", "50151")
                running.enter_context(other.running(*serve, until="Use it with"))
        for machine in machines:
            machine.forget()
        words = (str(laptop.home / MODEL), "--split", SPLIT, "--tokens", str(tokens), "--more", str(more))
        return _timed(laptop, "bench.mesh.rpc_reply", *words, *asked)


def plain(machines: Sequence[Throttled], tokens: int, more: int) -> dict[str, Any]:
    """Return the seconds over llama.cpp's own RPC, cold."""
    laptop, *others = machines
    with ExitStack() as running:
        for other in others:
            with other.hurried():
                serve = ("serve", f"{other.address}:50152", "--cache", str(other.home / "llama" / "rpc"))
                running.enter_context(other.running(*serve, until="serving at", module="bench.mesh.plain_rpc"))
        for machine in machines:
            machine.forget()
        servers = ",".join(f"{other.address}:50152" for other in others)
        shares = [str(len(share.layers)) for share in read_split(SPLIT)]
        words = ("reply", str(laptop.home / MODEL), "--servers", servers, "--tokens", str(tokens), "--more", str(more))
        return _timed(laptop, "bench.mesh.plain_rpc", *words, "--shares", *shares)


def _timed(laptop: Throttled, module: str, *words: str) -> dict[str, Any]:
    process = laptop.start(*words, module=module)
    out, err = process.communicate(timeout=600)
    if process.returncode:
        sys.exit(f"{module} {' '.join(words)} did not run:\n{err}")
    return dict(json.loads(out.splitlines()[-1]))


def one_model(name: str, folder: Path, repeats: int, tokens: int, more: int) -> dict[str, Any]:
    """Return what both took with a model, first and with kept weights."""
    with home(HOME, folder) as machines:
        path = machines[0].home / MODEL
        architecture, sizes = MODELS[name]
        write(architecture, path, sizes=sizes)
        size = path.stat().st_size
        ways = {"ours": ours, "plain": plain}
        predicted = {"first": ours(machines, tokens, more, "--predict")}
        first = {way: run(machines, tokens, more) for way, run in ways.items()}
        predicted["kept"] = ours(machines, tokens, more, "--predict")
        kept: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for number in range(repeats):
            for way in sorted(ways, reverse=number % 2 == 1):
                kept[way].append(ways[way](machines, tokens, more))
        path.unlink()
        for machine in machines:
            for kept_there in ("llama", "cache/tensors"):
                shutil.rmtree(machine.home / kept_there, ignore_errors=True)
    return {"model": name, "bytes": size, "first": first, "kept": kept, "predicted": predicted, **_ratios(kept)}


def _ratios(kept: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return for each figure how fast ours is, as a share of llama.cpp's own speed, by medians, and its spread."""
    found: dict[str, Any] = {}
    for key in ("ttft_s", "token_s"):
        mine, theirs = ([run[key] for run in kept[way]] for way in ("ours", "plain"))
        found[key] = {"ours": spread(mine), "plain": spread(theirs)}
        found[key]["speed"] = statistics.median(theirs) / statistics.median(mine)
    return {"warm": found}


def table(found: dict[str, Any]) -> str:
    """Return a line for each model, and how it was measured."""
    head = ["MODEL", "SIZE"]
    for part in ("FIRST", "KEPT", "TOKEN"):
        head += [part, "(PREDICTED)", "(LLAMA.CPP)"]
    rows = [[*head, "SPEED"]]
    for one in found["models"]:
        first, warm, predicted = one["first"], one["warm"], one["predicted"]
        rows.append([
            one["model"], f"{one['bytes'] / 1e6:.0f} MB",
            f"{first['ours']['ttft_s']:.1f} s", f"{predicted['first']['ttft_s']:.1f} s",
            f"{first['plain']['ttft_s']:.1f} s",
            f"{warm['ttft_s']['ours']['median']:.1f} s", f"{predicted['kept']['ttft_s']:.1f} s",
            f"{warm['ttft_s']['plain']['median']:.1f} s",
            f"{1e3 * warm['token_s']['ours']['median']:.0f} ms", f"{1e3 * predicted['kept']['token_s']:.0f} ms",
            f"{1e3 * warm['token_s']['plain']['median']:.0f} ms", f"{warm['token_s']['speed']:.2f}",
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    worst = min(one["warm"]["token_s"]["speed"] for one in found["models"])
    cost = [1e3 * (one["warm"]["token_s"]["ours"]["median"] - one["warm"]["token_s"]["plain"]["median"])
            for one in found["models"]]  # fmt: skip
    lines.append(
        f"a prompt of {found['tokens']} tokens; median of {found['more']} further ones, {found['repeats']} times"
    )
    lines.append("first token: nothing kept on the others, then with kept weights; speed: of llama.cpp's own, warm")
    off = sorted(abs(one / other - 1.0) for one, other in _predictions(found))
    lines.append(f"predictions are off by {statistics.median(off):.0%} in the median, at worst by {off[-1]:.0%}")
    lines.append(f"a token takes {min(cost):.0f} to {max(cost):.0f} ms more")
    missed = [one["model"] for one in found["models"] if one["warm"]["token_s"]["speed"] < AIM]
    lines.append(f"the aim, {AIM}, is missed with {', '.join(missed) or 'none'}: {worst:.2f} at worst")
    return "\n".join(lines)


def _predictions(found: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """Yield each predicted figure with the measured one: to the first token, twice, and for a further token."""
    for one in found["models"]:
        first, warm, predicted = one["first"]["ours"], one["warm"], one["predicted"]
        yield predicted["first"]["ttft_s"], first["ttft_s"]
        yield predicted["kept"]["ttft_s"], warm["ttft_s"]["ours"]["median"]
        yield predicted["kept"]["token_s"], warm["token_s"]["ours"]["median"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--names", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--more", type=int, default=32)
    parser.add_argument("--name", default="rpc_engine", help="of the result file")
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no home can be made here: {reason}")
    models = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names:
            models.append(one_model(name, Path(folder), args.repeats, args.tokens, args.more))
            print(json.dumps(models[-1]["warm"]), file=sys.stderr, flush=True)
    found = {"models": models, "tokens": args.tokens, "more": args.more, "repeats": args.repeats}
    path = report.write(args.name, "bench.mesh.rpc_engine", found)
    print(table(found))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
