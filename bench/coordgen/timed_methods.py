"""The methods that `bench.coordgen.speed` times, and a task on which no method helps."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol

import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from bench.coordgen.methods import Everything, Foresight, Method, Ours, PromptLookup, SuffixLookup
from bench.coordgen.tasks import SEED, Reply
from edgellm.engine import Model
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafting.acceptance import EvidenceAcceptance
from edgellm.spec.drafting.cost_curve import MAX_DRAFT, CostCurve
from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.spec.gates.rules import AlwaysGate
from edgellm.spec.loop import NoDrafter, generate
from edgellm.spec.ngram.retriever import Retriever
from edgellm.spec.params import DEFAULT_SOURCES
from edgellm.spec.protocols import Drafter, GenerationLimits, GenerationState, VerdictTerms
from edgellm.spec.stats import Summary
from edgellm.spec.types import Chunk, Expected, Round
from testkit.forced_verifier import ForcedVerifier

N_CTX = 1024
FIXED = 10
"""Tokens of a draft for methods that ignore costs: llama-cpp-python's default."""


FEW = ("plain", "llama-cpp-python", "SAM", "ours", "context alone", "oracle")
"""The names of methods that are measured where a token takes long begin with one of these."""


class Drafting(Protocol):
    """A method, with its memory of past cases."""

    calibrates: bool

    @property
    def drafter(self) -> Drafter | None: ...

    @property
    def retriever(self) -> Retriever | None: ...

    def begin(self, case: Reply) -> None: ...

    def end(self, case: Reply) -> None: ...


class Plain:
    """Plain decoding, or llama-cpp-python's drafter in our loop, called as by `Llama`: always, for ten tokens."""

    calibrates = False
    retriever = None

    def __init__(self, lookup: LlamaPromptLookupDecoding | None = None) -> None:
        self.drafter = None if lookup is None else Lookup(lookup)

    def begin(self, case: Reply) -> None: ...

    def end(self, case: Reply) -> None: ...


class Lookup(Drafter):
    """llama-cpp-python's prompt lookup."""

    def __init__(self, lookup: LlamaPromptLookupDecoding) -> None:
        self._lookup = lookup

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        found = np.asarray(self._lookup(state.ids.astype(np.intc)))[:gamma]
        return Chunk(found.astype(np.int32), retrieved=True)


class Timed(Drafter):
    """A drafter, or none, that gets what the verifier expects; notes the seconds of beginning and of drafting."""

    def __init__(self, drafter: Drafter | None, retriever: Retriever | None, expected: Sequence[Expected]) -> None:
        self._drafter, self._expect = drafter or NoDrafter(), None if retriever is None else retriever.expect
        self.needs_verdict = self._drafter.needs_verdict
        self._expected = expected
        self.beginning = 0.0
        self.drafting: list[float] = []

    def begin(self, state: GenerationState) -> None:
        began = perf_counter()
        self._drafter.begin(state)
        for some in self._expected:
            if self._expect is not None:
                self._expect(some)
        self.beginning = perf_counter() - began

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        return self._drafter.propose(state, gamma)

    def observe(self, state: GenerationState, turn: Round) -> None:
        self.drafting.append(turn.drafting)
        self._drafter.observe(state, turn)

    def end(self) -> None:
        self._drafter.end()


def nothing_to_copy(cases: int, vocabulary: int) -> list[Reply]:
    """Return random prompts, and replies of other random tokens."""
    rng = random.Random(SEED)
    middle = vocabulary // 2
    return [
        Reply(
            np.array([rng.randrange(300, middle) for _ in range(60)], dtype=np.int32),
            tuple(rng.randrange(middle, vocabulary) for _ in range(40)),
        )
        for _ in range(cases)
    ]


class Run:
    """A method on a stream of cases, and the seconds that it took."""

    def __init__(self, name: str, make: Callable[[], Drafting], curve: CostCurve | None = None) -> None:
        """With a `curve` decodes are padded by it; without one, decodes are llama.cpp's own."""
        self.name, self._make = name, make
        self._widths = () if curve is None else curve.widths()
        self.method = make()
        self.decoding: list[float] = []
        self.whole: list[float] = []
        self.drafting: list[float] = []

    def again(self) -> None:
        """Forget past cases."""
        self.method = self._make()

    def write(
        self, verifier: ForcedVerifier, alphabet: Model, case: Reply, expected: Sequence[Expected], prefill: float
    ) -> None:
        """Write the reply of one case, whose prompt took `prefill` seconds, and note the seconds."""
        began = perf_counter()
        self.method.begin(case)
        drafter = Timed(self.method.drafter, self.method.retriever, expected if self.method.calibrates else ())
        state = GenerationState(
            case.prompt,
            limits=GenerationLimits(len(case.reply), N_CTX, MAX_DRAFT),
            terms=VerdictTerms(widths=self._widths),
        )
        for _ in generate(
            state, vocabulary=alphabet, drafter=drafter, gate=AlwaysGate(), verifier=verifier, stats=Summary()
        ):
            pass
        now = perf_counter()
        self.method.end(case)
        self.decoding.append(now - began - drafter.beginning)
        self.whole.append(prefill + now - began)
        self.drafting += drafter.drafting


def all_methods(curve: CostCurve, model: Model, past: Sequence[Reply], few: bool, small: ModelDrafter) -> list[Run]:
    """Return all methods, plain decoding first; with `few` only those of `FEW`.

    `past` are earlier conversations; `small` is the draft model of the methods that have one.
    """
    beside = tuple(name for name in DEFAULT_SOURCES if name != "context")

    def ours(*sources: str) -> Callable[[], Drafting]:
        return lambda: Ours(sources, DraftPolicy(curve), model)

    def seasoned() -> Drafting:
        method = Ours(DEFAULT_SOURCES, DraftPolicy(curve), model)
        for case in past:
            method.begin(case)
            method.end(case)
        return method

    def fixed(copy_chances: EvidenceAcceptance) -> DraftPolicy:
        return Everything(copy_chances, FIXED)

    paying = partial(DraftPolicy, curve)
    found = [
        Run("plain", Plain),
        Run("llama-cpp-python", lambda: Plain(LlamaPromptLookupDecoding())),
        Run("PLD", lambda: Method(PromptLookup(), (), fixed, model, 0.35)),
        Run("PLD + ours", lambda: Method(PromptLookup(), beside, paying, model, 0.35), curve),
        Run("SAM", lambda: Method(SuffixLookup(), (), fixed, model, 0.45)),
        Run("SAM + ours", lambda: Method(SuffixLookup(), beside, paying, model, 0.45), curve),
        Run("ours", ours(*DEFAULT_SOURCES), curve),
        Run("with calibration", ours(*DEFAULT_SOURCES, "calibration"), curve),
        Run("with reuse", ours(*DEFAULT_SOURCES, "reuse"), curve),
        Run("context alone", ours("context"), curve),
        Run("without the cost curve", lambda: Ours(DEFAULT_SOURCES, Everything(most=FIXED), model)),
        Run("ours with the draft model", lambda: Ours(DEFAULT_SOURCES, paying(), model, small), curve),
        *([Run(f"ours after {len(past)} conversations", seasoned, curve)] if past else []),
        Run("oracle", lambda: Foresight(paying()), curve),
    ]
    return [method for method in found if not few or method.name.startswith(FEW)]
