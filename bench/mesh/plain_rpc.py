"""llama.cpp's own RPC, by the installed library: its server, unprotected, and one timed reply over such servers.

    python -m bench.mesh.plain_rpc serve 10.79.0.2:50152 --cache FOLDER
    python -m bench.mesh.plain_rpc reply MODEL --servers 10.79.0.2:50152,10.79.0.3:50152 --shares 2 2

`reply` loads all layers over the servers, in these shares, by `llama_cpp.Llama`. It prints as JSON the seconds of
loading, from the beginning to the first token, and the median of further tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from edgellm.engine import native
from edgellm.engine.ggml_rpc import backend


def prompt_ids(tokens: int) -> list[int]:
    """Return a prompt of that many tokens."""
    return [(7 + 13 * at) % 2048 for at in range(tokens)]


def serve(address: str, cache: Path) -> None:
    """Serve the processor at an address until the process is ended."""
    backend.require()
    cache.mkdir(parents=True, exist_ok=True)
    by_name = native.registry().ggml_backend_dev_by_name
    by_name.argtypes, by_name.restype = [ctypes.c_char_p], ctypes.c_void_p
    processor = (ctypes.c_void_p * 1)(by_name(b"CPU"))
    run = backend.function(
        "ggml_backend_rpc_start_server", None,
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p),
    )  # fmt: skip
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would not hear it in there
    print(f"serving at {address}", flush=True)
    run(address.encode(), f"{cache}/".encode(), len(os.sched_getaffinity(0)), 1, processor)


def reply(model: Path, servers: Sequence[str], shares: Sequence[float], tokens: int, more: int) -> dict[str, float]:
    """Return the seconds of a reply with `more` tokens behind the first."""
    import llama_cpp

    backend.require()
    began = perf_counter()
    add = backend.function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    register = native.registry().ggml_backend_register
    register.argtypes, register.restype = [ctypes.c_void_p], None
    for server in servers:
        register(add(server.encode()))
    threads = len(os.sched_getaffinity(0))
    llama = llama_cpp.Llama(
        str(model), n_gpu_layers=999, n_ctx=512, n_batch=512, n_threads=threads, n_threads_batch=threads,
        tensor_split=list(shares), verbose=False,
    )  # fmt: skip
    loaded = perf_counter() - began
    writing = iter(llama.generate(prompt_ids(tokens), temp=0.0))
    times = []
    for _ in range(1 + more):
        next(writing)
        times.append(perf_counter())
    further = [later - earlier for earlier, later in pairwise(times)]
    return {"load_s": loaded, "ttft_s": times[0] - began, "token_s": statistics.median(further)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    serving = what.add_parser("serve")
    serving.add_argument("address")
    serving.add_argument("--cache", type=Path, required=True)
    timing = what.add_parser("reply")
    timing.add_argument("model", type=Path)
    timing.add_argument("--servers", required=True)
    timing.add_argument("--shares", type=float, nargs="+", required=True)
    timing.add_argument("--tokens", type=int, default=128)
    timing.add_argument("--more", type=int, default=24)
    args = parser.parse_args()
    if args.what == "serve":
        serve(args.address, args.cache)
    else:
        print(json.dumps(reply(args.model, args.servers.split(","), args.shares, args.tokens, args.more)))


if __name__ == "__main__":
    main()
