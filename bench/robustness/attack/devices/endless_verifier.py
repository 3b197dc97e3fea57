"""A verifier that always works and never answers, beside which a reply must end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import grpc

from bench.robustness.attack.harness import Attack, Found
from edgellm.engine import Model
from edgellm.rpc.address import Address
from edgellm.rpc.channel import PROTOCOL, SERVICE
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.services.verification_codec import write_wanted
from edgellm.spec.model_sampling import ModelSampling
from edgellm.storage import resolve
from testkit import ROOT

HONEST = 4  # verdicts, in all sessions together, before it stops answering
MOST = 150.0  # seconds that a reply may take with an unknown verifier
MOST_KNOWN = 45.0  # the same with a verifier that was fast at first


@contextmanager
def hostile(model: Model, honest: int) -> Iterator[Address]:
    """Serve a verifier that gives `honest` verdicts and then works forever."""
    answers = count()

    def greet(_request: bytes, _context: grpc.ServicerContext) -> pb.HelloReply:
        return pb.HelloReply(
            protocol=PROTOCOL,
            vocabulary=bytes.fromhex(model.vocabulary.fingerprint),
            vocabulary_size=model.vocabulary.size,
            model="hostile",
            context_length=1024,
            sampling=write_wanted(ModelSampling(0.7)),
        )

    def session(frames: Iterator[pb.DeviceFrame], context: grpc.ServicerContext) -> Iterator[pb.VerifierFrame]:
        next(frames)
        for frame in frames:
            ask = frame.verify
            if next(answers) < honest:
                yield pb.VerifierFrame(
                    verdict=pb.Verdict(round=ask.round, accepted=len(ask.chunk), tokens=[300], passes=1)
                )
                continue
            for step in count():
                if not context.is_active():
                    return
                yield pb.VerifierFrame(working=pb.Working(round=ask.round, step=step))
                time.sleep(0.2)

    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool)
        methods = {
            "Hello": grpc.unary_unary_rpc_method_handler(greet, None, pb.HelloReply.SerializeToString),
            "Session": grpc.stream_stream_rpc_method_handler(
                session, pb.DeviceFrame.FromString, pb.VerifierFrame.SerializeToString
            ),
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
                        [*command, "What is the capital of France?"],
                        cwd=ROOT,
                        env=os.environ | {"EDGELLM_HOME": home},
                        stdin=subprocess.DEVNULL,
                        capture_output=True,
                        text=True,
                        check=False,
                        timeout=2 * MOST,
                    )
                    code, output = done.returncode, done.stdout + done.stderr
                except subprocess.TimeoutExpired:
                    code, output = -1, ""
                seconds = figures[f"{name}: s"] = round(time.monotonic() - began, 1)
            if seconds > (MOST_KNOWN if known else MOST):
                wrong.append(f"{name}: the reply was held for {seconds:.0f} s.")
            elif code != (0 if draft else 1) or (not draft and "has not answered within" not in output):
                wrong.append(f"{name}: exit code {code}: {output[-300:]}")
    return Found(len(trials), tuple(wrong), figures)


ATTACKS = (Attack("endless-working", "a verifier works forever and never answers", endless),)
