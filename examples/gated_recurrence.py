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
device = "cuda" if torch.cuda.is_available() else "cpu"


def combine(earlier: tuple[Tensor, Tensor], later: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two steps ``h -> a h + b`` as one."""
    return later[0] * earlier[0], later[0] * earlier[1] + later[1]


class Memory(nn.Module):
    """Every token decides how much of each channel is kept and what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.add = nn.Embedding(2 * VOCABULARY, WIDTH), nn.Embedding(2 * VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, loop: bool = False) -> Tensor:
        """The cross-entropy of naming the first of the tokens [B, S] at the end; ``loop``: step by step."""
        a, b = torch.sigmoid(self.gate(tokens) + 2), self.add(tokens)
        if loop:
            h = b[:, 0]
            for t in range(1, LENGTH):
                h = a[:, t] * h + b[:, t]
        else:
            h = associative_scan(combine, (a, b), 1, combine_mode="pointwise" if a.is_cuda else "generic")[1][:, -1]
        return nn.functional.cross_entropy(self.head(h), tokens[:, 0])


torch.manual_seed(0)
model = Memory().to(device)
compiled, exact = torch.compile(model, backend="gradfuse"), copy.deepcopy(model).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for step in range(100):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)
    tokens[:, 1:] += VOCABULARY  # the others
    loss = compiled(tokens)
    optimizer.zero_grad()
    loss.backward()
    if step == 0:
        exact(tokens, loop=True).backward()
        error = float((model.gate.weight.grad - exact.gate.weight.grad).norm() / exact.gate.weight.grad.norm())
    optimizer.step()
assert loss < 0.5 and error < 1e-5
print(f"gated_recurrence: loss 2.08 (guessing) -> {loss:.3f}; relative error of the gates' gradient {error:.1e}")
