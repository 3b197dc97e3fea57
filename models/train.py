"""Trains one model of the pair on the seeded stream, with checkpoints to resume from.

python -m models.train verifier            # the first stage; or: draft
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import distributed
from torch.nn import functional as F

from models.corpus import SPECIAL, Rendered, case_at, render
from models.muon import Muon
from models.net import Net, seed_copy_heads
from models.recipe import RECIPES, Recipe, long_share, mixture, practises, schedule, sharpens, size_at, tokens_at
from models.tokenizer import load as load_tokenizer

HERE = Path(__file__).parent
POOL = 16  # batches drawn together, so that rows of one length share a batch


def rows(recipe: Recipe, step: int, tokenizer: Tokenizer) -> list[Rendered]:
    """Return the conversations of the pool that starts at `step`, always the same for one step."""
    progress = recipe.progress(step)
    rng = random.Random(f"{recipe.seed}/{step}")
    drawn, total, index = [], 0, 0
    families, longer = mixture(progress, recipe), 0.0
    first = (recipe.seed - 1) * 10**9 + step * 10_000
    enough = POOL * tokens_at(progress, recipe)
    while total < enough:
        is_long = longer < long_share(progress) * total
        size = rng.uniform(2.0, 6.0) if is_long else size_at(progress)
        case = case_at(first + index, size, families)
        rendered = render(case, tokenizer, recipe.lookup_weight)
        index += 1
        if len(rendered.ids) > recipe.shape.context:
            continue
        drawn.append(rendered)
        total += len(rendered.ids)
        longer += len(rendered.ids) if is_long else 0
    return drawn


def batches(recipe: Recipe, step: int, tokenizer: Tokenizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return `POOL` batches of ids (rows, tokens) and target weights, of rows of similar length, in random order."""
    drawn = sorted(rows(recipe, step, tokenizer), key=lambda row: len(row.ids))
    groups: list[list[Rendered]] = [[]]
    for row in drawn:
        if (len(groups[-1]) + 1) * len(row.ids) > tokens_at(recipe.progress(step), recipe) * 1.05 and groups[-1]:
            groups.append([])
        groups[-1].append(row)
    random.Random(step).shuffle(groups)
    return [_padded(group) for group in groups]


def _padded(group: list[Rendered]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(row.ids) for row in group)
    ids = np.zeros((len(group), longest), dtype=np.int64)
    weights = np.zeros((len(group), longest), dtype=np.float32)
    for at, row in enumerate(group):
        ids[at, : len(row.ids)], weights[at, : len(row.ids)] = row.ids, row.weights
    return torch.from_numpy(ids), torch.from_numpy(weights)


def stream(recipe: Recipe, start: int, tokenizer: Tokenizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches from step `start` on. Pools start at multiples of `POOL`."""
    step = start // POOL * POOL
    while True:
        drawn = batches(recipe, step, tokenizer)[:POOL]
        yield from drawn[max(0, start - step) :]
        step += POOL


def random_copying(recipe: Recipe, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of random tokens in which each row stands twice; only the second time counts."""
    generator = torch.Generator().manual_seed(step)
    length = int(torch.randint(4, 80, (1,), generator=generator))
    shape = (recipe.tokens // (2 * length + 1), length)
    once = torch.randint(len(SPECIAL), recipe.shape.vocabulary, shape, generator=generator)
    weights = torch.zeros(shape[0], 2 * length)
    weights[:, length + 1 :] = 1.0
    return torch.cat((once, once), dim=1), weights


LINKS = (" is", " the", " to", " with", " was", " by", " has", " on", " at", " for", ":", " -", " will", " it", " and")


def random_lookups(recipe: Recipe, step: int, tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of lists of random keys and values with up to four ordinary words between; each key is queried.

    Only the value after the key and one such word count, so that a look-up does not depend on the distance of a value
    from its key.
    """
    generator = torch.Generator().manual_seed(step)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    vocabulary = recipe.shape.vocabulary
    words = torch.tensor([tokenizer.token_to_id(word.replace(" ", "\u0120")) for word in LINKS])
    begin, end = (tokenizer.token_to_id(token) for token in ("-", "\u010a"))
    pairs, key, gap, value = (int(draw(*bounds, 1)) for bounds in ((2, 13), (1, 3), (0, 5), (1, 3)))
    count = max(2, recipe.tokens // (pairs * (2 * key + gap + 2 * value + 5)))
    keys, values = (draw(len(SPECIAL), vocabulary, count, pairs, n) for n in (key, value))
    fixed = [torch.full((count, pairs, 1), token) for token in (begin, end)]
    between, queried = words[draw(0, len(words), count, pairs, gap)], words[draw(0, len(words), count, pairs, 1)]
    pages = torch.cat((fixed[0], keys, between, values, fixed[1]), dim=2).flatten(1)
    order = torch.rand(count, pairs, generator=generator).argsort(1)[..., None]
    again = [part.gather(1, order.expand_as(part)) for part in (keys, values)]
    questions = torch.cat((fixed[0], again[0], queried, again[1], fixed[1]), dim=2)
    weights = torch.zeros(questions.shape)
    weights[:, :, key + 2 : key + 2 + value] = 1.0
    return torch.cat((pages, questions.flatten(1)), 1), torch.cat((torch.zeros(pages.shape), weights.flatten(1)), 1)


def loss_of(net: Net, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the cross-entropies of the next token, in nats."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=net.coarse):
        hidden = net(ids[:, :-1])
    mask = weights[:, 1:] > 0
    losses = F.cross_entropy(net.head(hidden[mask]), ids[:, 1:][mask], reduction="none")
    return (losses * weights[:, 1:][mask]).sum()


def add_gradients(net: Net, ids: torch.Tensor, weights: torch.Tensor) -> float:
    """Set the gradients of a batch and return its mean loss.

    Of several processes each takes its share of the rows; then they add up their gradients, so that all of them go on
    with the same weights. On few cores that others use too, this loses less time than threads, which wait for each
    other at every product.
    """
    rank, processes = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    net.zero_grad(set_to_none=True)
    share = weights[rank::processes]
    loss = torch.zeros(1, device=ids.device)
    if (share[:, 1:] > 0).any():
        mean = loss_of(net, ids[rank::processes], share) / weights[:, 1:].sum()
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


def save(path: Path, state: object) -> None:
    """Write a new file and rename it, so that an interruption leaves the last checkpoint whole."""
    beside = path.with_suffix(".part")
    torch.save(state, beside)
    beside.replace(path)


def train(
    recipe: Recipe,
    folder: Path,
    device: str = "cpu",
    every: int = 40,
    stop: int | None = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> Net:
    """Train to the end (or to step `stop`), resuming from a checkpoint in `folder` if there is one.

    Without a checkpoint the net starts from `weights`, or from nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{recipe.name}.pt"
    torch.manual_seed(recipe.seed)
    tokenizer = load_tokenizer(HERE / "tokenizer.json")
    net = Net(recipe.shape)
    if weights is None:
        seed_copy_heads(net)
    else:
        net.load_state_dict(weights)
    print(prepare(net, device), flush=True)
    optimizers = optimizers_of(net, recipe)
    step = 0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step = state["step"]
    began, tokens, mean = time.monotonic(), 0, 0.0
    last = min(recipe.steps, stop or recipe.steps)
    for batch in stream(recipe, step, tokenizer):
        if step >= last:
            break
        practice = practises(step, recipe)
        if practice and not sharpens(step, recipe) and step // 2 % 2:  # every other time
            ids, counts = random_lookups(recipe, step, tokenizer)
        else:
            ids, counts = random_copying(recipe, step) if practice else batch
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak"] * schedule(step, recipe)
        loss = add_gradients(net, ids.to(device), counts.to(device))
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        tokens += ids.numel()
        mean += (loss - mean) / min(step, 50)
        if distributed.is_initialized() and distributed.get_rank():
            continue  # the first process reports and saves
        if step % 50 == 0:
            rate = tokens / (time.monotonic() - began)
            print(f"{recipe.name} step {step}/{recipe.steps} loss {mean:.4f} {rate:.0f} tokens/s", flush=True)
        if step % every == 0 or step == last:
            save(
                path,
                {
                    "net": net.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "step": step,
                },
            )
            torch.save(net.state_dict(), folder / f"{recipe.name}-{step:05d}.pt")
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--folder", type=Path, default=HERE / "checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--stop", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(RECIPES[arguments.name], arguments.folder, arguments.device, stop=arguments.stop)


if __name__ == "__main__":
    main()
