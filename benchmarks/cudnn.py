"""The attention kernels, forward and backward, beside cuDNN where that computes the same: 2 x 16 x 4096, bf16.

python -m benchmarks.cudnn    # writes results/cudnn.json

Every case compiles in a process of its own, some at the same time, and is timed alone. Its peers take turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import inductor_ext  # noqa: F401  (registers the backend)
from inductor_ext.core.table import progress

from .flex import CASES, MASKS
from .hopper import _cudnn
from .runner import RESULTS, _kernel_time, environment

BATCH, HEADS, LENGTH = SHAPE = (2, 16, 4096)
ROUNDS, PROCESSES = 5, 7


def cases() -> Iterator[tuple[str, int, str | None]]:
    """score_mod, head dim and mask."""
    for dim in (64, 128):
        yield "none", dim, None
        yield "none", dim, "causal"
        for name in ("key", "head_scale", "relpos", "t5"):
            yield name, dim, None
    yield "pair", 64, None


def attention_of(name: str, dim: int, mask: str | None) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor]]:
    """Return query, key, value and the learned tensors of a case, and its attention as a function of the first three."""
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    tables, score_mod = CASES[name]
    learned = [torch.randn(t, **options) for t in tables(*SHAPE)]
    qkv = [torch.randn(*SHAPE, dim, **options) for _ in range(3)]
    block_mask = create_block_mask(MASKS[mask](LENGTH), None, None, LENGTH, LENGTH, "cuda") if mask else None
    return [*qkv, *learned], partial(flex_attention, score_mod=score_mod(*learned), block_mask=block_mask)


def measure(name: str, dim: int, mask: str | None) -> list[dict[str, Any]]:
    """A row for each peer: wall clock and GPU time of a forward and of a backward, in milliseconds."""
    # Without it the sizes that differ from those of the case before would be dynamic.
    torch._dynamo.reset()
    operands, attention = attention_of(name, dim, mask)
    peers: dict[str, Callable[..., torch.Tensor]] = {"gradfuse": torch.compile(attention, backend="gradfuse")}
    if name == "none":
        peers |= {"stock": torch.compile(attention), "cudnn": partial(_cudnn, causal=mask is not None)}
    steps: dict[tuple[str, str], Callable[[], Any]] = {}
    for peer, run in peers.items():
        out = run(*operands[:3])
        grad = torch.randn_like(out)
        steps[peer, "forward"] = partial(run, *operands[:3])
        steps[peer, "backward"] = partial(torch.autograd.grad, out, operands, grad, retain_graph=True)
        steps[peer, "backward"]()
    with _alone:
        times = _times(steps)
    shared = {"case": name, "dim": dim, "mask": mask}
    return [shared | {"peer": peer} | {n: t for (p, n), t in times.items() if p == peer} for peer in peers]


def _times(steps: dict[tuple[str, str], Callable[[], Any]]) -> dict[tuple[str, str], float]:
    from triton.testing import do_bench

    rounds = [
        {at: do_bench(step, warmup=25, rep=100, return_mode="median") for at, step in steps.items()} for _ in range(ROUNDS)
    ]
    found = {(peer, f"{way}_ms"): statistics.median(r[peer, way] for r in rounds) for peer, way in steps}
    return found | {(peer, f"{way}_kernels_ms"): _kernel_time(step) for (peer, way), step in steps.items()}


def _begin_process(lock: Any) -> None:
    """Remember the lock that a process holds while it measures. A backward is called many times, so no buffer is donated."""
    global _alone
    _alone = lock
    functorch_config.donated_buffer = False


def main() -> None:
    """Measure every case, and write the results anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "cudnn.json")
    given = parser.parse_args()
    spawn, rows = multiprocessing.get_context("spawn"), {}
    with ProcessPoolExecutor(PROCESSES, spawn, initializer=_begin_process, initargs=(spawn.Lock(),)) as pool:
        jobs = {pool.submit(measure, *case): i for i, case in enumerate(cases())}
        for job in progress("cudnn", "case", of=as_completed(jobs)):
            rows[jobs[job]] = job.result()
            print(json.dumps(rows[jobs[job]]), flush=True)
            in_order = [row for i in sorted(rows) for row in rows[i]]
            result = {"suite": "cudnn", "environment": environment(), "rows": in_order}
            given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
