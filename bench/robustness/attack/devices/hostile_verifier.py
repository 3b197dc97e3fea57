"""Verifiers that never answer, say what cannot be, or send too much, beside which a reply must end."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count

import grpc
import psutil

from bench.robustness.attack.harness import Attack, Found
from edgellm.engine import Model
from edgellm.rpc.address import Address
from edgellm.rpc.channel import SERVICE
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.services.verification_codec import write_wanted
from edgellm.spec.sampling import ModelSampling
from edgellm.storage.model_files import resolve
from testkit import ROOT

HONEST = 4  # verdicts, in all sessions together, before it stops answering
MOST = 150.0  # seconds that a reply may take with an unknown verifier
MOST_KNOWN = 45.0  # the same with a verifier that was fast at first
MOST_MEMORY = 2**28  # bytes of a device that chats with the small draft model
LIES: dict[str, dict[str, int]] = {
    "a context of one token": {"context_length": 1},
    "the longest context": {"context_length": 2**32 - 1},
    "no vocabulary": {"vocabulary_size": 0},
    "four billion passes": {"passes": 2**32 - 1},
    "frames of 14 MiB": {"padding": 14 * 2**20},
}
"""What a verifier says of itself in `Hello`, or in its answers."""


@contextmanager
def hostile(model: Model, honest: int, passes: int = 1, padding: int = 0, **hello: int) -> Iterator[Address]:
    """Serve a verifier that gives `honest` verdicts, of so many `passes`, and then works forever, with `padding` bytes
    in each frame. It says `hello`."""
    answers = count()

    def greet(_request: bytes, _context: grpc.ServicerContext) -> pb.HelloReply:
        figures = {"vocabulary_size": model.vocabulary.size, "context_length": 1024} | hello
        return pb.HelloReply(
            protocol=PROTOCOL,
            vocabulary=bytes.fromhex(model.vocabulary.fingerprint),
            model="hostile",
            sampling=write_wanted(ModelSampling(0.7)),
            **figures,  # type: ignore[arg-type]
        )

    def session(frames: Iterator[pb.DeviceFrame], context: grpc.ServicerContext) -> Iterator[bytes]:
        # a field that frames do not have: parsers keep it
        filler = pb.HelloReply(behind="x" * padding).SerializeToString() if padding else b""
        next(frames)
        for frame in frames:
            ask = frame.verify
            if next(answers) < honest:
                yield pb.VerifierFrame(
                    verdict=pb.Verdict(round=ask.round, accepted=len(ask.chunk), tokens=[300], passes=passes)
                ).SerializeToString()
                continue
            for step in count():
                if not context.is_active():
                    return
                yield pb.VerifierFrame(working=pb.Working(round=ask.round, step=step)).SerializeToString() + filler
                time.sleep(0.2)

    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool)
        methods = {
            "Hello": grpc.unary_unary_rpc_method_handler(greet, None, pb.HelloReply.SerializeToString),
            "Session": grpc.stream_stream_rpc_method_handler(session, pb.DeviceFrame.FromString, bytes),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield Address("127.0.0.1", port)
        finally:
            server.stop(None).wait()


def endless(quick: bool) -> Found:
    """Chat with such a verifier, with a draft model and without one."""
    trials = [(known, draft) for known in ((True,) if quick else (True, False)) for draft in (True, False)]
    wrong: list[str] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as home, Model.load(resolve("edgellm-verifier")) as model:
        for known, draft in trials:
            name = f"{'fast at first' if known else 'never an answer'}, {'drafting' if draft else 'no draft model'}"
            with hostile(model, HONEST if known else 0) as address:
                command = [sys.executable, "-m", "edgellm", "chat", "--verifier", str(address), "--max-tokens", "200"]
                command += ["--retrieval", "off", "--no-history"]  # else one verdict may end the reply
                command += [] if draft else ["--draft", "none"]
                began = time.monotonic()
                try:
                    done = subprocess.run(
                        [*command, "What is the capital of France?"], cwd=ROOT,
                        env=os.environ | {"EDGELLM_HOME": home}, stdin=subprocess.DEVNULL, capture_output=True,
                        text=True, check=False, timeout=2 * MOST,
                    )  # fmt: skip
                    code, output = done.returncode, done.stdout + done.stderr
                except subprocess.TimeoutExpired:
                    code, output = -1, ""
                seconds = figures[f"{name}: s"] = round(time.monotonic() - began, 1)
            if seconds > (MOST_KNOWN if known else MOST):
                wrong.append(f"{name}: the reply was held for {seconds:.0f} s.")
            elif code != (0 if draft else 1) or (not draft and "has not answered within" not in output):
                wrong.append(f"{name}: exit code {code}: {output[-300:]}")
    return Found(len(trials), tuple(wrong), figures)


def lying(quick: bool) -> Found:
    """Chat with verifiers that say what cannot be."""
    wrong: list[str] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as home, Model.load(resolve("edgellm-verifier")) as model:
        for name, lie in list(LIES.items())[:: 2 if quick else 1]:
            with hostile(model, 0 if "padding" in lie else HONEST, **lie) as address:
                command = [sys.executable, "-m", "edgellm", "chat", "--verifier", str(address), "--max-tokens", "20"]
                chat = subprocess.Popen(
                    [*command, "--stats", "--no-history", "What is the capital of France?"], cwd=ROOT,
                    env=os.environ | {"EDGELLM_HOME": home}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, text=True,
                )  # fmt: skip
                memory, end = 0, time.monotonic() + MOST
                while chat.poll() is None and time.monotonic() < end:
                    with suppress(psutil.Error):
                        memory = max(memory, psutil.Process(chat.pid).memory_info().rss)
                    time.sleep(0.05)
                chat.kill()
                output = chat.communicate()[0]
            figures[f"{name}: MiB"] = memory // 2**20
            if chat.returncode not in (0, 1) or "Traceback" in output or "4294967295" in output.partition("error:")[0]:
                wrong.append(f"{name}: exit code {chat.returncode}: {output[-300:]}")
            if memory > MOST_MEMORY:
                wrong.append(f"{name}: it takes {memory >> 20} MiB.")
    return Found(len(figures), tuple(wrong), figures)


ATTACKS = (
    Attack("endless-working", "a verifier works forever and never answers", endless),
    Attack("lying-verifier", "a verifier says what cannot be, or sends frames of 14 MiB", lying),
)
