"""Muon: momentum whose matrix is orthogonalised before it is applied (Jordan et al. 2024).

Every singular value of a step is then about the rate, so no direction of a weight can grow fast: the seeded copy heads
survive the time in which Adam's many small coherent steps would cover them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic Newton-Schulz iteration


def orthogonal(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Return for each matrix the nearest one with all singular values about 1; shape (count, m, n) as given."""
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    x = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x if matrices.shape[1] <= matrices.shape[2] else x.mT


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the blocks, batched by shape; embeddings, head and norms are left to Adam."""

    def __init__(
        self, params: list[Tensor], rate: float, momentum: float = 0.95, decay: float = 0.1, coarse: bool = False
    ) -> None:
        """`coarse`: orthogonalise in bfloat16, which is good enough, where it is faster."""
        self.dtype = torch.bfloat16 if coarse else torch.float32
        shapes = {weight.shape for weight in params}
        groups = [{"params": [weight for weight in params if weight.shape == shape]} for shape in sorted(shapes)]
        super().__init__(groups, {"lr": rate, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, _: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = group["params"]
            gradients = torch.stack([weight.grad for weight in weights])
            mean = self.state[weights[0]].setdefault("mean", torch.zeros_like(gradients))  # momentum of the whole group
            mean.lerp_(gradients, 1 - group["momentum"])
            steps = orthogonal(gradients.lerp_(mean, group["momentum"]).to(self.dtype)).float()
            scale = max(1.0, weights[0].shape[0] / weights[0].shape[1]) ** 0.5
            for weight, change in zip(weights, steps, strict=True):
                weight.mul_(1 - group["lr"] * group["decay"]).add_(change, alpha=-group["lr"] * scale)
