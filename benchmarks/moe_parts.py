"""A layer of experts in parts: router, permutation, experts and the way back, with the bytes and the FLOPs of each.

python -m benchmarks.moe_parts                # writes results/moe_parts.json

The sizes are those of the layer in benchmarks/moe.py: 16384 tokens of width 2048, 64 experts of width 1024, 8 of them for a
token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import inductor_ext  # noqa: F401  (registers the backend)

from .moe import combine, permute
from .runner import Case, gradfuse, run_suite, stock

TOKENS, WIDTH, EXPERTS, TOP, HIDDEN = 16384, 2048, 64, 8, 1024
ROWS = TOKENS * TOP


def route(x: Tensor, router: Tensor) -> Tensor:
    """The weights of the chosen experts [S, k]."""
    return (x @ router.T).softmax(-1).topk(TOP, -1).values


def experts(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    """Rows [S * k, H] in the order of their experts, through the experts; ``ends``: where the rows of each expert end."""
    hidden = torch.nn.functional.silu(torch._grouped_mm(rows, gate, ends)) * torch._grouped_mm(rows, up, ends)
    return torch._grouped_mm(hidden, down, ends)


def _leaf(*shape: int) -> Tensor:
    return (torch.randn(*shape, device="cuda") / shape[-2] ** 0.5).bfloat16().requires_grad_()


def _chosen() -> Tensor:
    return torch.randint(0, EXPERTS, (ROWS,), device="cuda")


def _ends() -> Tensor:
    return torch.bincount(_chosen(), minlength=EXPERTS).cumsum(0).int()


#: For each part its function and its inputs, and the bytes and FLOPs of its forward and of its backward.
PARTS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]], tuple[int, int], tuple[int, int]]] = {
    "router": (
        route,
        lambda: [_leaf(TOKENS, WIDTH), _leaf(EXPERTS, WIDTH)],
        (2 * TOKENS * WIDTH, 4 * TOKENS * WIDTH),
        (2 * TOKENS * WIDTH * EXPERTS, 4 * TOKENS * WIDTH * EXPERTS),
    ),
    "permute": (
        lambda x, chosen: permute(TOP, x, chosen),
        lambda: [_leaf(TOKENS, WIDTH), _chosen()],
        (2 * (TOKENS + ROWS) * WIDTH, 2 * (TOKENS + ROWS) * WIDTH),
        (0, 0),
    ),
    "experts": (
        experts,
        lambda: [
            _leaf(ROWS, WIDTH),
            _leaf(EXPERTS, WIDTH, HIDDEN),
            _leaf(EXPERTS, WIDTH, HIDDEN),
            _leaf(EXPERTS, HIDDEN, WIDTH),
            _ends(),
        ],
        # Rows in and out, and gate, up and their product each written and read once. Twice as much in the backward.
        (4 * ROWS * WIDTH + 12 * ROWS * HIDDEN, 8 * ROWS * WIDTH + 24 * ROWS * HIDDEN),
        (6 * ROWS * WIDTH * HIDDEN, 12 * ROWS * WIDTH * HIDDEN),
    ),
    "unpermute": (
        lambda y, weight, chosen: combine(TOP, y, weight, chosen),
        lambda: [_leaf(ROWS, WIDTH), _leaf(1, ROWS)[0].detach().requires_grad_(), _chosen()],
        (2 * (TOKENS + ROWS) * WIDTH, 2 * (TOKENS + 2 * ROWS) * WIDTH),
        (0, 0),
    ),
}


def cases() -> Iterator[Case]:
    """One case for each part. There is no reference: benchmarks/moe.py has the errors."""
    for name, (function, inputs, moved, flops) in PARTS.items():
        torch.manual_seed(0)
        parameters: dict[str, Any] = {"bytes": moved, "flops": flops}
        yield Case(name, parameters, inputs(), function, peers={"stock": stock, "gradfuse": gradfuse}, kernels=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    run_suite("moe_parts", cases(), compile_only=given.compile_only, out=given.out)


if __name__ == "__main__":
    main()
