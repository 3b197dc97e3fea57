"""The network: a llama decoder with the arithmetic of llama.cpp (RMSNorm, interleaved RoPE, SwiGLU)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.recipe import Shape

ROPE_BASE = 10_000.0
EPSILON = 1e-5
WRITTEN_OUT = 400  # tokens a row; longer rows use the fused kernel, which needs no memory for their squares


def rope_table(shape: Shape) -> Tensor:
    """Return cosines and sines of the angles, shape (context, head_size / 2)."""
    rates = ROPE_BASE ** (-torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size)
    return torch.outer(torch.arange(shape.context, dtype=torch.float32), rates)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbours (llama.cpp's NORM type); x is (batch, heads, tokens, head_size)."""
    pairs = x.unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention; all tensors are (batch, heads, tokens, head_size).

    Written out for short rows: on a processor the fused kernel's backward pass takes three to six times as long there.
    """
    tokens = q.shape[2]
    if tokens > WRITTEN_OUT:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


class Block(nn.Module):
    """Attention, then SwiGLU, each after an RMSNorm and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, f = shape.width, shape.feed_forward
        self.heads = shape.heads
        self.attn_norm, self.ffn_norm = nn.RMSNorm(d, EPSILON), nn.RMSNorm(d, EPSILON)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(d, f, bias=False),
            nn.Linear(d, f, bias=False),
            nn.Linear(f, d, bias=False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attn_norm(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """Ids (batch, tokens) to hidden rows (batch, tokens, width); `head` turns rows into logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.coarse = False  # whether training computes the blocks in bfloat16
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, EPSILON)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        angles = rope_table(shape)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        width = self.shape.width
        nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(width))
        for block in self.blocks:
            for layer in (block.q, block.k, block.v, block.gate, block.up):
                nn.init.normal_(layer.weight, std=1 / math.sqrt(width))
            for layer in (block.o, block.down):
                nn.init.zeros_(layer.weight)

    def first_blocks(self, layers: int) -> Net:
        """Return a net of the first `layers` blocks, which shares all its weights with this one."""
        net = Net(replace(self.shape, layers=layers))
        net.embedding, net.norm, net.output = self.embedding, self.norm, self.output
        net.blocks = self.blocks[:layers]
        return net

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)

    def head(self, rows: Tensor) -> Tensor:
        """Return the logits of hidden rows. The head starts as the embedding and is untied: else token frequencies
        would be learned in the direction that the copy heads use."""
        return self.output(rows)


@torch.no_grad()
def seed_copy_heads(net: Net) -> None:
    """Initialise one head of layer 0 and one of layer 1 as an induction circuit, which training then need not find.

    Layer 0 attends to the previous token: a direction that all embeddings share makes queries and keys constant, and
    RoPE's fast pairs, turned by one step in the key, tell neighbours apart. It writes a projection of the previous
    token into the stream. Layer 1 attends to places whose previous token is like the current one, by RoPE's slow pairs,
    which hardly depend on distance, and copies the token there. Before any training half of 24 random tokens are copied
    right, a quarter of 100; further such heads disturb each other. The last norm doubles the logits: the copied token
    would be the likeliest, but not likely, among thousands.
    """
    shape, size = net.shape, net.shape.head_size
    width, fast = shape.width, 6  # pairs that turn by more than 0.05 a token
    common = torch.ones(width) / math.sqrt(width)
    share = 3.0 / math.sqrt(width)  # of the shared direction in an embedding of length 1
    embedding = net.embedding.weight
    embedding -= torch.outer(embedding @ common, common)
    embedding /= embedding.norm(dim=1, keepdim=True)
    net.output.weight.copy_(embedding)
    net.norm.weight.fill_(2.0)
    embedding += share * common
    seen = share * math.sqrt(width) / math.sqrt(1 + share**2)  # of the shared direction after the norm
    back, match = net.blocks[0], net.blocks[1]
    rates = rope_table(shape)[1, :fast]
    here, before = torch.zeros(size), torch.zeros(size)
    here[: 2 * fast : 2] = 1.0
    before[: 2 * fast] = torch.stack((rates.cos(), rates.sin()), dim=-1).flatten()
    sharp = 3.5 * size**0.25
    content, written, copied = (_orthonormal(width, size, common) for _ in range(3))
    back.q.weight[:size] = torch.outer(here, common) * sharp / seen
    back.k.weight[:size] = torch.outer(before, common) * sharp / seen
    back.v.weight[:size] = content
    back.o.weight[:, :size] = written.T / math.sqrt(size)
    slow = slice(size // 2, size)  # less than a hundredth of a turn in six tokens
    match.q.weight[:size], match.k.weight[:size] = 0.0, 0.0
    match.q.weight[slow] = content[slow] * 1.6 * size**0.25
    match.k.weight[slow] = written[slow] * 1.6 * size**0.25
    match.v.weight[:size] = copied
    match.o.weight[:, :size] = copied.T


def _orthonormal(width: int, rows: int, without: Tensor) -> Tensor:
    """Return random orthonormal rows, shape (rows, width), orthogonal to the direction `without`."""
    basis = torch.linalg.qr(torch.randn(width, rows))[0].T
    return basis - torch.outer(basis @ without, without)
