"""Compare the memory of sliding-window caches with llama-server's, and the estimate with what llama.cpp takes.

    python -m bench.models.window_memory [--server PATH] [--positions 32768]

*Windows*: files with random weights and the windows of real models (Gemma 3's 1,024 in five layers of six, gpt-oss's
128 in every second, Cohere 2's 4,096 in three of four), with contexts of 32,768 positions. The bytes of keys and values
are those that llama.cpp itself logs: of the verifier's context and of the draft model's as `LLM.open` has them, with
branches where drafts are made ahead across a link, and of llama-server's, with `--parallel 1` and otherwise as it is
by default. `python -m bench.models.window_memory --build FOLDER` builds llama-server from the source of the installed
llama-cpp-python, some minutes; without `--server` the third is a context with llama-server's parameters
(`swa_full` off, batches of 2,048 and 512 rows).

*Estimate*: for every architecture, the bytes that `engine.memory_fit.reckon` says before anything is loaded, and those
of the buffers that llama.cpp then logs; `bench.models.memory` has what processes take. Exit code 1 if a verifier's
cache takes over 1.1 of llama-server's, or an estimate is off by over 10 % and 100 kB.
"""

from __future__ import annotations

import argparse
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.harness.llama_source import binaries, build
from bench.harness.report import write
from edgellm.engine import Context, ContextSpec, Model, ModelFile, native
from edgellm.engine.hardware import Hardware
from edgellm.engine.memory_fit import reckon
from edgellm.engine.native import lib
from testkit.gguf import architectures

WINDOWS = {"gemma3": 1_024, "gpt-oss": 128, "cohere2": 4_096}
_CACHE = re.compile(r"(?:KV|RS) buffer size = +([\d.]+) MiB")
_BUFFER = re.compile(r"(?:KV|RS|compute|output|state) buffer size = +([\d.]+) MiB")
_MIB = 2**20
_N_CTX = 2_048  # of the estimates
_SECONDS = 120.0
MOST = 1.1


def logged(lines: Iterable[str], pattern: re.Pattern[str]) -> float:
    """Return the bytes of the buffers in lines of llama.cpp's log."""
    return _MIB * sum(float(found[1]) for line in lines for found in pattern.finditer(line))


def server_cache(server: Path | None, path: Path, positions: int) -> float:
    """Return the bytes of llama-server's keys and values, or of a context with its parameters without one."""
    if server is None:
        return _context_like_it(path, positions)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        str(server), "-m", str(path), "-c", str(positions), "--parallel", "1", "--port", str(port), "--no-warmup",
        "--cache-ram", "0", "-v",
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + _SECONDS
            while time.monotonic() < end and process.poll() is None:
                output.seek(0)
                if "server is listening" in (text := output.read()):
                    break
                time.sleep(0.2)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    found = logged(text.splitlines(), _CACHE)
    if not found:
        raise SystemExit(f"{server} says nothing of its cache: {text[-2_000:]}")
    return found


def _context_like_it(path: Path, positions: int) -> float:
    with Model.load(path, probe=False) as model, native.log.listen() as lines:
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.swa_full = positions, 2_048, 512, False
        lib.llama_free(lib.llama_init_from_model(model.owned.pointer, params))
        return logged(lines, _CACHE)


def windows(server: Path | None, positions: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each model with a window."""
    rows = []
    for name, window in WINDOWS.items():
        made = architectures.ARCHITECTURES[name]
        changed = {**made.metadata, "context_length": positions, "attention.sliding_window": window}
        path = folder / f"{name}-{window}.gguf"
        with patch.dict(architectures.ARCHITECTURES, {name: replace(made, metadata=changed)}):
            architectures.write(name, path)
        ours = {}
        with Model.load(path, probe=False) as model:
            for what, options in {
                "verifier": {"rolls_back": True},
                "served, 8 sessions": {"n_seq": 8, "unified": False, "rolls_back": True},
                "draft model": {},
                "draft model, branches": {"n_seq": 4, "spare": 48},
            }.items():
                with native.log.listen() as lines:
                    Context(model, ContextSpec(n_ctx=positions, exact=False, **options)).close()  # type: ignore[arg-type]
                ours[what] = logged(lines, _CACHE)
        theirs = server_cache(server, path, positions)
        rows.append({"model": name, "window": window, "ours": ours, "llama_server": theirs})
    return rows


def estimates(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each architecture: estimated and real bytes besides the weights."""
    rows = []
    for name in architectures.ARCHITECTURES:
        path = folder / f"{name}.gguf"
        architectures.write(name, path)
        file = ModelFile.open(path)

        def opened(model: Model) -> list[Context]:
            return [Context(model, ContextSpec(n_ctx=_N_CTX, n_seq=2, threads=1, rolls_back=True))]

        use = reckon(file, Hardware(), opened, reserved=True)
        with native.log.listen() as lines, Model.load(file, probe=False) as model:
            for context in opened(model):
                context.close()
        rows.append(
            {"architecture": name, "estimate": use.caches["CPU"] + use.compute["CPU"], "real": logged(lines, _BUFFER)}
        )
        path.unlink()
    return rows


def is_off(row: Mapping[str, Any]) -> bool:
    """Return whether an estimate is off by more than a tenth."""
    return bool(abs(row["estimate"] - row["real"]) > max(0.1 * row["real"], 1e5))


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each context of each model with a window, and the largest errors of the estimates."""
    lines = [f"{'model':<12}{'window':>8}  {'context of the':<24}{'MiB':>9}{'llama-server':>14}{'ratio':>8}"]
    for row in found["windows"]:
        for what, size in row["ours"].items():
            theirs = row["llama_server"]
            lines.append(
                f"{row['model']:<12}{row['window']:>8,}  {what:<24}{size / _MIB:>9.2f}{theirs / _MIB:>14.2f}"
                f"{size / theirs:>8.2f}"
            )
    rows = sorted(found["estimates"], key=lambda row: -abs(row["estimate"] / row["real"] - 1))
    lines += ["", f"{found['positions']:,} positions; llama-server {found['server']}.", ""]
    lines += [f"{'estimate of the buffers':<26}{'estimate, MiB':>14}{'real, MiB':>12}{'ratio':>8}"]
    for row in rows[:5]:
        estimate, real = row["estimate"], row["real"]
        lines.append(f"{row['architecture']:<26}{estimate / _MIB:>14.2f}{real / _MIB:>12.2f}{estimate / real:>8.3f}")
    lines += [f"These five of {len(rows)} are furthest off."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=Path, help="a llama-server, such as FOLDER/build/bin/llama-server")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="build llama-server there, and measure nothing")
    parser.add_argument("--positions", type=int, default=32_768)
    parser.add_argument("--name", default="window_memory", help="of the result file")
    arguments = parser.parse_args()
    if arguments.build is not None:
        build(arguments.build, ("llama-server",), {"LLAMA_BUILD_SERVER": "ON", "LLAMA_USE_PREBUILT_UI": "OFF"})
        sys.stdout.write(f"{binaries(arguments.build) / 'llama-server'}\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "positions": arguments.positions,
            "server": "itself" if arguments.server else "as a context with its parameters",
            "windows": windows(arguments.server, arguments.positions, Path(folder)),
            "estimates": estimates(Path(folder)),
        }
    sys.stdout.write(table(found))
    write(arguments.name, "bench.models.window_memory", found, 0)
    larger = [row for row in found["windows"] if row["ours"]["verifier"] > MOST * row["llama_server"]]
    sys.exit(1 if larger or any(map(is_off, found["estimates"])) else 0)


if __name__ == "__main__":
    main()
