"""The other way round: vLLM takes its drafts from a device, by a proposer class of ours. What does that save?

    python -m bench.upstream.reverse device [--port 18410]     # the device: the draft model's tokens, until it is ended
    python -m bench.upstream.reverse --url URL --plain URL [--replies 40] [--max-tokens 64] [--device http://...:18410]
    python -m bench.upstream.reverse --replay [--replies 40] [--max-tokens 64]

The server at `--url` was started as `testkit/upstream/proposer.py` says, the one at `--plain` without drafts; the row
says `live`. With `--replay`, this process has the passes of such a server, and asks a device of its own by the same
proposer. Greedy, held-out cases of every family in turn, one plain request for a whole reply at a time. Servers count
their passes; the device counts the requests for drafts that it has answered, and their bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.harness.report import command, read, write
from bench.upstream.alone import ask, steps, writes_alone
from bench.upstream.lossless import conversations
from edgellm.engine import Context, ContextSpec, Model, to_f32
from edgellm.llm import LLM
from edgellm.spec.types import Sampling
from edgellm.storage import resolve
from models.home.corpus import HELD_OUT_SEED
from testkit.upstream.engine import Engine
from testkit.upstream.loopback import LoopbackHandler, LoopbackServer
from testkit.upstream.proposer import ADDRESS, DeviceProposer

MODULE = "bench.upstream.reverse"
POSITIONS = 1024
DRAFTED = 4  # tokens at most, as the server is started with
COUNTS = ("requests", "bytes_up", "bytes_down", "drafted")


class Device(LoopbackServer):
    """Drafts for whoever asks: the likeliest tokens of a model, one text after the other."""

    def __init__(self, model: Model, port: int = 0) -> None:
        self._model, self._context = model, Context(model, ContextSpec(n_ctx=POSITIONS, threads=1))
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        super().__init__(_Handler, port)

    def draft(self, text: list[int], n: int) -> list[int]:
        """Return up to `n` tokens behind `text`, to the end of the turn."""
        with self._lock:
            ids = np.array(text, dtype=np.int32)
            kept = self._context.sync(ids)
            row = self._context.decode(ids[kept:])[-1]
            found: list[int] = []
            while len(found) < min(n, POSITIONS - len(ids) - 1):
                found.append(int(np.argmax(row)))
                if self._model.is_eog(found[-1]):
                    break
                if len(found) < n:
                    row = self._context.decode(np.array(found[-1:], dtype=np.int32))[-1]
            return found

    def close(self) -> None:
        """End the server and its context."""
        super().close()
        self._context.close()


class _Handler(LoopbackHandler):
    def get(self) -> None:
        device: Device = self.owner
        self.send(200, json.dumps(dict(device.counts)).encode())

    def post(self, body: bytes) -> None:
        device: Device = self.owner
        asked = json.loads(body)
        drafts = [device.draft(text, asked["n"]) for text in asked["texts"]]
        answer = json.dumps({"drafts": drafts}).encode()
        device.counts.update(
            requests=1, bytes_up=len(body), bytes_down=len(answer), drafted=sum(len(draft) for draft in drafts)
        )
        self.send(200, answer)


def live(pair: LLM, url: str, plain: str, device: str, n: int, most: int) -> dict[str, Any]:
    """Return what `n` replies of a server with a device's drafts have cost, and the same ones without."""
    write_reply = writes_alone("vLLM")
    before = ask(device, "/counts")
    counts: Counter[str] = Counter()
    for messages in conversations(n, 0):
        prompt = pair.prompt_ids(messages).tolist()
        replies = []
        for passes, server in (("passes", url), ("plain_passes", plain)):
            name = ask(server, "/v1/models")["data"][0]["id"]
            began = steps(server)
            replies.append(write_reply(server, name, prompt, "", most))
            ended = steps(server)
            if began is None or ended is None:
                raise SystemExit(f"{server} does not count its passes.")
            counts[passes] += ended - began
        counts["equal"] += replies[0] == replies[1]
        counts["tokens"] += len(replies[0])
    after = ask(device, "/counts")
    return counts | {"device": {name: after.get(name, 0) - before.get(name, 0) for name in COUNTS}}


def replayed(pair: LLM, model: Model, device: Device, n: int, most: int) -> dict[str, Any]:
    """Return what `n` replies of `model` cost in a server that verifies the drafts of `device` as vLLM does."""
    os.environ[ADDRESS] = device.url
    counts: Counter[str] = Counter()
    engine = Engine(model, positions=POSITIONS)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTED),
        model_config=SimpleNamespace(max_model_len=POSITIONS),
    )
    with closing(engine), closing(DeviceProposer(config)) as proposer:
        for messages in conversations(n, 0):
            prompt = pair.prompt_ids(messages).tolist()
            alone, _ = engine.write(prompt, most, Sampling(), None)
            text, draft = list(prompt), list[int]()
            while len(text) < len(prompt) + most and not model.is_eog(text[-1]):
                own = [int(np.argmax(row)) for row in engine.rows(text + draft, len(draft) + 1)]
                counts["passes"] += 1
                accepted = next((at for at, token in enumerate(draft) if token != own[at]), len(draft))
                ended = next((at for at, token in enumerate(own[: accepted + 1]) if model.is_eog(token)), accepted)
                text += own[: ended + 1]
                row = np.array([text + [0] * (POSITIONS - len(text))])
                (draft,) = proposer.propose([text[-1:]], np.array([len(text)]), row)
            written = text[len(prompt) : len(prompt) + most]
            counts["equal"] += written == alone
            counts["tokens"] += len(written)
            counts["plain_passes"] += len(alone)
    return counts | {"device": {name: device.counts[name] for name in COUNTS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["device"], help="or none: measure")
    parser.add_argument("--port", type=int, default=18410)
    parser.add_argument("--draft", default="edgellm-draft")
    parser.add_argument("--url", help="of the server with drafts")
    parser.add_argument("--plain", help="of the same server without")
    parser.add_argument("--replay", action="store_true", help="no server of others")
    parser.add_argument("--verifier", default="edgellm-verifier", help="the model that is replayed")
    parser.add_argument("--device", default="http://127.0.0.1:18410")
    parser.add_argument("--server", default="vLLM 0.32.0", help="its name and version")
    parser.add_argument("--replies", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--name", default="reverse", help="of the result file")
    arguments = parser.parse_args()
    if arguments.role == "device":
        with Model.load(resolve(arguments.draft)) as model, Device(model, arguments.port) as device:
            sys.stdout.write(f"drafts at {device.url}\n")
            sys.stdout.flush()
            threading.Event().wait()
    if not arguments.replay and (arguments.url is None or arguments.plain is None):
        parser.error("give --url and --plain, or --replay")
    n, most = arguments.replies, arguments.max_tokens
    with ExitStack() as stack:
        pair = stack.enter_context(LLM.open("none", arguments.draft, threads=1, history=False))
        if arguments.replay:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            to_f32(resolve(arguments.verifier), folder / "verifier.gguf")
            model = stack.enter_context(Model.load(folder / "verifier.gguf"))
            draft_model = stack.enter_context(Model.load(resolve(arguments.draft)))
            device = stack.enter_context(Device(draft_model))
            row = {"how": "replayed", "server": "vllm", "replies": n, **replayed(pair, model, device, n, most)}
        else:
            figures = live(pair, arguments.url, arguments.plain, arguments.device, n, most)
            row = {"how": "live", "server": arguments.server, "replies": n, **figures}
    row["command"] = command(MODULE)
    try:
        rows = read(MODULE, arguments.name)["rows"]
    except FileNotFoundError:
        rows = {}
    found = {"rows": rows | {row["how"]: row}}
    sys.stdout.write(table(found))
    sys.stdout.write(f"written: {write(arguments.name, MODULE, found, HELD_OUT_SEED)}\n")


def table(found: dict[str, Any]) -> str:
    """Return a line for each server."""
    heads = ("plain", "drafted", "requests", "tokens", "bytes up")
    lines = [f"{'server':14}{'how':10}{'equal':>10}{'tokens':>8}" + "".join(f"{head:>10}" for head in heads)]
    for row in found["rows"].values():
        device, tokens = row["device"], row["tokens"]
        asked = max(1, device["requests"])
        lines.append(
            f"{row['server']:14}{row['how']:10}{row['equal']:>4} of {row['replies']:<2}{tokens:>8,}"
            f"{row['plain_passes'] / tokens:>10.2f}{row['passes'] / tokens:>10.2f}{device['requests'] / tokens:>10.2f}"
            f"{device['drafted'] / asked:>10.2f}{device['bytes_up'] / asked:>10,.0f}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
