"""A residual block with the matrix memory of xLSTM, ``inductor_ext.mlstm.MLSTMCell``, learns to look things up.

A sequence shows eight keys, each with a value drawn at random, then one key again, whose value must be named.

    python examples/mlstm_block.py
"""

import copy

import torch
from torch import Tensor, nn

from inductor_ext.mlstm import MLSTMCell

SYMBOLS, WIDTH, HEADS, BATCH = 8, 64, 2, 64


class Recall(nn.Module):
    """Embeddings of keys and values, a block around the cell, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(SYMBOLS + 1, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cell, self.head = MLSTMCell(WIDTH, HEADS), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, keys: Tensor, values: Tensor, wanted: Tensor) -> Tensor:
        """The cross-entropy of naming ``wanted`` [B] after the pairs of keys and values [B, S]."""
        x = self.keys(keys) + self.values(values)
        x = x + self.out(self.cell(*self.qkv(x).chunk(3, -1)))
        return nn.functional.cross_entropy(self.head(x[:, -1]), wanted)


def batch(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """All keys in random order with random values, then one of them with a blank for its value."""
    keys = torch.rand(BATCH, SYMBOLS, device=device).argsort(1)
    values, place = (torch.randint(SYMBOLS, (BATCH, n), device=device) for n in (SYMBOLS, 1))
    blank = torch.full_like(place, SYMBOLS)
    return torch.cat([keys, keys.gather(1, place)], 1), torch.cat([values, blank], 1), values.gather(1, place)[:, 0]


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Recall().to(device)
compiled = torch.compile(model, backend="gradfuse")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(150):
    data = batch(device)
    loss = compiled(*data)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

exact = copy.deepcopy(model).double()
(got,) = torch.autograd.grad(compiled(*data), model.qkv.weight)
(want,) = torch.autograd.grad(exact(*data), exact.qkv.weight)
error = float((got - want).norm() / want.norm())
assert loss < 1.0 and error < 1e-4
print(f"mlstm_block: loss 2.08 (guessing) -> {loss:.3f}; relative error of the projection's gradient {error:.1e}")
