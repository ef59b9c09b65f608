"""T5's relative position bias: a learned table, read at the bucket of the distance, is added to the attention scores.

The model must name the token three places back. The bias is all it knows of positions, so that the loss can fall only
where the gradient of the table is right. Stock Inductor refuses to train flex_attention on a CPU; on a GPU the backward
of this bias costs it an atomic add a score.

    python examples/t5_bias.py
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import inductor_ext

VOCABULARY, WIDTH, HEADS, LENGTH, BUCKETS, FURTHEST = 16, 64, 2, 64, 32, 128


def bucket(distance: Tensor) -> Tensor:
    """T5's bucket of ``key - query``: half of them for each sign, exact near zero and logarithmic further away."""
    half, exact = BUCKETS // 2, BUCKETS // 4
    away = distance.abs()
    far = exact + torch.log(away.clamp(min=1) / exact) / math.log(FURTHEST / exact) * (half - exact)
    return torch.where(distance > 0, half, 0) + torch.where(away < exact, away, far.int().clamp(max=half - 1))


class Model(nn.Module):
    """One attention layer between an embedding and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.zeros(BUCKETS, HEADS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy of naming, at every place of ``tokens`` [B, S], the token three places back."""
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + self.bias[bucket(j - i), h])
        logits = self.head(y.transpose(1, 2).flatten(2))
        return nn.functional.cross_entropy(logits[:, 3:].flatten(0, 1), tokens[:, :-3].flatten())


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Model().to(device)
print(inductor_ext.explain(model)(torch.randint(VOCABULARY, (16, LENGTH), device=device)))
compiled = torch.compile(model, backend="gradfuse")
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
for _ in range(100):
    loss = compiled(torch.randint(VOCABULARY, (16, LENGTH), device=device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert loss < 0.5 < math.log(VOCABULARY), "the loss of guessing is log(VOCABULARY)"
print(f"t5_bias: loss {math.log(VOCABULARY):.2f} (guessing) -> {loss:.3f}")
