"""compute-sanitizer over the kernels of every lowering, with indices that point outside and lengths that fill no tile.

    python -m benchmarks.sanitize --out benchmarks/results/sanitizer.json

runs the program below once to fill Inductor's cache and then under memcheck, racecheck, initcheck and synccheck, on the
kernels that Triton made; ``--program`` is that program. Memory is not pooled, so that a read beyond a tensor is seen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.attention import batch_sums, dropout, gluon_forward, hoisting, pair_entries
from inductor_ext.core.table import progress

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
LENGTH = 97


def _leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def _step(function: Callable[..., Any], *leaves: Tensor, **options: Any) -> None:
    torch._dynamo.reset()
    out = torch.compile(function, backend="gradfuse", fullgraph=True, options=options or None)(*leaves)
    outs = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if x.requires_grad]
    torch.autograd.grad(outs, [x for x in leaves if x.requires_grad], [torch.ones_like(x) for x in outs], allow_unused=True)
    torch.cuda.synchronize()


def _attention() -> None:
    """Every way of reading a table and of adding up its gradient; the hostile indices are hidden by no mask."""
    far = torch.randint(-(2**31), 2**31 - 1, (LENGTH, LENGTH), device="cuda")
    mods: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Callable[..., Tensor]]]] = {
        "none": ((4,), lambda t: lambda s, b, h, q, k: s * t[h]),
        "row": ((4, LENGTH), lambda t: lambda s, b, h, q, k: s * t[h, q]),
        "column": ((4, LENGTH), lambda t: lambda s, b, h, q, k: s + t[h, k]),
        "diagonal": ((4, 2 * LENGTH), lambda t: lambda s, b, h, q, k: s + t[h, q - k + LENGTH]),
        "antidiagonal": ((4, 2 * LENGTH), lambda t: lambda s, b, h, q, k: s + t[h, q + k]),
        "pair": ((4, LENGTH, LENGTH), lambda t: lambda s, b, h, q, k: s + t[h, q, k]),
        "pair_batch": ((2, 4, LENGTH, LENGTH), lambda t: lambda s, b, h, q, k: s + t[b, h, q, k]),
        "gathered": ((512, 4), lambda t: lambda s, b, h, q, k: s + t[(far[q, k] % 512), h]),
        "out_of_range": ((4, 50), lambda t: lambda s, b, h, q, k: s + t[h, far[q, k]]),
        "score": ((4, 50), lambda t: lambda s, b, h, q, k: s + t[h, (s * 1e6).long()]),
    }
    mask = create_block_mask(lambda b, h, q, k: (q - k).abs() < 20, None, None, LENGTH, LENGTH, device="cuda")
    for name, (shape, mod) in mods.items():
        for options in ({}, {"deterministic": True}) if name not in ("score", "out_of_range", "gathered") else ({},):
            # Without a mask an index outside of a table is an error, as it is eagerly.
            for block_mask in (mask,) if name == "out_of_range" else (None, mask):
                query, key, value, table = (
                    _leaf(2, 4, LENGTH, 40),
                    _leaf(2, 2, LENGTH, 40),
                    _leaf(2, 2, LENGTH, 40),
                    _leaf(*shape),
                )

                def run(q: Tensor, k: Tensor, v: Tensor, t: Tensor, mod: Any = mod, block_mask: Any = block_mask) -> Tensor:
                    return flex_attention(q, k, v, score_mod=mod(t), block_mask=block_mask, enable_gqa=True)

                _step(run, query, key, value, table, **options)


def _models() -> None:
    """The biases of real models, which tables, blocks, sums by entry and columns serve."""
    position = torch.arange(LENGTH, device="cuda")
    segment, document, restarting = position // 20, position // 33, position % 33
    pairs = torch.randint(0, 50, (2, LENGTH, LENGTH), device="cuda")
    mods: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Callable[..., Tensor]]]] = {
        "segments": ((4, 5, 5), lambda t: lambda s, b, h, q, k: s + t[h, segment[q], segment[k]]),
        "packed": ((4, 65), lambda t: lambda s, b, h, q, k: s + t[h, restarting[k] - restarting[q] + 32]),
        "clamped": ((2, 4, LENGTH, 16), lambda t: lambda s, b, h, q, k: s + t[b, h, q, (q - k).clamp(-8, 7) + 8]),
        "shift": ((2, 4, LENGTH, 2 * LENGTH), lambda t: lambda s, b, h, q, k: s + t[b, h, q, q - k + LENGTH]),
        "image": ((2, 4, LENGTH, 16), lambda t: lambda s, b, h, q, k: s + t[b, h, q, k // 16] + t[b, h, q, k % 16]),
        "table of pairs": ((50, 4), lambda t: lambda s, b, h, q, k: s + t[pairs[b, q, k], h]),
        "table of many pairs": ((200, 4), lambda t: lambda s, b, h, q, k: s + t[pairs[b, q, k] - 25, h]),
        "columns": ((2, 4, LENGTH, 16), lambda t: lambda s, b, h, q, k: s + (t[b, h, q] * t[b, h, k]).sum(-1)),
    }
    documents = create_block_mask(lambda b, h, q, k: document[q] == document[k], None, None, LENGTH, LENGTH, device="cuda")
    # As for longer sequences, whose lookups by query and key stay in the kernel.
    with mock.patch.object(hoisting, "LARGEST_PAIR_TABLE", 0), mock.patch.object(pair_entries, "FEWEST_SCORES", 0):
        for name, (shape, mod) in mods.items():
            block_mask = documents if name == "packed" else None

            def run(q: Tensor, k: Tensor, v: Tensor, t: Tensor, mod: Any = mod, block_mask: Any = block_mask) -> Tensor:
                return flex_attention(q, k, v, score_mod=mod(t), block_mask=block_mask, kernel_options=dropout(0.1))

            _step(run, *(_leaf(2, 4, LENGTH, 32) for _ in range(3)), _leaf(*shape))


def _hopper() -> None:
    """The forward in Gluon, the backward in one pass with a late dQ, and sums over the batch, which serve long sequences."""
    length = 3 * LENGTH
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cuda")
    mods: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Callable[..., Tensor] | None]]] = {
        "none": ((4,), lambda t: None),
        "row": ((4, length), lambda t: lambda s, b, h, q, k: s * t[h, q]),
        "pair": ((4, length, length), lambda t: lambda s, b, h, q, k: s + t[h, q, k]),
    }
    with mock.patch.object(gluon_forward, "SHORTEST", 1), mock.patch.object(batch_sums, "PROGRAMS", 0):
        for dim in (64, 128):
            for shape, mod in mods.values():
                for mask in (None, causal):

                    def run(q: Tensor, k: Tensor, v: Tensor, t: Tensor, mod: Any = mod, mask: Any = mask) -> Tensor:
                        return flex_attention(q, k, v, score_mod=mod(t), block_mask=mask, enable_gqa=True)

                    _step(run, _leaf(2, 4, length, dim), *(_leaf(2, 2, length, dim) for _ in range(2)), _leaf(*shape))


def _gathers() -> None:
    key = torch.randn(333, device="cuda")
    hot = torch.randint(0, 7, (4096,), device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        _step(lambda x: x[key.argsort() // 3], _leaf(111, 65, dtype=dtype))
        _step(lambda x: x.new_zeros(111, 65).index_add(0, key.argsort() // 3, x), _leaf(333, 65, dtype=dtype))
        _step(lambda x: x[key.argsort()], _leaf(333, 65, dtype=dtype))
        _step(lambda x: x[hot], _leaf(64, 1000, dtype=dtype))
        _step(
            lambda w: torch.nn.functional.embedding(hot, w, padding_idx=3), _leaf(64, 1000, dtype=dtype), deterministic=True
        )
        # Empty experts, and a tensor larger than the L2 cache, whose gather runs in the order of its rows.
        _step(lambda x: x[key[:0].long()], _leaf(64, 100, dtype=dtype))
    order = torch.randn(4 * 20_000, device="cuda")
    _step(lambda x: x[order.argsort() // 4] * 2, _leaf(20_000, 2048))


def _scans() -> None:
    scan = torch._higher_order_ops.associative_scan

    def gated(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    def product(a: Any, b: Any) -> Any:
        return tuple(a[2 * i] * b[j] + a[2 * i + 1] * b[2 + j] for i in range(2) for j in range(2))

    for dtype in (torch.float32, torch.bfloat16):
        for reverse in (False, True):

            def both(*xs: Tensor, combine: Any = gated, reverse: bool = reverse) -> Any:
                return scan(combine, xs, 1, reverse=reverse, combine_mode="pointwise")

            _step(both, *(_leaf(2, LENGTH, 515, dtype=dtype) for _ in range(2)))
            _step(lambda *xs: both(*xs, combine=product), *(_leaf(2, LENGTH, 515, dtype=dtype) for _ in range(4)))
            _step(lambda x: scan(torch.logaddexp, x, 1, combine_mode="pointwise"), _leaf(2, LENGTH, 515, dtype=dtype))


def _mlstm() -> None:
    from inductor_ext.mlstm.api import mlstm

    for width in (32, 80, 128):
        heads = [_leaf(2, 3, LENGTH, width) for _ in range(3)]
        gates = [_leaf(2, 3, LENGTH) for _ in range(2)]
        _step(lambda q, k, v, i, f: mlstm(q, k, v, i, f), *heads, *gates)
    state = [_leaf(2, 3, *size, dtype=torch.float32) for size in ((64, 64), (64,), ())]
    heads = [_leaf(2, 3, LENGTH, 64) for _ in range(3)]

    def with_states(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *first: Tensor) -> Any:
        y, (matrix, vector, maximum) = mlstm(q, k, v, i, f, initial_state=first, return_final_state=True)
        return y, matrix, vector, maximum

    _step(with_states, *heads, *gates, *state)


def _few() -> None:
    """One small call of an attention, a gather, a scan and an mLSTM: as much as initcheck can watch."""
    from inductor_ext.mlstm.api import mlstm

    order = torch.randn(96, device="cuda").argsort()
    _step(
        lambda q, k, v, t: flex_attention(q, k, v, lambda s, b, h, i, j: s + t[h, j]),
        *[_leaf(1, 1, 64, 32)] * 3,
        _leaf(1, 64),
    )
    _step(lambda x: x[order // 3], _leaf(32, 64))
    scan = torch._higher_order_ops.associative_scan
    _step(lambda x: scan(torch.logaddexp, x, 0, combine_mode="pointwise"), _leaf(64, 64))
    _step(lambda q, i: mlstm(q, q, q, i, i), _leaf(1, 1, 64, 32), _leaf(1, 1, 64))


def _partitions() -> None:
    """No kernel of ours: what racecheck reports here is due to Triton's warp_specialize, which the forward in Gluon uses."""
    from .prototypes.partitions import LENGTH, fill

    positions = torch.arange(LENGTH, device="cuda", dtype=torch.int32)
    assert fill(3).equal((2 * positions + positions.sum()).to(torch.int32).expand(3, LENGTH))


PROGRAM = {"few": _few, "attention": _attention, "models": _models, "hopper": _hopper, "gathers": _gathers}
PROGRAM |= {"scans": _scans, "mlstm": _mlstm, "partitions": _partitions}


def _under(tool: str, part: str, environment: dict[str, str], limit: int) -> dict[str, Any]:
    # initcheck must see every kernel: what a kernel writes that it does not watch counts as never written.
    watched = [] if tool == "initcheck" else ["--kernel-regex", "kns=triton"]
    command = ["compute-sanitizer", "--tool", tool, *watched, "--print-limit", "20"]
    command += [sys.executable, "-m", "benchmarks.sanitize", "--program", part]
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"tool": tool, "part": part, "summary": f"not ended after {limit} s", "errors": None}
    text = run.stdout + run.stderr
    summaries = re.findall(r"=+ (ERROR SUMMARY: .*|RACECHECK SUMMARY: .*)", text)
    numbers = [int(n) for line in summaries for n in re.findall(r"(\d+) (?:errors?|hazards? displayed)", line)]
    failed = "done" not in run.stdout
    result = {"tool": tool, "part": part, "summary": summaries[-1] if summaries else "none", "errors": sum(numbers[:1])}
    if failed or not summaries or result["errors"]:
        result |= {"ended": not failed, "output": text[-3000:]}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=PROGRAM)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="all of them without this")
    parser.add_argument("--part", action="append", choices=PROGRAM, help="all of them without this")
    parser.add_argument("--out")
    parser.add_argument("--limit", type=int, default=150, help="seconds a tool and part")
    arguments = parser.parse_args()
    if arguments.program:
        PROGRAM[arguments.program]()
        print("done")
        return 0
    from .runner import environment

    cache = tempfile.mkdtemp()
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    parts = arguments.part or list(PROGRAM)
    warm = [subprocess.Popen([sys.executable, "-m", "benchmarks.sanitize", "--program", p], env=variables) for p in parts]
    if any(process.wait() for process in warm):
        return 1
    runs = [(tool, part) for tool in arguments.tool or TOOLS for part in parts if (tool == "initcheck") == (part == "few")]
    from concurrent.futures import ThreadPoolExecutor

    gpus = torch.cuda.device_count()

    def one(number: int) -> dict[str, Any]:
        mine = {"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus > 1 else {}
        return _under(*runs[number], {**variables, **mine}, arguments.limit)

    with ThreadPoolExecutor(6 * gpus) as pool:
        rows = list(progress("compute-sanitizer", "run", of=pool.map(one, range(len(runs))), total=len(runs)))
    for row in rows:
        print(row["tool"], row["part"], row["summary"], row.get("output", "")[:1500])
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump({"environment": environment(), "rows": rows}, file, indent=1)
    return int(any(row["errors"] != 0 for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
