"""What each feature does with a pair of models: the text of the verifier alone, or a refusal with its reason.

The reference is llama.cpp itself, which decodes one token at a time. Where a text differs, the difference of the two
logits tells a rounding of nearly equal ones from a fault.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.plain import Plain
from edgellm import LLM
from edgellm.engine import Context, ContextSpec, Ids, Model, check_cuttable, cut
from edgellm.engine.layer_block import Block
from edgellm.errors import EdgeError
from edgellm.rpc.address import Address
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.types import Source, Token

QUESTION = (
    "The mug is on the shelf. The key is in the drawer. The mug is on the shelf and the key is in the drawer.\n\n"
    "Where is the mug, and where is the key?"
)
TIE = 1e-3  # of the largest logit
EQUAL = "equal"
_UNCHECKED = (Source.DRAFT, Source.PARALLEL)
_BUDGET = 0.4
_MOST_REPLIES = 8


@dataclass(frozen=True, slots=True)
class Reference:
    """The greedy reply of llama.cpp to a prompt."""

    prompt: Ids
    ids: list[int]
    gaps: list[float]
    """The margin of each token over the second, as a share of the largest logit."""

    @classmethod
    def of(cls, model: Model, prompt: Ids, tokens: int) -> "Reference":
        """Return the reply of at most `tokens` tokens."""
        plain = Plain(model, len(prompt) + tokens)
        ids: list[int] = []
        gaps: list[float] = []
        try:
            row = plain.decode(prompt.tolist())
            while len(ids) < tokens and not model.is_eog(token := int(row.argmax())):
                first, second = np.partition(row, -2)[-1], np.partition(row, -2)[-2]
                ids.append(token)
                gaps.append(float(first - second) / float(np.abs(row).max()))
                row = plain.decode([token])
        finally:
            plain.close()
        return cls(prompt, ids, gaps)

    def compared(self, found: Sequence[int]) -> str:
        """Return `EQUAL`, or where and by how much another reply differs."""
        if list(found) == self.ids:
            return EQUAL
        at = next((i for i, (a, b) in enumerate(zip(found, self.ids, strict=False)) if a != b), -1)
        if at < 0:
            return f"{len(found)} tokens instead of {len(self.ids)}"
        kind = "rounding" if self.gaps[at] < TIE else "differs"
        return f"{kind}: token {at}, of which the logit is {self.gaps[at]:.1e} above the second"


Cell = Callable[[], str]


def filled(cells: Mapping[str, Cell]) -> dict[str, str]:
    """Run each cell; a refusal is its text."""
    found = {}
    for name, run in cells.items():
        try:
            found[name] = run()
        except EdgeError as error:
            found[name] = f"refused: {error.what}"
    return found


def stranger(tokens: Sequence[Token], prompt: Ids, verifier: Model, draft: Model) -> str:
    """Return which token is not the most probable one under the model that its source names; "" without one."""
    text = np.concatenate((prompt, np.array([token.id for token in tokens], dtype=np.int32)))
    for model, unchecked in ((verifier, False), (draft, True)):
        places = [i for i, token in enumerate(tokens) if (token.source in _UNCHECKED) == unchecked]
        if not places:
            continue
        with Context(model, ContextSpec(n_ctx=len(text), n_batch=len(text), threads=1)) as context:
            rows = context.decode(text[:-1], outputs=len(tokens))
            for i in places:
                below = float(rows[i].max() - rows[i, tokens[i].id]) / float(np.abs(rows[i]).max())
                if below > TIE:
                    return f"token {i} is not {model.name}'s: its logit is {below:.1e} below the largest"
    return ""


class Pair:
    """A draft model and a verifier, and the cells of their features."""

    def __init__(self, draft: Path, verifier: Path, *, tokens: int, n_ctx: int, closing: ExitStack) -> None:
        self._paths, self._tokens, self._n_ctx, self._closing = (draft, verifier), tokens, n_ctx, closing
        self.verifier = closing.enter_context(Model.load(verifier))
        self.draft = closing.enter_context(Model.load(draft))
        self.alone_llm = self._open(None, verifier)
        self.pair_llm = self._open(draft, verifier)
        self.reference = Reference.of(self.verifier, self.pair_llm.prompt_writer.ids(QUESTION), tokens)

    def _open(self, draft: Path | None, verifier: Path | str) -> LLM:
        return self._closing.enter_context(LLM.open(draft, verifier, threads=1, n_ctx=self._n_ctx, history=False))

    def cells(self) -> dict[str, Cell]:
        """Return the cells by their columns."""
        return {
            "alone": partial(self.written, self.alone_llm, retrieval="off"),
            "pair": partial(self.written, self.pair_llm, retrieval="off"),
            "copies": self.copies,
            "budget": partial(self.budgeted, "auto"),
            "importance gate": partial(self.budgeted, "synera"),
            "early exit": partial(self.written, self.pair_llm, retrieval="off", early_exit=True),
            "cut into layers": self.mesh,
            "served": self.served,
        }

    def written(self, llm: LLM, **options: Any) -> str:
        """Return how a reply compares."""
        reply = llm.reply(QUESTION, max_tokens=self._tokens, max_total=self._tokens, **options)
        return self.reference.compared([token.id for token in reply])

    def copies(self) -> str:
        """Return how replies with copies compare: of the pair and of the verifier alone, twice each."""
        for llm in (self.pair_llm, self.alone_llm):
            for _ in range(2):  # the second copies from the first
                if (outcome := self.written(llm, retrieval="auto")) != EQUAL:
                    return outcome
        return EQUAL

    def budgeted(self, gate: str) -> str:
        """Return whether each token of a reply with a budget is of the model that it names, and the next is equal."""
        llm, share = self.pair_llm, 1.0
        for _ in range(_MOST_REPLIES):  # the first ones make a profile, with everything verified
            if share < 1.0:
                break
            reply = llm.reply(
                QUESTION, max_tokens=self._tokens, max_total=self._tokens, budget=_BUDGET, gate=gate,
                context_lookup=False,
            )  # fmt: skip
            tokens = list(reply)
            share = reply.summary.share_verified or 0.0
            if wrong := stranger(tokens, self.reference.prompt, self.verifier, self.draft):
                return f"differs: {wrong}"
        after = self.written(llm, retrieval="off")
        return f"right, {share:.0%} verified" if after == EQUAL else f"afterwards: {after}"

    def mesh(self) -> str:
        """Return whether two blocks of layers compute what the whole model does."""
        count = check_cuttable(self.verifier.header)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
            blocks: list[Block] = []
            for first, last in ((0, count // 2 - 1), (count // 2, count - 1)):
                path = Path(folder) / f"{first}.gguf"
                cut(self.verifier.path, path, first, last, head=last == count - 1)
                model = closing.enter_context(Model.load(path))
                blocks.append(Block(model, ContextSpec(self._n_ctx, threads=1), head=last == count - 1))
                closing.callback(blocks[-1].close)
            ids, at = self.reference.prompt, 0
            found: list[int] = []
            while len(found) < len(self.reference.ids):
                rows = blocks[0].forward(ids, start=at).copy()
                row = blocks[1].forward(rows, start=at, outputs=1)[0]
                at += len(ids)
                found.append(int(row.argmax()))
                ids = np.array(found[-1:], dtype=np.int32)
        return self.reference.compared(found)

    def served(self) -> str:
        """Return how the reply compares whose verifier is behind a socket, with parallel inference and copies."""
        server = VerifierServer(self.verifier, Address("127.0.0.1", 0), context=self._n_ctx, sessions=2, threads=1)
        with (
            server,
            LLM.open(self._paths[0], str(server.address), threads=1, n_ctx=self._n_ctx, history=False) as linked,
        ):
            for options in ({"retrieval": "off"}, {"retrieval": "auto"}):
                if (outcome := self.written(linked, **options)) != EQUAL:
                    return outcome
        return EQUAL
