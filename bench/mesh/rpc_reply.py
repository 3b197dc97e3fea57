"""Time one reply over the RPC engine, as `bench.mesh.plain_rpc reply` does over llama.cpp's own.

    python -m bench.mesh.rpc_reply MODEL --split desk:1-2,box:3-4 --tokens 128 --more 24 [--predict]

The split names paired devices, or workers by HOST:PORT. Prints as JSON the seconds of loading, from the beginning to
the first token, and the median of further tokens, all of them verified by the model alone. With `--predict`, the
devices are measured in place of that, and it prints what the planner predicts of the same reply, cold.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import numpy as np

from bench.mesh.plain_rpc import prompt_ids
from edgellm.engine import ModelFile
from edgellm.layer_range import read_split
from edgellm.llm.home import Workload, place_over_rpc
from edgellm.llm.rpc_llm import RpcOptions, open_over_rpc
from edgellm.mesh.home_workers import discover_workers, measure_workers
from edgellm.rpc.discovery.interfaces import chosen_hosts
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk

CONTEXT = 512


def reply(model: Path, split: str, tokens: int, more: int) -> dict[str, float]:
    """Return the seconds of a reply with `more` tokens behind the first."""
    began = perf_counter()
    with open_over_rpc(ModelFile.open(model), RpcOptions(split, context=CONTEXT, sessions=1), history=False) as opened:
        loaded = perf_counter() - began
        session, text = opened.verifier.open(GenerationState()), np.array(prompt_ids(tokens), np.int32)
        times = []
        for _ in range(1 + more):
            text = np.append(text, session.submit(text, Chunk()).result().tokens).astype(np.int32)
            times.append(perf_counter())
        session.close()
    further = [later - earlier for earlier, later in pairwise(times)]
    return {"load_s": loaded, "ttft_s": times[0] - began, "token_s": statistics.median(further)}


def predicted(model: Path, split: str, tokens: int, more: int) -> dict[str, float]:
    """Measure the devices, and return the seconds that are predicted of a cold reply."""
    file = ModelFile.open(model)
    home = measure_workers(file, discover_workers(chosen_hosts(())), True, lambda _who, _what: None, by_stand_in=True)
    placed = place_over_rpc(file, home, Workload(tokens, 1 + more, context=CONTEXT))
    found = placed.plan.home.predict(read_split(split))
    return {"load_s": found.load_s, "ttft_s": found.ttft_s, "token_s": found.token_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--split", required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--more", type=int, default=24)
    parser.add_argument("--predict", action="store_true")
    args = parser.parse_args()
    answer = predicted if args.predict else reply
    print(json.dumps(answer(args.model, args.split, args.tokens, args.more)))


if __name__ == "__main__":
    main()
