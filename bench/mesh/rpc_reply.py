"""Time one reply over the RPC engine, as `bench.mesh.plain_rpc reply` does over llama.cpp's own.

    python -m bench.mesh.rpc_reply MODEL --split desk:1-2,box:3-4 --tokens 128 --more 24

The split names paired devices, or workers by HOST:PORT. Prints as JSON the seconds of loading, from the beginning to
the first token, and the median of further tokens, all of them verified by the model alone.
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
from edgellm.llm.rpc_llm import RpcOptions, open_over_rpc
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk


def reply(model: Path, split: str, tokens: int, more: int) -> dict[str, float]:
    """Return the seconds of a reply with `more` tokens behind the first."""
    began = perf_counter()
    with open_over_rpc(ModelFile.open(model), RpcOptions(split, context=512, sessions=1), history=False) as opened:
        loaded = perf_counter() - began
        session, text = opened.verifier.open(GenerationState()), np.array(prompt_ids(tokens), np.int32)
        times = []
        for _ in range(1 + more):
            text = np.append(text, session.submit(text, Chunk()).result().tokens).astype(np.int32)
            times.append(perf_counter())
        session.close()
    further = [later - earlier for earlier, later in pairwise(times)]
    return {"load_s": loaded, "ttft_s": times[0] - began, "token_s": statistics.median(further)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--split", required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--more", type=int, default=24)
    args = parser.parse_args()
    print(json.dumps(reply(args.model, args.split, args.tokens, args.more)))


if __name__ == "__main__":
    main()
