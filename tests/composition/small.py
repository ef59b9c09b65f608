"""One layer, small enough to compile in a second or two: an attention with a learned bias and a routed gather."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from .model import BATCH, LENGTH, TOLERANCE, TOPK, WIDTH, Attention, dense_copy, plain_name, relative_error

ROOT = Path(__file__).parents[2]


class Layer(nn.Module):
    """Attention on the residual stream. Then rows are gathered by ``order // TOPK`` and added back to their sources."""

    def __init__(self, kind: str = "relative") -> None:
        super().__init__()
        self.attention = Attention(kind)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        """x [B, S, WIDTH], order [TOPK * B * S], a permutation -> [B, S, WIDTH]."""
        y = x + self.attention(x)
        return routed(y.flatten(0, 1), order, self.gain).view_as(x)


def routed(rows: Tensor, order: Tensor, gain: Tensor) -> Tensor:
    """The gather and the combine of a mixture of experts, with a nonlinear function between them."""
    source = order // TOPK
    return torch.zeros_like(rows).index_add(0, source, torch.tanh(rows[source] * gain))


def make(kind: str = "relative", device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Layer:
    """The layer. It is always the same for one seed."""
    torch.manual_seed(seed)
    return Layer(kind).to(device, dtype)


def inputs(
    device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0, length: int = LENGTH
) -> tuple[Tensor, Tensor]:
    """x, which needs a gradient, and order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, length, WIDTH, generator=generator).to(device, dtype).requires_grad_()
    return x, torch.randperm(TOPK * BATCH * length, generator=generator).to(device)


def step(function: Callable[..., Tensor], layer: nn.Module, x: Tensor, order: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The output, the gradient of x and those of the parameters."""
    out = function(x, order)
    named = {"x": x, **{plain_name(n): p for n, p in layer.named_parameters() if p.requires_grad}}
    grads = torch.autograd.grad(out, list(named.values()), grad)
    return {"out": out.detach(), **dict(zip(named, grads, strict=True))}


def exact(layer: nn.Module, x: Tensor, order: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The results of ``step`` by the formula in float64."""
    reference = dense_copy(layer, torch.float64)
    return step(reference, reference, x.detach().double().requires_grad_(), order, grad.double())


def forward(layer: nn.Module, x: Tensor, order: Tensor) -> Tensor:
    """Only the output, by the formula in float64."""
    return dense_copy(layer, torch.float64)(x.detach().double(), order)


def gradient(x: Tensor) -> Tensor:
    """The gradient of the output. It is always the same for one shape."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x)


def check_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = TOLERANCE[torch.float32]) -> None:
    """Check that the relative Frobenius error of every entry is at most ``tolerance``."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    errors = {name: relative_error(got[name], want[name]) for name in want}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, wrong


def check(
    layer: nn.Module, function: Callable[..., Tensor], x: Tensor, order: Tensor, tolerance: float | None = None
) -> None:
    """Compare the output and gradients of ``function``, a compiled form of ``layer``, with float64."""
    grad = gradient(x)
    tolerance = TOLERANCE[x.dtype] if tolerance is None else tolerance
    got = step(function, layer, x, order, grad)
    want = exact(layer, x, order, grad)
    check_same(got, {name: want[name] for name in want if name in got or layer.get_parameter(name).requires_grad}, tolerance)


def copied(x: Tensor) -> Tensor:
    """A leaf tensor with the same values."""
    return copy.deepcopy(x.detach()).requires_grad_(x.requires_grad)


def run_script(source: str, *arguments: str, seconds: float, environment: dict[str, str] | None = None) -> str:
    """Return the output of a Python process, which must end without an error within ``seconds``."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
