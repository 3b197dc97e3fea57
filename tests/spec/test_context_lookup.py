"""What the context says where the draft model hesitates: where it is asked, who is told, what it never changes."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Context, ContextSpec, Model
from edgellm.llm import LLM
from edgellm.spec.drafters.model import ChunkBuilder
from edgellm.spec.drafters.parallel import BranchingDrafter
from edgellm.spec.gates.profile import CONTEXT, NAMES, Profile, signals
from edgellm.spec.ngram.sources import ContextIndex as Text
from edgellm.spec.ngram.sources import ContextLookup, Disagreement, disagreements, lookup_threshold
from edgellm.spec.protocols import DraftRules, GenerationState
from edgellm.spec.sampling import ReplyGrammar, top2
from edgellm.spec.types import GREEDY, Chunk, Constraint, Drafted, Sampling, Verdict
from tests.spec.fakes import Listed
from tests.spec.real import case, told

tokens = st.lists(st.integers(1, 5), min_size=1, max_size=30)


def of(*some: int) -> np.ndarray:
    return np.array(some, dtype=np.int32)


@given(tokens, st.lists(tokens, max_size=4), st.data())
def test_it_says_what_the_text_says_whatever_was_on_trial_meanwhile(
    prompt: list[int], steps: list[list[int]], data: st.DataObject
) -> None:
    lookup = ContextLookup(of(*prompt))
    text = list(prompt)
    for step in steps:
        trial = data.draw(tokens)
        lookup.cursor(of(*text, *trial), committed=data.draw(st.booleans()))  # what is rejected later
        text += step
        found = lookup.cursor(of(*text)).offer()
        plain = Text()
        plain.begin(text)
        known = plain.cursor().offer()
        assert found[1] <= known[1]  # the newest tokens are matched, and not yet found
        assert (found[0] >= 0) <= (known[0] >= 0)
        assert lookup._context.text == text[: len(lookup._context.text)]


def test_a_copy_takes_the_place_of_a_token_that_is_doubted() -> None:
    said = ContextLookup(of(7, 8, 9, 1, 2, 7, 8))  # behind 7 8 there was a 9
    for p1, hesitates, sampling, wanted in (
        (0.5, 0.6, GREEDY, 9),
        (0.5, 0.4, GREEDY, 3),
        (0.5, 0.6, Sampling(temperature=1e-3, seed=1), 9),
        (0.5, 0.4, Sampling(temperature=1e-3, seed=1), 3),
    ):
        logits = np.full(12, -50.0, dtype=np.float32)
        logits[3], logits[4] = np.log(p1), np.log(1.0 - p1 - 1e-3)
        cursor = said.cursor(of(7, 8, 9, 1, 2, 7, 8))
        rules = DraftRules(stop_below=0.7, lookup_below=hesitates)
        drafting = ChunkBuilder(GenerationState(of(7), sampling, rules=rules), 4, cursor=cursor)
        assert drafting.add(logits, top2(logits)) == wanted
        assert drafting.full() == (wanted != 9)  # a copy is no doubtful token any more
        (found,) = drafting.build().drafted
        assert (found.offered, found.matched, found.copied) == (9, 2, wanted == 9)


def test_a_copy_that_the_grammar_forbids_takes_no_place() -> None:
    text, logits = of(7, 8, 9, 1, 2, 7, 8), np.arange(12, dtype=np.float32)  # behind 7 8 there was a 9
    rules = DraftRules(grammar=ReplyGrammar(Listed(1), Constraint("", 0)), lookup_below=1.0)
    drafting = ChunkBuilder(GenerationState(text, rules=rules), 4, cursor=ContextLookup(text).cursor(text))
    assert drafting.add(logits, top2(logits)) == 1


def test_what_is_kept_of_a_chunk_keeps_what_was_said_of_it() -> None:
    def chunk(*some: int) -> Chunk:
        n = len(some)
        heard = tuple(Drafted(offered=token, matched=at, copied=at % 2 == 0) for at, token in enumerate(some))
        return Chunk(of(*some), np.ones(n, np.float32), drafted=heard)

    both = chunk(1, 2, 3).then(chunk(4, 5))
    assert [one.offered for one in both.drafted] == both.ids.tolist()
    assert both.part(2, 4).drafted == (Drafted(offered=3, matched=2, copied=True), Drafted(offered=4, copied=True))
    copied = Chunk(of(2), np.ones(1, np.float32))
    assert chunk(1).then(copied).drafted == (Drafted(offered=1, copied=True), Drafted())


def test_the_gate_is_told_of_agreement_dissent_and_copies() -> None:
    confidence = np.array([0.9, 0.5, 0.4], dtype=np.float32)
    heard = tuple(map(partial(Drafted, 1.0, None, None, None), (1, 9, 3), (3, 7, 1), (False, False, True)))
    told = dict(zip(NAMES, signals(Chunk(of(1, 2, 3), confidence, drafted=heard), 4), strict=True))
    assert told["agreement"] == pytest.approx(np.log(4))
    assert told["dissent"] == pytest.approx(np.log(8))
    assert told["copied"] == 1.0
    assert told["copied doubt"] == pytest.approx(-np.log(0.4), abs=1e-6)
    alone = dict(zip(NAMES, signals(Chunk(of(1, 2, 3), confidence), 4), strict=True))
    assert all(alone[name] == 0.0 for name in NAMES[CONTEXT])


def test_who_was_right_is_seen_up_to_the_verdict() -> None:
    heard = tuple(map(partial(Drafted, 1.0, None, None, None), (1, 9, 5, 6), (4, 4, 1, 4)))
    chunk = Chunk(of(1, 2, 3, 4), np.full(4, 0.5, np.float32), drafted=heard)
    assert disagreements(chunk, Verdict(1, of(9))) == [Disagreement(0.5, False, True)]
    assert disagreements(chunk, Verdict(3, of(6))) == [Disagreement(0.5, True, False), Disagreement(0.5, False, True)]
    assert disagreements(Chunk(of(1), np.ones(1, np.float32)), Verdict(0, of(2))) == []


def test_it_hesitates_as_long_as_the_context_knows_better() -> None:
    better = [Disagreement(c / 100, False, c % 3 > 0) for c in range(50)]
    worse = [Disagreement(c / 100, True, False) for c in range(50, 100)]
    assert lookup_threshold(better + worse) == 0.5
    assert lookup_threshold(worse) == lookup_threshold([]) == 0.0
    chance = [Disagreement(0.3, False, n == 0) for n in range(20)]  # one of twenty
    assert lookup_threshold(chance) == 0.0


def test_a_pair_with_a_budget_copies_and_says_so(f32_pair: tuple[Path, Path], profile_path: Path) -> None:
    assert Profile.load(profile_path).hesitates > 0.0
    different = copied = 0
    with LLM.open(*f32_pair, profile=profile_path, threads=1) as pair:
        for number in range(30, 42):
            written = []
            for context_lookup in (True, False):
                reply = pair.reply(case(number), max_tokens=32, budget=0.01, context_lookup=context_lookup)
                said, found = " ".join(told(reply)), reply.summary.from_context
                written.append(reply.summary.ids)
                assert ("the context's token is drafted" in said) == context_lookup
                assert ("of them taken from the context" in said) == (found > 0)
                assert context_lookup or not found
                copied += found
            different += written[0] != written[1]
    assert min(different, copied) > 0


def test_what_is_drafted_ahead_is_looked_up_in_the_context_too(draft_model: Model) -> None:
    prompt = draft_model.chat_prompt(case(5))
    with Context(draft_model, ContextSpec(n_ctx=512, n_seq=3, threads=1)) as context:
        drafter = BranchingDrafter(draft_model, context)
        state = GenerationState(prompt, rules=DraftRules(lookup_below=1.0, context=ContextLookup(prompt)))
        plain = drafter.propose(state, 8)
        ahead = drafter.draft_many(state, [prompt], 8, lambda: False, whole=prompt, tail=0)
        assert ahead[0][1].ids.tolist() == plain.ids.tolist()
        heard = [one.offered for one in ahead[0][1].drafted]
        assert max(heard) >= 0
        assert heard == [one.offered for one in plain.drafted]
