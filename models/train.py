"""Trains one model of a pair on its seeded stream, with checkpoints to resume from.

python -m models.train home verifier            # the first stage; or: home draft, code verifier, code draft
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import distributed
from torch.nn import functional as F

from models.muon import Muon
from models.net import Net, seed_copy_heads
from models.pairs import PAIRS, Pair
from models.practice import random_copying, random_lookups
from models.recipe import Recipe, practises, schedule, sharpening, tokens_at
from models.rendering import Rendered

POOL = 16  # batches drawn together, so that rows of one length share a batch


def batches(pair: Pair, recipe: Recipe, step: int, tokenizer: Tokenizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return `POOL` batches of ids (rows, tokens) and target weights, of rows of similar length, in random order."""
    drawn = sorted(pair.rows(recipe, step, POOL, tokenizer), key=lambda row: len(row.ids))
    groups: list[list[Rendered]] = [[]]
    for row in drawn:
        if (len(groups[-1]) + 1) * len(row.ids) > tokens_at(recipe.progress(step), recipe) * 1.05 and groups[-1]:
            groups.append([])
        groups[-1].append(row)
    random.Random(step).shuffle(groups)
    return [padded(group) for group in groups]


def padded(group: list[Rendered]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and weights, each (rows, tokens), of rows that are filled up to the longest."""
    longest = max(len(row.ids) for row in group)
    ids = np.zeros((len(group), longest), dtype=np.int64)
    weights = np.zeros((len(group), longest), dtype=np.float32)
    for at, row in enumerate(group):
        ids[at, : len(row.ids)], weights[at, : len(row.ids)] = row.ids, row.weights
    return torch.from_numpy(ids), torch.from_numpy(weights)


def stream(pair: Pair, recipe: Recipe, start: int, tokenizer: Tokenizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches from step `start` on. Pools start at multiples of `POOL`."""
    step = start // POOL * POOL
    while True:
        drawn = batches(pair, recipe, step, tokenizer)[:POOL]
        yield from drawn[max(0, start - step) :]
        step += POOL


def logits_of(net: Net, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the logits of the next token at the places of `mask`, shape (places, vocabulary)."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=net.coarse):
        hidden = net(ids[:, :-1])
    return net.head(hidden[mask])


def loss_of(net: Net, ids: torch.Tensor, weights: torch.Tensor, teacher: Net | None = None) -> torch.Tensor:
    """Return the weighted sum of the cross-entropies of the next token, in nats, and of the distillation losses if
    there is a teacher."""
    mask = weights[:, 1:] > 0
    logits, targets = logits_of(net, ids, mask), ids[:, 1:][mask]
    losses = F.cross_entropy(logits, targets, reduction="none")
    if teacher is not None:
        losses = losses + distillation(logits, targets, teacher, ids, mask)
    return (losses * weights[:, 1:][mask]).sum()


def distillation(
    logits: torch.Tensor, targets: torch.Tensor, teacher: Net, ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return the KL divergence from the teacher's distributions where its most probable token is the target, (places,).

    Learning without forgetting (Li and Hoiem, arXiv 1606.09282): what was learned stays, errors may be mended.
    """
    with torch.no_grad():
        before = logits_of(teacher, ids, mask)
        right = before.argmax(-1) == targets
    divergence = F.kl_div(logits.log_softmax(-1), before.log_softmax(-1), reduction="none", log_target=True)
    return divergence.sum(-1) * right


def add_gradients(net: Net, ids: torch.Tensor, weights: torch.Tensor, teacher: Net | None = None) -> float:
    """Set the gradients of a batch and return its mean loss; `teacher` as in `loss_of`.

    Of several processes each takes its share of the rows; then they add up their gradients, so that all of them go on
    with the same weights. On few cores that others use too, this loses less time than threads, which wait for each
    other at every product.
    """
    rank, processes = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    net.zero_grad(set_to_none=True)
    share = weights[rank::processes]
    loss = torch.zeros(1, device=ids.device)
    if (share[:, 1:] > 0).any():
        mean = loss_of(net, ids[rank::processes], share, teacher) / weights[:, 1:].sum()
        mean.backward()
        loss += mean.detach()
    if processes > 1:
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in net.parameters()]
        flat = torch.cat([loss, *(part.flatten() for part in parts)])
        distributed.all_reduce(flat)
        loss, *added = flat.split([1, *(part.numel() for part in parts)])
        for each, gradient in zip(net.parameters(), added, strict=True):
            each.grad = gradient.view_as(each).clone()
    return loss.item()


def prepare(net: Net, device: str) -> str:
    """Compile the blocks, use bfloat16 if that multiplies faster than float32 here, and return a description.

    Some processors take several times as long in bfloat16, so a second of trying decides. Weights, residual stream,
    head and loss stay float32.
    """
    net.to(device)
    for block in net.blocks:
        block.compile(dynamic=True)
    fine, coarse = (_multiplying(device, dtype) for dtype in (torch.float32, torch.bfloat16))
    net.coarse = coarse < 0.8 * fine
    chosen = "bfloat16" if net.coarse else "float32"
    return f"blocks in {chosen}: a product takes {coarse / fine:.2f} of float32's time in bfloat16 here"


def _multiplying(device: str, dtype: torch.dtype) -> float:
    """Return the seconds of the quickest of 20 products of the verifier's feed-forward shape."""
    left, right = torch.randn(2048, 192, device=device, dtype=dtype), torch.randn(192, 512, device=device, dtype=dtype)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        (left @ right).sum().item()
        times.append(time.perf_counter() - began)
    return min(times)


def optimizers_of(net: Net, recipe: Recipe) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the blocks' matrices, Adam for the rest; `peak` is each group's rate before the schedule."""
    matrices = [weight for weight in net.blocks.parameters() if weight.ndim == 2]
    known = {id(weight) for weight in [*matrices, net.embedding.weight]}
    others = [weight for weight in net.parameters() if id(weight) not in known]
    groups = [{"params": [net.embedding.weight], "lr": 0.3 * recipe.adam_rate}, {"params": others}]
    adam = torch.optim.AdamW(groups, lr=recipe.adam_rate, betas=(0.9, 0.97), weight_decay=0.0)
    both = (Muon(matrices, recipe.rate, coarse=net.coarse), adam)
    for optimizer in both:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return both


def improve(
    net: Net, optimizers: Sequence[torch.optim.Optimizer], factor: float, set_gradients: Callable[[], float]
) -> float:
    """Take one step at `factor` of the peak rates, and return the loss, which `set_gradients` returns."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group["peak"] * factor
    loss = set_gradients()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss


def sharpen(net: Net, recipe: Recipe, device: str) -> None:
    """Train the first blocks of `net`, as many as the recipe has, on random copying alone."""
    first = net.first_blocks(recipe.shape.layers).to(device)
    optimizers = optimizers_of(first, recipe)
    for step in range(recipe.steps):
        ids, counts = random_copying(recipe, step)
        gradients = partial(add_gradients, first, ids.to(device), counts.to(device))
        loss = improve(first, optimizers, schedule(step, recipe), gradients)
    print(f"{recipe.name} step {recipe.steps} loss {loss:.4f}", flush=True)


def checkpoint(path: Path, net: Net, optimizers: Sequence[torch.optim.Optimizer], step: int) -> None:
    """Write all that training needs to go on; an interruption leaves the last checkpoint whole."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    beside = path.with_suffix(".part")
    torch.save({"net": net.state_dict(), "optimizers": states, "step": step}, beside)
    beside.replace(path)


def resumed(path: Path, net: Net, optimizers: Sequence[torch.optim.Optimizer], device: str) -> int:
    """Read a checkpoint if there is one, and return the step that comes next."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location=device, weights_only=True)
    net.load_state_dict(state["net"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    step: int = state["step"]
    return step


def train(
    pair: Pair,
    recipe: Recipe,
    folder: Path,
    device: str = "cpu",
    every: int = 40,
    stop: int | None = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> Net:
    """Train to the end (or to step `stop`), resuming from a checkpoint in `folder` if there is one.

    Without a checkpoint the net starts from `weights`, or from nothing. The net of the weights is its
    teacher, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{recipe.name}.pt"
    torch.manual_seed(recipe.seed)
    tokenizer = pair.tokenizer()
    net, teacher = Net(recipe.shape), None
    if weights is None:
        seed_copy_heads(net)
        if not path.exists():
            sharpen(net, sharpening(recipe), device)
    else:
        net.load_state_dict(weights)
        teacher = copy.deepcopy(net)
        prepare(teacher, device)
    print(prepare(net, device), flush=True)
    optimizers = optimizers_of(net, recipe)
    step = resumed(path, net, optimizers, device)
    began, tokens, mean = time.monotonic(), 0, 0.0
    last = min(recipe.steps, stop or recipe.steps)
    for batch in stream(pair, recipe, step, tokenizer):
        if step >= last:
            break
        practice = practises(step, recipe)
        if practice and step // 2 % 2:  # every other time
            ids, counts = random_lookups(recipe, step, tokenizer)
        else:
            ids, counts = random_copying(recipe, step) if practice else batch
        taught = None if practice else teacher
        gradients = partial(add_gradients, net, ids.to(device), counts.to(device), taught)
        loss = improve(net, optimizers, schedule(step, recipe), gradients)
        step += 1
        tokens += ids.numel()
        mean += (loss - mean) / min(step, 50)
        if distributed.is_initialized() and distributed.get_rank():
            continue  # the first process reports and saves
        if step % 50 == 0:
            rate = tokens / (time.monotonic() - began)
            print(f"{recipe.name} step {step}/{recipe.steps} loss {mean:.4f} {rate:.0f} tokens/s", flush=True)
        if step % every == 0 or step == last:
            checkpoint(path, net, optimizers, step)
            torch.save(net.state_dict(), folder / f"{recipe.name}-{step:05d}.pt")
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", choices=PAIRS)
    parser.add_argument("name", choices=("verifier", "draft"))
    parser.add_argument("--folder", type=Path, help="of the checkpoints; of the pair by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--stop", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pair = PAIRS[arguments.pair]
    folder = arguments.folder or pair.folder / "checkpoints"
    train(pair, pair.recipes[arguments.name], folder, arguments.device, stop=arguments.stop)


if __name__ == "__main__":
    main()
