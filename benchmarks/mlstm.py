"""mLSTM with its headwise norm: the op, the same recognised in plain PyTorch, stock's compile of that, and mlstm-kernels.

python -m benchmarks.mlstm                    # every case; writes results/mlstm.json
python -m benchmarks.mlstm --shape 4096x128   # one shape

The kernels of mlstm-kernels (where that package is installed; each is followed by ``F.layer_norm``) are first tried in a
process of their own, because some make Triton's compiler abort.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inductor_ext.mlstm.api import mlstm

from .runner import Case, gradfuse, run_suite, stock

HEADS, EPS = 8, 1e-6
#: (tokens of a sequence, head width); batches of 4096 tokens, or one sequence.
SHAPES = [(n, 128) for n in (512, 2048, 4096, 8192, 16384)] + [(4096, 64), (4096, 256)]
#: Beyond this the plain form's S x S tensors are not tried.
LONGEST_PLAIN = 8192
#: kernel of mlstm-kernels -> chunk sizes
PEERS = {
    "parallel--triton_limit_headdim": (None,),
    "chunkwise--triton_limit_chunk": (64,),
    "chunkwise--triton_xl_chunk": (128, 256),
}


def norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(hidden, hidden.shape[-1:], eps=EPS) * (1 + weight[:, None])


def op(query: Tensor, key: Tensor, value: Tensor, input_gate: Tensor, forget_gate: Tensor, weight: Tensor) -> Tensor:
    return mlstm(query, key, value, input_gate, forget_gate, norm_weight=weight, eps=EPS, norm_eps=EPS)


def plain(query: Tensor, key: Tensor, value: Tensor, input_gate: Tensor, forget_gate: Tensor, weight: Tensor) -> Tensor:
    """The formula in ordinary ops."""
    length = query.shape[2]
    decay = F.logsigmoid(forget_gate.float()).cumsum(-1)
    exponents = decay[..., :, None] - decay[..., None, :] + input_gate[..., None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    exponents = exponents.masked_fill(~causal, float("-inf"))
    row_max = exponents.amax(-1, keepdim=True)
    combined = (query @ key.mT * query.shape[-1] ** -0.5) * torch.exp(exponents - row_max)
    normaliser = torch.maximum(combined.sum(-1, keepdim=True).abs(), torch.exp(-row_max)) + EPS
    return norm((combined / normaliser).to(value.dtype) @ value, weight)


def reference(*inputs: Tensor) -> list[Tensor]:
    """The op's eager code in float64, which the tests hold to 1e-11 of autograd; memory linear in the length."""
    *leaves, grad = (x.detach().double() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    y = op(*leaves)
    return [y, *torch.autograd.grad(y, leaves, grad)]


def kernel_of(name: str, chunk: int | None) -> Callable[..., Tensor]:
    from mlstm_kernels.torch import get_mlstm_kernel

    kernel = get_mlstm_kernel(name)
    sizes = {} if chunk is None else {"chunk_size": chunk}

    def run(query: Tensor, key: Tensor, value: Tensor, input_gate: Tensor, forget_gate: Tensor, weight: Tensor) -> Tensor:
        operands = dict(q=query, k=key, v=value, i=input_gate, f=forget_gate, eps=EPS, autocast_kernel_dtype=query.dtype)
        return norm(kernel(**operands, **sizes), weight)

    return run


def _try(name: str, chunk: int | None, width: int) -> str | None:
    """Why a forward and a backward of the kernel in another process fail, None if they do not."""
    command = [sys.executable, "-m", "benchmarks.mlstm", "--try", name, str(chunk or 0), str(width)]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
    return f"ends its process with {done.returncode}: {lines[-1][-160:]}"


@functools.cache
def failures() -> dict[tuple[str, int | None, int], str | None]:
    """The outcome of every peer's trial at every width, all at once."""
    trials = [(n, c, w) for n, chunks in PEERS.items() for c in chunks for w in sorted({w for _, w in SHAPES})]
    with ThreadPoolExecutor(len(trials)) as pool:
        return dict(zip(trials, pool.map(lambda trial: _try(*trial), trials), strict=True))


def tried(name: str, chunk: int | None, width: int, _: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, unless its trial failed: then RuntimeError says how."""
    failure = failures()[name, chunk, width]
    if failure is not None:
        raise RuntimeError(failure)
    return kernel_of(name, chunk)


def tensors(length: int, width: int) -> list[Tensor]:
    batch = max(1, 4096 // length)
    shapes = [(batch, HEADS, length, width)] * 3 + [(batch, HEADS, length)] * 2 + [(HEADS, width)]
    drawn = [torch.randn(s, device="cuda") for s in shapes]
    drawn[4] += 3
    drawn[5] *= 0.1
    return [x.bfloat16().requires_grad_() for x in drawn]


def cases(only: list[str], compile_only: bool) -> Iterator[Case]:
    for length, width in SHAPES:
        if only and f"{length}x{width}" not in only:
            continue
        peers: dict[str, Any] = {"gradfuse": gradfuse}
        if length <= LONGEST_PLAIN:
            peers["gradfuse, plain form"] = lambda _: gradfuse(plain)
            peers["stock, plain form"] = lambda _: stock(plain)
        for name, chunks in () if compile_only else PEERS.items():
            for chunk in chunks:
                label = name.split("--")[1] + (f" {chunk}" if chunk else "")
                peers[label] = partial(tried, name, chunk, width)
        parameters = {"length": length, "batch": max(1, 4096 // length), "heads": HEADS, "width": width}
        yield Case(f"S={length} D={width}", parameters, tensors(length, width), op, reference, peers, kernels=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", default=[], help="length x head width, as 4096x128")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--try", dest="one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.one:
        name, *numbers = arguments.one
        chunk, width = (int(n) for n in numbers)
        kernel_of(name, chunk or None)(*tensors(4096, width)).sum().backward()
        torch.cuda.synchronize()
        print(json.dumps("fine"))
        return
    run_suite(
        "mlstm", cases(arguments.shape, arguments.compile_only), compile_only=arguments.compile_only, out=arguments.out
    )


if __name__ == "__main__":
    main()
