"""A byte-level language model with T5-style relative position bias, learned temperatures and a mixture of experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BUCKETS, FURTHEST = 32, 128


def causal_bucket(distance: Tensor) -> Tensor:
    """T5's causal bucket of ``q - k`` (Raffel et al., 2020): exact up to half the buckets, then logarithmic."""
    exact = BUCKETS // 2
    near = distance.clamp(min=0)
    ratio = torch.log(near.clamp(min=1).float() / exact) / math.log(FURTHEST / exact)
    far = (exact + ratio * (BUCKETS - exact)).clamp(max=BUCKETS - 1)
    return torch.where(near < exact, near, far.to(near.dtype))


class Attention(nn.Module):
    """Causal attention; scores are divided by a learned temperature for each head, and a learned bucketed bias is added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(BUCKETS, heads))
        self.temperature = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor, mask: BlockMask | None) -> Tensor:
        """x [B, S, width] -> [B, S, width]; without a mask, plain causal math in x's dtype (the reference)."""
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score / self.temperature[h] + self.bias[causal_bucket(q - k), h]

        if mask is not None:
            y = flex_attention(query, key, value, score_mod=score_mod, block_mask=mask)
        else:
            heads = torch.arange(self.heads, device=x.device)[:, None, None]
            q, k = torch.arange(length, device=x.device)[:, None], torch.arange(length, device=x.device)
            scores = score_mod(query @ key.mT / math.sqrt(query.shape[-1]), q, heads, q, k)
            y = scores.masked_fill(q < k, -math.inf).softmax(-1) @ value
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Experts(nn.Module):
    """A feed-forward layer of experts. Each token uses its best two."""

    def __init__(self, width: int, experts: int = 4, active: int = 2) -> None:
        super().__init__()
        self.active = active
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / math.sqrt(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, width] -> [B, S, width]."""
        logits = self.router(x)
        best = logits.topk(self.active, dim=-1)
        gates = torch.zeros_like(logits).scatter(-1, best.indices, best.values.softmax(-1))
        hidden = F.gelu(torch.einsum("bsd,edf->bsef", x, self.up)) * gates[..., None]
        return torch.einsum("bsef,efd->bsd", hidden, self.down)


class Block(nn.Module):
    """Pre-norm attention and experts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.experts = Attention(width, heads), Experts(width)

    def forward(self, x: Tensor, mask: BlockMask | None) -> Tensor:
        """x [B, S, width] -> [B, S, width]."""
        x = x + self.attention(self.norm1(x), mask)
        return x + self.experts(self.norm2(x))


class LanguageModel(nn.Module):
    """A language model that takes bytes and returns the mean cross-entropy of the next byte."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, text: Tensor, mask: BlockMask | None) -> Tensor:
        """text [B, S + 1] of bytes -> 0-d loss in float32 (float64 for a float64 model)."""
        x = self.embed(text[:, :-1])
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(
            logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), text[:, 1:].flatten()
        )
