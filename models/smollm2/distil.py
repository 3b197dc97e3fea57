"""Trains SmolLM2's draft model on what SmolLM2 wrote (`synthesis.py`), by its distributions, with checkpoints.

The embeddings start as the main components of the verifier's, so that its knowledge of words need not be learned again;
the copy heads are seeded as those of the other pairs are. The loss is the cross-entropy to the teacher's kept tokens;
its sum over the vocabulary runs over the tokens that the teacher thought of anywhere in the batch and over others drawn
by chance, which stand for all that are left: the whole vocabulary would take most of the time.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.net import Net, seed_copy_heads
from models.recipe import schedule, sharpening
from models.smollm2.recipe import DRAFT, LIKELIEST, NEGATIVES, ROW, SHARPENED, practises
from models.train import checkpoint, improve, optimizers_of, prepare, resumed


@dataclass(frozen=True, slots=True)
class Texts:
    """All conversations in a row: `ids`, shape (n,); for each place the number of its row in `likeliest` and `known`,
    shape (m, TOP), or -1 where the teacher was not asked; and where each conversation begins, with the end."""

    ids: npt.NDArray[np.uint16]
    rows: npt.NDArray[np.int32]
    likeliest: npt.NDArray[np.uint16]
    known: npt.NDArray[np.float16]
    begins: npt.NDArray[np.int64]

    @classmethod
    def read(cls, folder: Path) -> Texts:
        """Return the texts of all shards in `folder`."""
        shards = [np.load(path) for path in sorted(folder.glob("shard-????.npz"))]
        ids = np.concatenate([shard["ids"] for shard in shards])
        starts = np.cumsum([0, *(len(shard["ids"]) for shard in shards)])
        counts = np.cumsum([0, *(len(shard["places"]) for shard in shards)])
        rows = np.full(len(ids), -1, dtype=np.int32)
        for shard, start, count in zip(shards, starts[:-1], counts[:-1], strict=True):
            rows[shard["places"] + start] = np.arange(len(shard["places"])) + count
        begins = np.concatenate(
            [shard["begins"][:-1] + start for shard, start in zip(shards, starts[:-1], strict=True)]
        )
        return cls(
            ids, rows, np.concatenate([shard["likeliest"] for shard in shards]),
            np.concatenate([shard["known"] for shard in shards]), np.append(begins, len(ids)),
        )  # fmt: skip

    def places(self, step: int, rows: int) -> npt.NDArray[np.int64]:
        """Return the places of the tokens of a step, (rows, ROW): conversations in a row, drawn by chance."""
        chance, drawn, found = np.random.default_rng(step), [], 0
        while found < rows * ROW:
            at = chance.integers(len(self.begins) - 1)
            drawn.append(np.arange(self.begins[at], self.begins[at + 1]))
            found += len(drawn[-1])
        return np.concatenate(drawn)[: rows * ROW].reshape(rows, ROW)


@torch.no_grad()
def start_from(net: Net, verifier: Path) -> None:
    """Set the embeddings to the main components of the verifier's, and seed the copy heads.

    Components are evened out by the square root of their spread: the first few would otherwise hide what tells similar
    tokens apart, by which the copy heads find them.
    """
    tensor = next(one for one in gguf.GGUFReader(verifier).tensors if one.name == "token_embd.weight")
    table = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
    table -= table.mean(0)
    spread, directions = torch.linalg.eigh(table.T @ table / len(table))
    width = net.shape.width
    scores = table @ directions[:, -width:]
    net.embedding.weight.copy_(scores / spread[-width:].sqrt().sqrt())
    seed_copy_heads(net)


@dataclass(frozen=True, slots=True)
class Targets:
    """What a step learns: `ids`, (rows, tokens); `mask`, (rows, tokens), of the places behind which a distribution is
    learned; and for each of these m places the tokens that it is over, (m, n), and their shares, (m, n)."""

    ids: Tensor
    mask: Tensor
    over: Tensor
    shares: Tensor


def taught(texts: Texts, step: int, rows: int) -> Targets:
    """Return a step's conversations, with the teacher's distributions."""
    places = texts.places(step, rows)
    asked = texts.rows[places]
    numbers = asked[asked >= 0]
    known = torch.from_numpy(texts.known[numbers].astype(np.float32))
    return Targets(
        torch.from_numpy(texts.ids[places].astype(np.int64)), torch.from_numpy(asked >= 0),
        torch.from_numpy(texts.likeliest[numbers].astype(np.int64)),
        (known.softmax(1) + (known / SHARPENED).softmax(1)) / 2,
    )  # fmt: skip


def practised(texts: Texts, step: int, tokens: int) -> Targets:
    """Return a step of copying, which keeps the copy heads: rows that stand twice, the second time to be learned.

    They are, in turn, pieces of conversations and tokens drawn by chance among all that conversations have.
    """
    chance = np.random.default_rng(step)
    length = int(chance.integers(8, 160))
    shape = (tokens // (2 * length), length)
    if step // 2 % 2:
        starts = chance.integers(len(texts.ids) - length, size=shape[0])
        once = texts.ids[starts[:, None] + np.arange(length)]
    else:
        once = chance.choice(np.unique(texts.ids), size=shape)
    ids = torch.from_numpy(np.concatenate((once, once), axis=1).astype(np.int64))
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[:, length:-1] = True
    over = ids[:, length + 1 :].reshape(-1, 1)
    return Targets(ids, mask, over, torch.ones(over.shape))


def loss_of(net: Net, targets: Targets, generator: torch.Generator) -> Tensor:
    """Return the mean cross-entropy to the targets, in nats."""
    with torch.autocast("cpu", torch.bfloat16, enabled=net.coarse):
        hidden = net(targets.ids)
    vocabulary = net.shape.vocabulary
    thought_of = torch.zeros(vocabulary, dtype=torch.bool)
    thought_of[targets.over[:, :LIKELIEST].flatten()] = True
    drawn = torch.randint(vocabulary, (NEGATIVES,), generator=generator)
    drawn = drawn[~thought_of[drawn]].unique()
    candidates = torch.cat((thought_of.nonzero()[:, 0], drawn))
    stands_for = torch.zeros(len(candidates))
    stands_for[len(candidates) - len(drawn) :] = np.log((vocabulary - int(thought_of.sum())) / max(1, len(drawn)))
    place = torch.full((vocabulary,), -1)
    place[candidates] = torch.arange(len(candidates))
    with torch.autocast("cpu", torch.bfloat16, enabled=net.coarse):
        logits = hidden[targets.mask] @ net.output.weight[candidates].T
    logits = logits.float()
    found = place[targets.over]
    shares = targets.shares * (found >= 0)
    right = (logits.gather(1, found.clamp(min=0)) * shares / shares.sum(1, keepdim=True)).sum(1)
    return ((logits + stands_for).logsumexp(1) - right).mean()


def sharpen(net: Net, texts: Texts) -> None:
    """Train the two blocks of the copy heads on copying alone: what is covered by the other blocks' noise afterwards
    would be forgotten before it is of use."""
    recipe = sharpening(DRAFT)
    first = net.first_blocks(recipe.shape.layers)
    first.coarse = net.coarse
    optimizers = optimizers_of(first, recipe)
    for step in range(recipe.steps):
        gradients = partial(set_gradients, first, practised(texts, step, recipe.tokens), step)
        loss = improve(first, optimizers, schedule(step, recipe), gradients)
        if step % 20 == 0:
            print(f"sharpening, step {step} of {recipe.steps}: loss {loss:.3f}", flush=True)


def set_gradients(net: Net, batch: Targets, seed: int) -> float:
    """Set the gradients of a batch and return its loss."""
    net.zero_grad(set_to_none=True)
    loss = loss_of(net, batch, torch.Generator().manual_seed(seed))
    loss.backward()
    return loss.item()


def distil(verifier: Path, folder: Path, stop: int | None) -> Net:
    """Train to the end, or to step `stop`; resume from the checkpoint in `folder`."""
    torch.manual_seed(DRAFT.seed)
    net, path = Net(DRAFT.shape), folder / "draft.pt"
    print(prepare(net, "cpu"), flush=True)
    texts = Texts.read(folder)
    if not path.exists():
        start_from(net, verifier)
        sharpen(net, texts)
    optimizers = optimizers_of(net, DRAFT)
    step = resumed(path, net, optimizers, "cpu")
    began, tokens, losses = time.monotonic(), 0, (deque[float](maxlen=20), deque[float](maxlen=20))
    while step < (stop or DRAFT.steps):
        practice = practises(step)
        batch = practised(texts, step, DRAFT.tokens) if practice else taught(texts, step, DRAFT.tokens // ROW)
        loss = improve(net, optimizers, schedule(step, DRAFT), partial(set_gradients, net, batch, step))
        step += 1
        tokens += batch.ids.numel()
        losses[practice].append(loss)
        if step % 10 == 0:
            rate = tokens / (time.monotonic() - began)
            of_texts, of_copying = (f"{np.mean(each):.3f}" for each in losses)
            print(f"step {step}: loss {of_texts}, of copying {of_copying}; {rate:.0f} tokens/s", flush=True)
        if step % 50 == 0:
            checkpoint(path, net, optimizers, step)
            texts = Texts.read(folder)  # SmolLM2 may go on writing beside it
    return net
