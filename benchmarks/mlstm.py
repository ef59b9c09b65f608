"""mLSTM with its headwise norm: the op, the same recognised in plain PyTorch, stock's compile of that, and mlstm-kernels.

python -m benchmarks.mlstm                    # every case; writes results/mlstm.json
python -m benchmarks.mlstm --length 4096      # one length

The kernels of mlstm-kernels (where that package is installed; each is followed by ``F.layer_norm``) are first tried in a
process of their own, because some make Triton's compiler abort.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inductor_ext.ops.mlstm import mlstm

from .runner import Case, gradfuse, run_suite, stock

HEADS, EPS = 8, 1e-6
#: (tokens of a sequence, head width); batches of 4096 tokens, or one sequence.
SHAPES = [(n, 128) for n in (512, 1024, 2048, 4096, 8192, 16384)] + [(4096, 64), (4096, 256)]
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
    from mlstm_kernels.torch.kernel_wrappers import get_mlstm_kernel

    kernel = get_mlstm_kernel(name)
    sizes = {} if chunk is None else {"chunk_size": chunk}

    def run(query: Tensor, key: Tensor, value: Tensor, input_gate: Tensor, forget_gate: Tensor, weight: Tensor) -> Tensor:
        operands = dict(q=query, k=key, v=value, i=input_gate, f=forget_gate, eps=EPS, autocast_kernel_dtype=query.dtype)
        return norm(kernel(**operands, **sizes), weight)

    return run


def tried(name: str, chunk: int | None, length: int, width: int, _: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, after a forward and a backward of it in another process have gone well; RuntimeError otherwise."""
    command = [sys.executable, "-m", "benchmarks.mlstm", "--try", name, str(chunk or 0), str(length), str(width)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"ends its process with {done.returncode}: {lines[:160]}")
    return kernel_of(name, chunk)


def tensors(length: int, width: int) -> list[Tensor]:
    batch = max(1, 4096 // length)
    shapes = [(batch, HEADS, length, width)] * 3 + [(batch, HEADS, length)] * 2 + [(HEADS, width)]
    drawn = [torch.randn(s, device="cuda") for s in shapes]
    drawn[4] += 3
    drawn[5] *= 0.1
    return [x.bfloat16().requires_grad_() for x in drawn]


def cases(lengths: list[int]) -> Iterator[Case]:
    for length, width in SHAPES:
        if lengths and length not in lengths:
            continue
        peers: dict[str, Any] = {"gradfuse": gradfuse}
        if length <= LONGEST_PLAIN:
            peers["gradfuse, plain form"] = lambda _: gradfuse(plain)
            peers["stock, plain form"] = lambda _: stock(plain)
        for name, chunks in PEERS.items():
            for chunk in chunks:
                label = name.split("--")[1] + (f" {chunk}" if chunk else "")
                peers[label] = partial(tried, name, chunk, length, width)
        parameters = {"length": length, "batch": max(1, 4096 // length), "heads": HEADS, "width": width}
        yield Case(f"S={length} D={width}", parameters, tensors(length, width), op, reference, peers, kernels=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, action="append", default=[])
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--try", dest="one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.one:
        name, *numbers = arguments.one
        chunk, length, width = (int(n) for n in numbers)
        kernel_of(name, chunk or None)(*tensors(length, width)).sum().backward()
        torch.cuda.synchronize()
        print(json.dumps("fine"))
        return
    run_suite("mlstm", cases(arguments.length), compile_only=arguments.compile_only, out=arguments.out)


if __name__ == "__main__":
    main()
