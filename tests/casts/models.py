"""Small models, written as people write them, whose dtypes leave casts in their graphs."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 32


class Block(nn.Module):
    """A transformer block of a norm, attention, a second norm and a gated MLP."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.norm_1, self.norm_2 = norm(WIDTH), norm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).float().softmax(-1).to(v.dtype)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.silu(self.up(self.norm_2(x))))


class RMSNorm(nn.Module):
    """Computes in fp32 and returns the dtype of its input, as the norm of Llama does."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Upcasting(nn.Module):
    """Computes in bf16, except for RMSNorm, the softmax of attention, LayerNorm and the cross entropy, which are in fp32."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.Sequential(Block(RMSNorm), Block())

    def forward(self, ids):
        hidden = self.blocks(self.embedding(ids))
        logits = F.linear(hidden, self.embedding.weight).float()
        return F.cross_entropy(logits.view(-1, 50), ids.view(-1))


def cast_after_construction(module):
    """Replace every parameter by its bf16 version, as a loader does."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return module


class MasterWeights(nn.Module):
    """fp32 weights that are cast by hand where they are used. Heads are permuted between the cast and the product."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.heads = nn.Parameter(torch.randn(4, WIDTH // 4, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        x = x @ self.weight.to(x.dtype).t()
        heads = self.heads.to(x.dtype).permute(0, 2, 1)
        return torch.einsum("bsw,hwd->bshd", x, heads).float().reshape(*x.shape).to(x.dtype)
