"""Probabilities that a reply tells are those of the model whose text it is, or are refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Model
from edgellm.errors import InvalidOption, VerifierLost
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.servers import VerifierServer
from edgellm.services.verification_codec import VerifierInfo, greet
from edgellm.spec.protocols import GenerationState, VerdictTerms
from edgellm.spec.types import Chunk, Token
from tests.spec.real import case


def read_anew(path: Path, prompt: Any, tokens: list[Token]) -> np.ndarray[Any, Any]:
    """Log-probabilities behind the prompt and each token of a reply, (n, n_vocab), computed in one pass."""
    ids = np.concatenate((prompt, np.array([token.id for token in tokens], dtype=np.int32)))
    with Model.load(path) as model, Context(model, ContextSpec(n_ctx=len(ids) + 8, threads=1)) as context:
        rows = context.decode(ids, outputs=len(tokens) + 1)[:-1].astype(np.float64)
    top = rows.max(axis=1, keepdims=True)
    return rows - top - np.log(np.exp(rows - top).sum(axis=1, keepdims=True))


@pytest.fixture(params=["pair", "verifier", "draft", "across a link", "in the server"])
def writer(
    request: pytest.FixtureRequest, f32_pair: tuple[Path, Path], server: VerifierServer
) -> Iterator[tuple[LLM, Path]]:
    """A pair, and the model whose text it writes."""
    draft, verifier = f32_pair
    names: dict[str, tuple[Path | None, Path | str | None]] = {
        "pair": (draft, verifier), "verifier": (None, verifier), "draft": (draft, None),
        "across a link": (draft, str(server.address)),
    }  # fmt: skip
    inside = request.param not in names
    opened = (
        LLM(server.model, verifier=server.inside(), threads=1) if inside else LLM.open(*names[request.param], threads=1)
    )
    with opened as pair:
        yield pair, draft if request.param == "draft" else verifier


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_they_are_the_writers_own(writer: tuple[LLM, Path], temperature: float) -> None:
    pair, path = writer
    options: dict[str, Any] = {"max_tokens": 20, "temperature": temperature, "top_k": 0, "seed": 3}
    tokens = list(pair.reply(case(2), logprobs=4, **options))
    truth = read_anew(path, pair.prompts.ids(case(2)), tokens)
    plain = list(pair.reply(case(2), retrieval="off", **options))
    if temperature == 0.0:
        assert [token.id for token in tokens] == [token.id for token in plain]
    assert all(token.logprobs is None for token in plain)
    for token, row in zip(tokens, truth, strict=True):
        assert token.logprobs is not None
        assert token.logprobs.own == pytest.approx(row[token.id], abs=2e-3)
        assert len(token.logprobs.ids) == 4
        assert token.logprobs.logprobs == pytest.approx(row[token.logprobs.ids], abs=2e-3)
        assert token.logprobs.logprobs == pytest.approx(np.sort(row)[::-1][:4], abs=2e-3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 0.3}, "logprobs are not available"), ({"gate": "never"}, "logprobs are not available"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"), ({"stop": ("",)}, "stop"), ({"stop": ("a",) * 17}, "stop"),
    ],
    ids=str,
)  # fmt: skip
def test_absurd_ones_are_refused_and_those_of_what_nobody_verified(
    pair: LLM, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidOption, match=says):
        pair.reply(case(2), **{"logprobs": 1} | options)


def test_a_verdict_on_a_chunk_brings_those_of_what_stands(server: VerifierServer, pair: LLM) -> None:
    prompt = pair.prompts.ids(case(2))
    told = list(pair.reply(case(2), max_tokens=6, logprobs=2))
    right = np.array([token.id for token in told], dtype=np.int32)
    remote = RemoteVerifier(server.address, server.model.vocabulary)
    session = remote.open(GenerationState(terms=VerdictTerms(2)))
    wrong = np.append(right[:3], right[:1]).astype(np.int32)
    verdict = session.submit(prompt, Chunk(wrong), extra=5).result()
    session.close()
    remote.close()
    assert (verdict.accepted, verdict.tokens.tolist()) == (3, right[3:].tolist())
    assert len(verdict.logprobs) == 6
    for one, token in zip(verdict.logprobs, told, strict=True):
        assert token.logprobs is not None
        assert one.own == pytest.approx(token.logprobs.own, abs=2e-3)
        assert one.ids.tolist() == token.logprobs.ids.tolist()


def test_a_verifier_that_reports_none_is_not_asked_for_them(
    f32_pair: tuple[Path, Path], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*arguments: Any, **options: Any) -> VerifierInfo:
        info = await greet(*arguments, **options)
        return replace(info, capabilities=replace(info.capabilities, logprobs=False))

    monkeypatch.setattr("edgellm.services.verification_codec.greet", silent)
    with LLM.open(f32_pair[0], address, threads=1) as linked, pytest.raises(InvalidOption, match="another device"):
        linked.reply(case(2), logprobs=1)


def test_a_reply_that_cannot_tell_them_to_its_end_fails(f32_pair: tuple[Path, Path]) -> None:
    """It never goes on from the draft model, whose words nobody has weighed."""
    with (
        Model.load(f32_pair[1]) as model,
        VerifierServer(model, Address.parse("127.0.0.1:0"), context=512, sessions=1, threads=1) as served,
        LLM.open(f32_pair[0], str(served.address), threads=1) as linked,
    ):
        reply = linked.reply(case(2), max_tokens=40, logprobs=1)
        first = next(reply)
        served.stop(0)
        with pytest.raises(VerifierLost):
            list(reply)
    assert first.logprobs is not None


def test_a_plain_prompt_goes_on_as_it_stands(pair: LLM, alone: LLM) -> None:
    ids = pair.prompts.ids(case(2))
    wanted = [token.id for token in alone.reply(case(2), max_tokens=12)]
    assert [token.id for token in pair.complete(ids.tolist(), max_tokens=12)] == wanted
    reply = pair.complete("The film night is on", max_tokens=4)
    assert len(list(reply)) > 0
    assert reply.summary.prompt_tokens > 3
    for bad in ("", [10**6], [-1]):
        with pytest.raises(InvalidOption):
            pair.complete(bad)
