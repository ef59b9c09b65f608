"""associative_scan: the gated recurrence, itself and in log space, and products of 2 x 2 matrices, real and complex.

python -m benchmarks.scan                 # every case; writes results/scan.json
python -m benchmarks.scan --case gated-dim1

Peers: stock in both combine modes, and accelerated-scan (its scalar kernel, where the package is installed) where its layout
fits. A compiled plain loop of 4096 steps is not among them: Dynamo unrolls it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan

import inductor_ext  # noqa: F401  (registers the backend)

from .runner import Case, gradfuse, run_suite, stock

LENGTHS = (256, 1024, 4096, 16384)
#: Stock's gradient in pointwise mode takes longer than this is worth beyond it.
LONGEST_STOCK = 4096


def gated(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (a1, x1), (a2, x2) = left, right
    return a1 * a2, x1 * a2 + x2


def log_space(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``gated`` of logarithms."""
    (a1, x1), (a2, x2) = left, right
    return a1 + a2, torch.logaddexp(x1 + a2, x2)


def matrices(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (a1, b1, c1, d1), (a2, b2, c2, d2) = left, right
    return a2 * a1 + b2 * c1, a2 * b1 + b2 * d1, c2 * a1 + d2 * c1, c2 * b1 + d2 * d1


def complex_matrices(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """As ``matrices``, four real parts and then four imaginary ones: ``(A2 + i B2)(A1 + i B1)``."""
    (real1, imaginary1), (real2, imaginary2) = ((x[:4], x[4:]) for x in (left, right))
    both = [matrices(p, q) for q, p in ((real2, real1), (imaginary2, imaginary1), (real2, imaginary1), (imaginary2, real1))]
    return *(x - y for x, y in zip(*both[:2], strict=True)), *(x + y for x, y in zip(*both[2:], strict=True))


def last(combine: Callable[..., Any], dim: int, mode: str, *xs: Tensor) -> Tensor:
    """The last leaf of the scan."""
    return associative_scan(combine, xs, dim, combine_mode=mode)[-1]


def reference(combine: Callable[..., Any], dim: int, *inputs: Tensor) -> list[Tensor]:
    """torch's generic mode and autograd in float64."""
    *leaves, grad = (x.detach().double() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    y = last(combine, dim, "generic", *leaves)
    return [y, *torch.autograd.grad(y, leaves, grad)]


def accelerated(_: Callable[..., Any]) -> Callable[..., Any]:
    from accelerated_scan.scalar import scan

    return scan


def case(name: str, combine: Callable[..., Any], leaves: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Case:
    xs = [(0.6 + 0.3 * torch.rand(shape, device="cuda")) / (leaves // 2) for _ in range(leaves)]
    if combine is log_space:
        xs = [x.log() for x in xs]
    function = partial(last, combine, dim, "pointwise")
    peers: dict[str, Any] = {"gradfuse": lambda _: gradfuse(lambda *xs: function(*xs))}
    if shape[dim] <= LONGEST_STOCK:
        peers["stock"] = lambda _: stock(lambda *xs: function(*xs))
    peers["stock, generic"] = lambda _: stock(lambda *xs: last(combine, dim, "generic", *xs))
    if combine is gated and dim == len(shape) - 1:
        peers["accelerated-scan"] = accelerated
    parameters = {"shape": list(shape), "dim": dim, "leaves": leaves, "dtype": str(dtype).removeprefix("torch.")}
    inputs = [x.to(dtype).requires_grad_() for x in xs]
    return Case(name, parameters, inputs, function, partial(reference, combine, dim), peers, kernels=True)


def cases(only: list[str]) -> Iterator[Case]:
    wide, last_dim, few = (8, 4096, 512), (8, 512, 4096), (1, 16, 131072)
    rows = [
        ("gated-dim1", gated, 2, wide, 1, torch.float32),
        ("gated-dim1-bf16", gated, 2, wide, 1, torch.bfloat16),
        ("gated-dim2", gated, 2, last_dim, 2, torch.float32),
        ("gated-dim2-bf16", gated, 2, last_dim, 2, torch.bfloat16),
        ("gated-long", gated, 2, few, 2, torch.float32),
        ("log-space-dim1", log_space, 2, wide, 1, torch.float32),
        ("matrices-dim1", matrices, 4, (8, 1024, 512), 1, torch.float32),
        ("matrices-dim1-bf16", matrices, 4, (8, 1024, 512), 1, torch.bfloat16),
        ("matrices-dim2", matrices, 4, (8, 512, 1024), 2, torch.float32),
        ("complex-matrices-dim1", complex_matrices, 8, (8, 1024, 512), 1, torch.float32),
        *((f"gated-length-{n}", gated, 2, (8, n, 512), 1, torch.float32) for n in LENGTHS if n != wide[1]),
    ]
    for row in rows:
        if not only or row[0] in only:
            yield case(*row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    run_suite("scan", cases(arguments.case), compile_only=arguments.compile_only, out=arguments.out)


if __name__ == "__main__":
    main()
