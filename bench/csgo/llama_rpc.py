"""Build llama.cpp's RPC backend, which spreads a model over devices, and time its cold start.

    python -m bench.csgo.llama_rpc build FOLDER        # some minutes, once; needs cmake and a C++ compiler
    python -m bench.csgo.llama_rpc first MODEL --libs FOLDER --servers 10.79.0.2:50152,10.79.0.3:50152 --tokens 128

The source is that of the installed llama-cpp-python, with `GGML_RPC=ON`. The server on every other device keeps tensors
of more than 10 MiB by their hash (`--cache`); smaller ones are sent each time. `first` prints as JSON how long loading
took, and the time from the beginning of the load to the first token.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from pathlib import Path
from time import perf_counter

from bench.harness.llama_source import binaries, build

SERVER = "ggml-rpc-server"


def first(model: Path, libs: Path, servers: list[str], tokens: int, shares: list[float]) -> dict[str, float]:
    """Load all layers of a model over the servers and compute a prompt; return the seconds.

    `shares` of the layers for each server, in order; without them llama.cpp shares out by their free memory."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(libs)
    import llama_cpp

    if not llama_cpp.llama_supports_rpc():
        sys.exit(f"{libs} has no RPC backend: python -m bench.csgo.llama_rpc build FOLDER")
    rpc, ggml = ctypes.CDLL(str(libs / "libggml-rpc.so")), ctypes.CDLL(str(libs / "libggml.so"))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    llama_cpp.llama_backend_init()
    began = perf_counter()
    for server in servers:
        ggml.ggml_backend_register(rpc.ggml_backend_rpc_add_server(server.encode()))
    threads = len(os.sched_getaffinity(0))
    llama = llama_cpp.Llama(
        str(model), n_gpu_layers=999, n_ctx=512, n_batch=512, n_threads=threads, n_threads_batch=threads,
        tensor_split=shares or None, verbose=False,
    )  # fmt: skip
    loaded = perf_counter() - began
    prompt = [(7 + 13 * at) % 4096 for at in range(tokens)]
    next(iter(llama.generate(prompt, temp=0.0)))
    return {"load_s": loaded, "ttft_s": perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    making = what.add_parser("build")
    making.add_argument("folder", type=Path)
    timing = what.add_parser("first")
    timing.add_argument("model", type=Path)
    timing.add_argument("--libs", type=Path, required=True, help="the folder that `build` wrote to")
    timing.add_argument("--servers", required=True)
    timing.add_argument("--tokens", type=int, default=128)
    timing.add_argument("--shares", type=float, nargs="*", default=[])
    args = parser.parse_args()
    if args.what == "build":
        build(args.folder, ("llama", SERVER), {"GGML_RPC": "ON"})
    else:
        servers = args.servers.split(",")
        print(json.dumps(first(args.model, binaries(args.libs), servers, args.tokens, args.shares)))


if __name__ == "__main__":
    main()
