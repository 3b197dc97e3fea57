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
from edgellm.services.verification_codec import VerifierInfo, greet
from edgellm.spec.types import Token
from tests.llm.conftest import verifying
from tests.spec.real import case


def read_anew(path: Path, prompt: Any, tokens: list[Token]) -> np.ndarray[Any, Any]:
    """Log-probabilities behind the prompt and each token of a reply, (n, n_vocab), computed in one pass."""
    ids = np.concatenate((prompt, np.array([token.id for token in tokens], dtype=np.int32)))
    with Model.load(path) as model, Context(model, ContextSpec(n_ctx=len(ids) + 8, threads=1)) as context:
        rows = context.decode(ids, outputs=len(tokens) + 1)[:-1].astype(np.float64)
    top = rows.max(axis=1, keepdims=True)
    return rows - top - np.log(np.exp(rows - top).sum(axis=1, keepdims=True))


@pytest.fixture(params=["pair", "served", "alone", "inside", "draft alone", "extra tokens"])
def writer(request: pytest.FixtureRequest, f32_pair: tuple[Path, Path], address: str) -> Iterator[tuple[LLM, Path]]:
    """A pair, and the model whose text it writes."""
    draft, verifier = f32_pair
    opened: dict[str, tuple[Path | str | None, Path | str | None]] = {
        "draft alone": (draft, None), "extra tokens": ("none", address),
    }  # fmt: skip
    if request.param not in opened:
        yield request.getfixturevalue(request.param), verifier
        return
    with LLM.open(*opened[request.param], threads=1) as pair:
        yield pair, draft if request.param == "draft alone" else verifier


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_they_are_the_writers_own(writer: tuple[LLM, Path], temperature: float) -> None:
    """Also of tokens in place of drafts that do not stand, and of those that a verifier adds."""
    pair, path = writer
    options: dict[str, Any] = {"max_tokens": 20, "temperature": temperature, "top_k": 0, "seed": 3}
    tokens = list(pair.reply(case(2), logprobs=4, **options))
    truth = read_anew(path, pair.prompt_writer.ids(case(2)), tokens)
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
    with verifying(f32_pair[1]) as server, LLM.open(f32_pair[0], str(server.address), threads=1) as linked:
        reply = linked.reply(case(2), max_tokens=40, logprobs=1)
        first = next(reply)
        server.stop(0)
        with pytest.raises(VerifierLost):
            list(reply)
    assert first.logprobs is not None
