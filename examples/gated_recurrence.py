"""A gated recurrence, ``h_t = a_t h_{t-1} + b_t``, written as an associative_scan, that learns to remember.

A token must be named after 15 others that mean nothing; the gradient, which reaches back through them all, is compared
with a plain loop's in float64. torch offers the pointwise form, for which gradfuse has kernels, on a GPU only.

    python examples/gated_recurrence.py
"""

import copy

import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan

VOCABULARY, WIDTH, LENGTH, BATCH = 8, 32, 16, 64


def combine(earlier: tuple[Tensor, Tensor], later: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two steps ``h -> a h + b`` as one."""
    return later[0] * earlier[0], later[0] * earlier[1] + later[1]


class Memory(nn.Module):
    """Every token decides how much of each channel is kept and what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.add = nn.Embedding(2 * VOCABULARY, WIDTH), nn.Embedding(2 * VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, loop: bool = False) -> Tensor:
        """The cross-entropy of naming the first of the tokens [B, S] at the end; ``loop``: step by step."""
        a, b = torch.sigmoid(self.keep(tokens) + 2), self.add(tokens)
        h = torch.zeros_like(b[:, 0])
        for t in range(LENGTH if loop else 0):
            h = a[:, t] * h + b[:, t]
        if not loop:
            h = associative_scan(combine, (a, b), 1, combine_mode="pointwise" if a.is_cuda else "generic")[1][:, -1]
        return nn.functional.cross_entropy(self.head(h), tokens[:, 0])


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Memory().to(device)
compiled = torch.compile(model, backend="gradfuse")
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for _ in range(150):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)
    tokens[:, 1:] += VOCABULARY  # the others
    loss = compiled(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

exact = copy.deepcopy(model).double()
(got,) = torch.autograd.grad(compiled(tokens), model.keep.weight)
(want,) = torch.autograd.grad(exact(tokens, loop=True), exact.keep.weight)
error = float((got - want).norm() / want.norm())
assert loss < 0.5 and error < 1e-4
print(f"gated_recurrence: loss 2.08 (guessing) -> {loss:.3f}; relative error of the gates' gradient {error:.1e}")
