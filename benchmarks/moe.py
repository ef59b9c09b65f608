"""Gathers of mixture-of-experts routing and embeddings, forward and backward: eager, stock Inductor and gradfuse.

python -m benchmarks.moe                      # every case; writes results/moe.json
python -m benchmarks.moe --case permute-16384x8x2048 --compile-only   # fill the compile cache, in parallel with others
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import inductor_ext  # noqa: F401  (registers the backend)

from .runner import Case, deterministic, gradfuse, run_suite, stock


def permute(topk: int, x: Tensor, chosen: Tensor) -> Tensor:
    """Tokens [S, H] in the order of their experts [S * topk, H]; ``chosen`` [S * topk] are the experts."""
    return x[chosen.argsort(stable=True) // topk]


def combine(topk: int, y: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Experts' outputs [S * topk, H], weighted, added up to tokens [S, H]."""
    zeros = torch.zeros(y.shape[0] // topk, y.shape[1], dtype=y.dtype, device=y.device)
    return zeros.index_add(0, chosen.argsort(stable=True) // topk, y * weight[:, None])


def layer(topk: int, x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A whole layer: tokens [S, H], router [E, H], experts gate and up [E, H, F] and down [E, F, H]."""
    weight, chosen = (x @ router.T).softmax(-1).topk(topk, -1)
    experts, order = chosen.view(-1).sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(1, len(router) + 1, device=x.device)).to(torch.int32)
    rows = x[order // topk]
    hidden = torch.nn.functional.silu(torch._grouped_mm(rows, gate, ends)) * torch._grouped_mm(rows, up, ends)
    outputs = torch._grouped_mm(hidden, down, ends) * weight.view(-1)[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order // topk, outputs)


def exact_layer(topk: int, x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same, expert by expert, in the dtype of its operands."""
    # The choice is made as the layer under test makes it: a tie broken otherwise is not an error.
    chosen = (x.bfloat16() @ router.bfloat16().T).softmax(-1).topk(topk, -1).indices
    weight = (x @ router.T).softmax(-1).gather(1, chosen)
    out = torch.zeros_like(x)
    for e in range(len(router)):
        token, place = torch.where(chosen == e)
        rows = x[token]
        y = (torch.nn.functional.silu(rows @ gate[e]) * (rows @ up[e])) @ down[e]
        out = out.index_add(0, token, y * weight[token, place].unsqueeze(1))
    return out


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    return table[ids]


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.embedding(ids, table)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def _ids(rows: int, count: int) -> Tensor:
    return torch.randint(0, rows, (count,), device="cuda")


def _permute(tokens: int, topk: int, width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Callable, list[Tensor], int]:
    x = _random(tokens, width, dtype=dtype)
    return partial(permute, topk), [x, _ids(64, tokens * topk)], tokens * (topk + 1) * width * dtype.itemsize


def _combine(tokens: int, topk: int, width: int) -> tuple[Callable, list[Tensor], int]:
    y, weight = _random(tokens * topk, width), _random(tokens * topk)
    # Backward: the gradient of the output and y read, dy written.
    return partial(combine, topk), [y, weight, _ids(64, tokens * topk)], tokens * (2 * topk + 1) * width * 2


def _lookup(function: Callable, rows: int, count: int, width: int) -> tuple[Callable, list[Tensor], int]:
    return function, [_random(rows, width), _ids(rows, count)], (count + rows) * width * 2


def _layer(tokens: int, width: int, experts: int, topk: int, hidden: int) -> tuple[Callable, list[Tensor], int]:
    shapes = (tokens, width), (experts, width), (experts, width, hidden), (experts, width, hidden), (experts, hidden, width)
    scales = (1, width**0.5, width**0.5, width**0.5, hidden**0.5)
    inputs = [torch.randn(*shape, device="cuda") / scale for shape, scale in zip(shapes, scales, strict=True)]
    # Bytes are not what bounds it.
    return partial(layer, topk), [x.bfloat16().requires_grad_() for x in inputs], 0


#: name -> a maker of (function, inputs, bytes that the backward must move)
CASES: dict[str, Callable[[], tuple[Callable, list[Tensor], int]]] = {
    "permute-16384x8x2048": lambda: _permute(16384, 8, 2048),
    "permute-32768x2x4096": lambda: _permute(32768, 2, 4096),
    "permute-8192x4x7168": lambda: _permute(8192, 4, 7168),
    "permute-16384x8x2048-fp32": lambda: _permute(16384, 8, 2048, torch.float32),
    "combine-16384x8x2048": lambda: _combine(16384, 8, 2048),
    "lookup-64-rows": lambda: _lookup(lookup, 64, 65536, 1024),
    "lookup-50257-rows": lambda: _lookup(lookup, 50257, 65536, 1024),
    "embedding-50257-rows": lambda: _lookup(embedding, 50257, 65536, 1024),
    "layer-16384x2048-64x8": lambda: _layer(16384, 2048, 64, 8, 1024),
}


def reference(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Output and gradients in float64."""
    exact_function = partial(exact_layer, *function.args) if getattr(function, "func", None) is layer else function

    def run(*arguments: Tensor) -> list[Tensor]:
        *inputs, grad = arguments
        exact = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
        out = exact_function(*exact)
        return [out.detach(), *torch.autograd.grad(out, [x for x in exact if x.requires_grad], grad.double())]

    return run


def make_case(name: str) -> Case:
    torch.manual_seed(0)
    function, inputs, moved = CASES[name]()
    peers = {"eager": lambda f: f, "stock": stock, "gradfuse": gradfuse, "gradfuse-deterministic": deterministic}
    return Case(name, {"backward_bytes": moved}, inputs, function, reference(function), peers, kernels=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cases = (make_case(name) for name in arguments.case or CASES)
    run_suite("moe", cases, compile_only=arguments.compile_only, out=arguments.out)


if __name__ == "__main__":
    main()
