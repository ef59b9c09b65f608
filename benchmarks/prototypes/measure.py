"""The prototypes in Gluon and Triton: errors against float64, 1,000 repeats, and times beside cuDNN and gradfuse.

python -m benchmarks.prototypes.measure               # writes results/prototypes.json
python -m benchmarks.prototypes.measure --part times --out times.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from ..runner import RESULTS, environment, gradfuse, relative_error
from . import gluon_backward, gluon_forward, triton_backward

LENGTHS = 1, 97, 1000, 4096
#: Forms of the kernels, by the head dim. The first is the default.
FORWARD = {
    64: [{}, {"late": False}, {"stages": 3}, {"consumers": 3, "stages": 3}],
    128: [{}, {"late": False}, {"block_n": 64, "stages": 3}],
}
BACKWARD = {64: [{}, {"late": True}, {"late": True, "stages": 3}, {"block_m": 128}], 128: [{}]}
#: Tiles of the backward in Triton: queries, keys and warps. With every form of triton_backward.py.
TILES = {64: [(64, 128, 8), (64, 64, 4), (32, 128, 8), (32, 64, 4)], 128: [(64, 128, 8), (32, 128, 8), (32, 64, 4)]}
FORMS = "plain", "transposed", "late", "early", "no_dq"


def operands(length: int, dim: int, dtype: torch.dtype, batch: int = 2, heads: int = 16) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    torch.manual_seed(0)
    return [torch.randn(batch, heads, length, dim, device="cuda", dtype=dtype) for _ in range(4)]


def exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients by the formula in another dtype, for one batch element at a time."""
    pieces = []
    for one in zip(q, k, v, grad, strict=True):
        *leaves, g = (x.to(dtype) for x in one)
        leaves = [x.requires_grad_() for x in leaves]
        out = (leaves[0] @ leaves[1].mT / q.shape[-1] ** 0.5).softmax(-1) @ leaves[2]
        pieces.append([out.detach(), *torch.autograd.grad(out, leaves, g)])
    return [torch.stack(x) for x in zip(*pieces, strict=True)]


def errors() -> Iterator[dict[str, Any]]:
    """The errors of output and gradients, and of the formula in fp32 that is rounded once. All must be as small as those of SDPA.

    That is cuDNN, or flash attention where cuDNN refuses (one row).
    """
    for dim in FORWARD:
        for dtype in (torch.bfloat16, torch.float16):
            for length in LENGTHS:
                case = {"dim": dim, "dtype": str(dtype)[6:], "length": length}
                yield from (case | row for row in _errors(*operands(length, dim, dtype, batch=1, heads=4)))


def _errors(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Iterator[dict[str, Any]]:
    want = exact(q, k, v, grad, torch.float64)

    def found(got: Iterable[Tensor]) -> list[float]:
        return [relative_error(g, w) for g, w in zip(got, want, strict=True)]

    yield {"peer": "formula", "error": found(x.to(q.dtype) for x in exact(q, k, v, grad, torch.float32))}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves)
    limit = found([out, *torch.autograd.grad(out, leaves, grad)])
    yield {"peer": "sdpa", "error": limit}
    out, lse = gluon_forward.forward(q, k, v)
    forms = [("gluon", gluon_backward.backward, form) for form in BACKWARD[q.shape[-1]]]
    forms += [("triton", triton_backward.backward, {"form": form, "block_m": 32}) for form in FORMS[:-1]]
    for peer, backward, form in forms:
        error = found([out, *backward(q, k, v, out, lse, grad, **form)])
        right = all(e <= 1.1 * most + 1e-6 for e, most in zip(error, limit, strict=True))
        yield {"peer": peer, "form": form, "error": error, "right": right}


def repeats(times: int = 1000) -> Iterator[dict[str, Any]]:
    """How many of the repeats differ in a bit of the output, dK or dV. (dQ is added in no fixed order.)"""
    for dim in FORWARD:
        q, k, v, grad = operands(1000, dim, torch.bfloat16)
        first, different = None, 0
        for _ in range(times):
            out, lse = gluon_forward.forward(q, k, v)
            _, dk, dv = gluon_backward.backward(q, k, v, out, lse, grad)
            first = first or (out, dk, dv)
            different += not all(torch.equal(a, b) for a, b in zip(first, (out, dk, dv), strict=True))
        yield {"dim": dim, "repeats": times, "different": different}


def times() -> Iterator[dict[str, Any]]:
    """Milliseconds of forward and backward, 2 x 16 x 4096 in bf16."""
    for dim in FORWARD:
        yield from ({"dim": dim, **row} for row in _times(dim, *operands(4096, dim, torch.bfloat16)))


def _times(dim: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Iterator[dict[str, Any]]:
    from triton.testing import do_bench

    def milliseconds(function: Callable[..., Any], *arguments: Any, **options: Any) -> float:
        return do_bench(lambda: function(*arguments, **options), warmup=50, rep=300, return_mode="median")

    def row(peer: str, name: str, function: Callable[..., Any], *arguments: Any, **form: Any) -> dict[str, Any]:
        try:
            return {"peer": peer, "form": form, name: milliseconds(function, *arguments, **form)}
        except Exception as error:
            first = str(error).strip().splitlines()[0][:200]
            return {"peer": peer, "form": form, "refused": f"{type(error).__name__}: {first}"}

    out, lse = gluon_forward.forward(q, k, v)
    for form in FORWARD[dim]:
        yield row("gluon", "forward_ms", gluon_forward.forward, q, k, v, **form)
    for form in [*BACKWARD[dim], {"add": False}]:
        yield row("gluon", "backward_ms", gluon_backward.backward, q, k, v, out, lse, grad, **form)
    for m, n, warps in TILES[dim]:
        for form in FORMS:
            options = {"form": form, "block_m": m, "block_n": n, "num_warps": warps}
            yield row("triton", "backward_ms", triton_backward.backward, q, k, v, out, lse, grad, **options)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    for peer, attend in {"cudnn": _cudnn, "gradfuse": gradfuse(flex_attention)}.items():
        result = attend(*leaves)
        backward = milliseconds(torch.autograd.grad, result, leaves, grad, retain_graph=True)
        yield {"peer": peer, "forward_ms": milliseconds(attend, *leaves), "backward_ms": backward}


def _cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def main() -> None:
    import torch._functorch.config as functorch_config

    functorch_config.donated_buffer = False
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "prototypes.json")
    parts = {part.__name__: part for part in (errors, times, repeats)}
    parser.add_argument("--part", action="append", choices=parts, help="may be given several times")
    given, rows = parser.parse_args(), []
    out = given.out
    for part in (parts[name] for name in given.part or parts):
        for row in part():
            rows.append({"part": part.__name__, **row})
            print(json.dumps(rows[-1]), flush=True)
            out.write_text(json.dumps({"suite": "prototypes", "environment": environment(), "rows": rows}, indent=1) + "\n")
    wrong = [row for row in rows if row.get("right") is False or row.get("different")]
    if wrong:
        raise SystemExit(f"{len(wrong)} rows are wrong, the first is {wrong[0]}")


if __name__ == "__main__":
    main()
