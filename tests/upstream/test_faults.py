"""A server that fails in the middle of a reply: the draft model goes on, marked, and the server is used again later."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Model
from edgellm.errors import VerifierUnreachable, VocabularyMismatch
from edgellm.llm import LLM
from edgellm.spec.types import Token
from edgellm.upstream.verifier import UpstreamOptions
from testkit.upstream.dialects import LlamaServer, Vllm
from testkit.upstream.engine import Engine
from testkit.upstream.server import Fault, UpstreamServer
from testkit.upstream.text_dialects import Ollama
from tests.spec.real import case, ids
from tests.upstream.conftest import MOST, SCORING, UNVERIFIED, Make, OpenPair, pair_opener, written
from tests.waiting import until

QUICK = UpstreamOptions(least=0.5, retry=0.05, retry_most=0.2)


def verified(pair: LLM) -> list[Token]:
    """Return a reply that is verified throughout: a busy machine may be late for the first ones."""
    assert pair.verifier_up is not None
    for _ in range(100):
        until(pair.verifier_up)
        tokens, _ = written(pair)
        if not any(token.source in UNVERIFIED for token in tokens):
            break
    return tokens


@pytest.fixture(scope="module")
def shared(engine: Engine, f32_pair: tuple[Path, Path]) -> Iterator[tuple[LLM, UpstreamServer]]:
    """A pair that was used with its server, for tests that leave both as they were."""
    with ExitStack() as stack:
        pair, server = pair_opener(stack, engine, f32_pair[0])(SCORING, timing=QUICK)
        verified(pair)
        yield pair, server


@pytest.mark.parametrize("fault", Fault)
def test_a_reply_goes_on_without_the_server_and_the_next_one_with_it(
    fault: Fault, shared: tuple[LLM, UpstreamServer], wanted: dict[int, list[int]]
) -> None:
    pair, server = shared
    server.fault = fault
    tokens, notices = written(pair)
    server.heal()
    assert tokens
    assert {token.source for token in tokens} <= UNVERIFIED
    assert any("The draft model continues alone" in notice.text for notice in notices)
    assert [token.id for token in verified(pair)] == wanted[5]


def test_a_slow_server_is_left_alone_a_while(open_pair: OpenPair) -> None:
    """Else each reply would wait for it again, and longer from time to time."""
    timing = UpstreamOptions(least=0.5, retry=600.0, retry_most=600.0)
    pair, server = open_pair(SCORING, timing=timing)
    verified(pair)
    server.fault = Fault.STALLED
    written(pair)
    before = len(server.requests)
    tokens, _ = written(pair)
    assert {token.source for token in tokens} <= UNVERIFIED
    assert len(server.requests) == before


def test_a_server_that_dies_and_comes_back_within_a_reply(served: Model, open_pair: OpenPair) -> None:
    """Nothing is lost or repeated, and what is marked as verified is what the verifier says after all before it."""
    pair, server = open_pair(LlamaServer, timing=QUICK)
    tokens: list[Token] = []
    for number in range(4):
        prompt, reply = pair.prompt_writer.ids(case(number)), pair.reply(case(number), max_tokens=MOST, budget=1.0)
        tokens = []
        for token in reply:
            tokens.append(token)
            server.fault = Fault.DROPPED if len(tokens) % 6 in (2, 3) else None
        text = np.concatenate((prompt, np.array([token.id for token in tokens], dtype=np.int32)))
        with Context(served, ContextSpec(n_ctx=len(text), threads=1)) as context:
            says = context.decode(text[:-1], outputs=len(tokens)).argmax(axis=1)
        for token, said in zip(tokens, says.tolist(), strict=True):
            assert token.source in UNVERIFIED or token.id == said


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (SCORING, "The model `served/verifier` does not exist"),
        (Vllm, "The model `served/verifier` does not exist"),
        (Ollama, "model 'served/verifier' not found"),
    ],
    ids=["vllm-score", "vllm-fan-out", "ollama"],
)
def test_a_server_whose_model_was_replaced_says_which_it_lacks(
    make: Make, says: str, open_pair: OpenPair, caplog: pytest.LogCaptureFixture
) -> None:
    pair, server = open_pair(make, timing=QUICK)
    verified(pair)
    server.dialect.serving_as("another/model")
    tokens, notices = written(pair)
    assert {token.source for token in tokens} <= UNVERIFIED
    assert any("The verifier is gone. The draft model continues alone" in notice.text for notice in notices)
    assert f"refuses with status 404: {says}." in caplog.text


def test_nobody_at_the_address(f32_pair: tuple[Path, Path]) -> None:
    with pytest.raises(VerifierUnreachable, match="is gone") as raised:
        LLM.open(f32_pair[0], "http://127.0.0.1:9")
    assert "Check the address, and that the server is running." in raised.value.next_step


def test_a_server_that_cannot_verify(engine: Engine, f32_pair: tuple[Path, Path], closing: ExitStack) -> None:
    server = closing.enter_context(UpstreamServer(Vllm(engine)))
    server.fault = Fault.FOREIGN
    with pytest.raises(VerifierUnreachable, match="cannot verify"):
        LLM.open(f32_pair[0], server.url)


class Shifted(Vllm):
    def text(self, tokens: list[int]) -> str:
        return super().text([max(0, token - 1) for token in tokens])


def test_a_server_of_another_vocabulary(open_pair: OpenPair) -> None:
    with pytest.raises(VocabularyMismatch, match=r"token \d+ is"):
        open_pair(Shifted)


def test_a_key_is_sent_and_never_shown(
    engine: Engine, f32_pair: tuple[Path, Path], closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = closing.enter_context(UpstreamServer(Vllm(engine), key="open-sesame"))
    with pytest.raises(VerifierUnreachable, match="refuses requests without a key"):
        LLM.open(f32_pair[0], server.url)
    monkeypatch.setenv("EDGELLM_VERIFIER_KEY", "wrong-word")
    with pytest.raises(VerifierUnreachable, match="refuses the key") as raised:
        LLM.open(f32_pair[0], server.url)
    assert "wrong-word" not in str(raised.value)
    monkeypatch.setenv("EDGELLM_VERIFIER_KEY", "open-sesame")
    with LLM.open(f32_pair[0], server.url, threads=1) as pair:
        assert len(ids(pair.reply(case(5), max_tokens=2))) == 2
