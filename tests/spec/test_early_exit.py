"""Layer-wise early exit: what leaves early, and that what does not is what the uncut model says."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.engine import Context, ContextSpec, Floats, Ids, Model, check_gguf, cut
from edgellm.engine.gguf.cuttable import check_cuttable
from edgellm.llm.early_exit import EarlyExitDrafter
from edgellm.spec.protocols import GenerationState
from edgellm.spec.sampling import Top2, distribution, draw, top2
from edgellm.spec.types import GREEDY, Chunk, Sampling
from tests.spec.real import case
from tests.spec.test_importance import LAYERS
from tests.spec.test_importance import check as check_importance

EXIT, N_CTX, CLOSE = 5, 768, 1e-4
WARM = Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=3)


class Parts:
    """The draft model in float32, whole and cut behind layer `EXIT`."""

    def __init__(self, path: Path, folder: Path, closing: ExitStack) -> None:
        n_layer = check_cuttable(check_gguf(path))
        cut(path, folder / "lower.gguf", 0, EXIT, head=True)
        cut(path, folder / "upper.gguf", EXIT + 1, n_layer - 1, head=True)
        self.whole, self.lower, self.upper = (
            closing.enter_context(Model.load(file)) for file in (path, folder / "lower.gguf", folder / "upper.gguf")
        )
        self._references = {
            model: closing.enter_context(Context(model, ContextSpec(n_ctx=N_CTX, threads=1)))
            for model in (self.whole, self.lower)
        }

    def drafter(self, threshold: float = 0.7) -> EarlyExitDrafter:
        return EarlyExitDrafter(self.lower, self.upper, ContextSpec(N_CTX, threads=1), threshold=threshold)

    def logits(self, model: Model, ids: Ids) -> Floats:
        """By a context that computes all its layers for every token."""
        context = self._references[model]
        return context.decode(ids[context.sync(ids) :])[0].copy()

    def check(self, chunk: Chunk, prefix: Ids, gamma: int, sampling: Sampling, threshold: float) -> None:
        """Compare with the chunk for which both heads are asked about every token."""
        ids, facts, exits = prefix, list[Top2](), list[int | None]()
        while len(ids) < len(prefix) + gamma and not (facts and self.whole.is_eog(int(ids[-1]))):
            logits = self.logits(self.lower, ids)
            exits.append(EXIT if top2(logits).p1 - top2(logits).p2 > threshold else None)
            if exits[-1] is None:
                logits = self.logits(self.whole, ids)
            facts.append(top2(logits))
            token = draw(distribution(logits, sampling), sampling.seed, len(ids))
            ids = np.append(ids, token).astype(np.int32)
        assert chunk.ids.tolist() == ids[len(prefix) :].tolist()
        assert [one.exit_layer for one in chunk.drafted] == exits
        np.testing.assert_allclose(chunk.confidence, [f.p1 for f in facts], atol=CLOSE)
        np.testing.assert_allclose([one.margin for one in chunk.drafted], [f.p1 - f.p2 for f in facts], atol=CLOSE)


@pytest.fixture(scope="module")
def parts(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    with ExitStack() as closing:
        yield Parts(f32_pair[0], tmp_path_factory.mktemp("shards"), closing)


@pytest.fixture(scope="module")
def prompts(parts: Parts) -> list[Ids]:
    """Held-out prompts of the little world."""
    return [parts.whole.chat_prompt(case(number)) for number in range(12)]


operations = st.one_of(
    st.tuples(st.just("verdict"), st.integers(0, 6), st.integers(2, 2000)),  # accepted tokens, then another
    st.tuples(st.just("back"), st.integers(1, 90), st.just(0)),  # an earlier text again
    st.tuples(st.just("other"), st.integers(0, 11), st.integers(1, 60)),  # the beginning of another prompt
)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.tuples(operations, st.integers(1, 5)), min_size=1, max_size=7),
    threshold=st.sampled_from([0.3, 0.7, 0.95]),
    start=st.integers(1, 75),
)
def test_whatever_prefixes_come_it_drafts_as_if_nothing_were_cached(
    parts: Parts, prompts: list[Ids], sampling: Sampling, steps: Sequence[tuple[tuple[str, int, int], int]],
    threshold: float, start: int,
) -> None:  # fmt: skip
    drafter = parts.drafter(threshold)
    prefix, chunk = prompts[0][:start], Chunk()
    for (kind, a, b), gamma in steps:
        if kind == "verdict":
            prefix = np.concatenate((prefix, chunk.ids[:a], np.array([b]))).astype(np.int32)
        elif kind == "back":
            prefix = prefix[: max(1, len(prefix) - a)]
        else:
            prefix = prompts[a][:b]
        chunk = drafter.propose(GenerationState(prefix, sampling), gamma)
        parts.check(chunk, prefix, gamma, sampling, threshold)
        assert drafter._upper.length() <= drafter._context.length() == len(prefix) + len(chunk) - 1
    drafter.close()


def test_rows_wait_and_then_go_through_the_deeper_layers_in_one_batch(
    parts: Parts, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    deeper: list[int] = []

    class Counted(Context):
        def decode_embeddings(self, rows: Floats, *, seq: int = 0, outputs: int = 1) -> Floats:
            deeper.append(len(rows))
            return super().decode_embeddings(rows, seq=seq, outputs=outputs)

    monkeypatch.setattr("edgellm.llm.early_exit.Context", Counted)
    drafter, prompt = parts.drafter(0.0), prompts[1]
    body = len(prompt) - 4
    chunk = drafter.propose(GenerationState(prompt), 6)
    assert [one.exit_layer for one in chunk.drafted] == [EXIT] * 6
    assert deeper == [body]  # the prompt, but for the few rows that were read with the head
    drafter._threshold = 1.0
    prefix = np.concatenate((prompt, chunk.ids[:5], [7])).astype(np.int32)
    assert [one.exit_layer for one in drafter.propose(GenerationState(prefix), 3).drafted] == [None] * 3
    assert deeper[1:] == [4 + 5 + 1, 1, 1]  # all that had waited with the correction; nothing a second time
    drafter.close()


@pytest.mark.parametrize(("where", "name"), [("_context", "decode"), ("_upper", "decode_embeddings")])
def test_an_interrupted_decode_leaves_nothing_behind(
    parts: Parts, prompts: list[Ids], where: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = parts.drafter(0.7)
    drafter.propose(GenerationState(prompts[2]), 4)
    call = getattr(getattr(drafter, where), name)

    def interrupted(*args: object, **kwargs: object) -> Floats:
        call(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(getattr(drafter, where), name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafter.propose(GenerationState(prompts[3]), 5)
    assert drafter._context.length() == drafter._upper.length() == 0
    parts.check(drafter.propose(GenerationState(prompts[3]), 4), prompts[3], 4, GREEDY, 0.7)
    drafter.close()


def test_importance_is_measured_in_the_lower_layers(parts: Parts, prompts: list[Ids]) -> None:
    drafter = EarlyExitDrafter(parts.lower, parts.upper, ContextSpec(N_CTX, threads=1), threshold=0.5, layers=LAYERS)
    chunks = [drafter.propose(GenerationState(prompt), 5) for prompt in prompts[:6]]
    for prompt, chunk in zip(prompts, chunks, strict=False):
        check_importance(chunk, None, parts.whole, prompt, atol=1e-4)
    assert any(one.exit_layer is not None for chunk in chunks for one in chunk.drafted)
    drafter.close()
