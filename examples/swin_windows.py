"""Swin's attention in windows: a learned table of two-dimensional offsets, read as ``table[index]``, is added to the scores.

Each patch must reproduce its left neighbour, and only the table says which patch that is. The table's gradient gathers 256
pairs of patches in 49 rows; with ``deterministic`` it is the same bit for bit every time, on a GPU too. At the end it is
compared with float64 eager.

    python examples/swin_windows.py
"""

import copy

import torch
from torch import Tensor, nn

SIDE, HEADS, WIDTH, WINDOWS = 4, 2, 32, 64


class WindowAttention(nn.Module):
    """Attention among the SIDE x SIDE patches of each window."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * SIDE - 1) ** 2, HEADS))
        place = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
        offset = place[:, None] - place[None, :] + SIDE - 1
        self.register_buffer("relative_position_index", offset[..., 0] * (2 * SIDE - 1) + offset[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        """The mean squared error of copying the left neighbour, for windows x [W, SIDE * SIDE, WIDTH]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        bias = bias.view(SIDE * SIDE, SIDE * SIDE, HEADS).permute(2, 0, 1)
        scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        copied, patches = (t.unflatten(1, (SIDE, SIDE)) for t in (y, x))
        return (copied[:, :, 1:] - patches[:, :, :-1]).square().mean()


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = WindowAttention().to(device)
compiled = torch.compile(model, backend="gradfuse", options={"deterministic": True})
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(100):
    x = torch.randn(WINDOWS, SIDE * SIDE, WIDTH, device=device)
    loss = compiled(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

table, exact = model.relative_position_bias_table, copy.deepcopy(model).double()
first, again = (torch.autograd.grad(compiled(x), table)[0] for _ in range(2))
(want,) = torch.autograd.grad(exact(x.double()), exact.relative_position_bias_table)
error = float((first - want).norm() / want.norm())
assert loss < 0.1 and torch.equal(first, again) and error < 1e-4
print(
    f"swin_windows: loss 1.00 (guessing) -> {loss:.3f}; the table's gradient is reproducible, its relative error {error:.1e}"
)
