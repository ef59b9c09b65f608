"""Casts that training in mixed precision leaves behind: an autocast linear layer, a Llama block, a bf16 model.

python -m benchmarks.casts                    # every case; writes results/casts.json

Beside times and errors a row has, of forward and backward together: ``kernels``, those that Inductor wrote;
``cast_kernels``, those of them that only cast (and move), and ``cast_bytes``, what these read and write.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn import functional as F

import inductor_ext  # noqa: F401  (registers the backend)
from inductor_ext.core.table import progress

from .moe import reference
from .runner import RESULTS, Case, environment, gradfuse, measure, stock

WIDTH, HIDDEN, HEADS, BATCH, LENGTH = 4096, 11008, 32, 4, 2048


def linear(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return F.linear(x, weight)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotary(x: Tensor) -> Tensor:
    """x [B, H, S, D] turned by position, in fp32."""
    half = x.shape[-1] // 2
    frequency = 10000 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, -1)
    turned = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    return torch.cat(turned, -1).to(x.dtype)


def block(
    x: Tensor, norm_1: Tensor, qkv: Tensor, out: Tensor, norm_2: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """Llama's: x [B, S, D]; weights as nn.Linear has them, qkv [3 D, D], gate and up [F, D], down [D, F]."""
    q, k, v = F.linear(rms_norm(x, norm_1), qkv).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    attention = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
    x = x + F.linear(attention.transpose(1, 2).flatten(-2), out)
    normed = rms_norm(x, norm_2)
    return x + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)


def autocast_block(*arguments: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return block(*arguments)


def _tensors(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """A batch of activations, then weights scaled by their fan-in (norms: one)."""
    drawn = [torch.randn(*shapes[0], device="cuda")]
    drawn += [
        torch.randn(*s, device="cuda") / s[-1] ** 0.5 if len(s) > 1 else torch.ones(s, device="cuda") for s in shapes[1:]
    ]
    return [x.to(dtype).requires_grad_() for x in drawn]


def _block(dtype: torch.dtype) -> list[Tensor]:
    norms, square, wide = (WIDTH,), (WIDTH, WIDTH), (HIDDEN, WIDTH)
    weights = norms, (3 * WIDTH, WIDTH), square, norms, wide, wide, (WIDTH, HIDDEN)
    return _tensors((BATCH, LENGTH, WIDTH), *weights, dtype=dtype)


#: name -> (function, a maker of its inputs)
CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
    "autocast-linear": (
        linear,
        # Values that bf16 holds: what is measured is the rounding of the results.
        lambda: [
            x.detach().bfloat16().float().requires_grad_()
            for x in _tensors((BATCH * LENGTH, WIDTH), (WIDTH, WIDTH), dtype=torch.float32)
        ],
    ),
    "autocast-block": (autocast_block, partial(_block, torch.float32)),
    "bfloat16-block": (block, partial(_block, torch.bfloat16)),
}
PEERS = {"stock": stock, "gradfuse": gradfuse}

_CAST_WORDS = {
    "triton",
    "poi",
    "fused",
    "to",
    "copy",
    "convert",
    "element",
    "type",
    "t",
    "view",
    "permute",
    "transpose",
    "clone",
}


def kernels(case: Case, prepare: Callable[..., Any]) -> dict[str, Any]:
    """What Inductor's own modules say of their kernels: how many, how many only cast, and the bytes of those."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    leaves = [x for x in case.inputs if x.requires_grad]

    def step(*inputs: Tensor) -> Any:
        out = prepare(case.function)(*inputs)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    torch._dynamo.reset()
    with config.patch(benchmark_kernel=True, force_disable_caches=True):
        _, codes = run_and_get_code(step, *case.inputs)
    found: list[tuple[str, float]] = []
    for code in codes:
        written = re.findall(r"(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''", code, re.DOTALL)
        calls = re.sub(r"'''.*?'''", "", code, flags=re.DOTALL)
        for name, source in written:
            launches = len(re.findall(rf"^ +{name}\.run\(", calls, re.MULTILINE))
            gigabytes = re.search(r"'kernel_num_gb': ([\d.e-]+)", source)
            found += [(name, float(gigabytes.group(1)) * 1e9 if gigabytes else 0)] * launches
    casts = [b for name, b in found if {w for w in name.split("_") if w and not w.isdigit()} <= _CAST_WORDS]
    return {"kernels": len(found), "cast_kernels": len(casts), "cast_bytes": sum(casts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--out", type=Path, default=RESULTS / "casts.json")
    arguments = parser.parse_args()
    torch._functorch.config.donated_buffer = False
    rows = []
    for name in progress("casts", "case", of=arguments.case or CASES):
        torch.manual_seed(0)
        function, inputs = CASES[name]
        case = Case(name, {}, inputs(), function, reference(function), PEERS, kernels=True)
        for row in measure(case):
            rows.append({**row, **kernels(case, PEERS[row["peer"]])})
            print(json.dumps(rows[-1]), flush=True)
    arguments.out.write_text(json.dumps({"suite": "casts", "environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
