"""A layer of attention and one of experts on 1, 2 and 4 GPUs, by torch.distributed as it is.

python -m benchmarks.scaling                         # every case on 1, 2 and 4 GPUs; writes results/scaling.json
python -m benchmarks.scaling --gpus 1 --gpus 2 --case attention    # prints the rows, and writes nothing
python -m benchmarks.scaling --smoke --gpus 2        # small sizes, on CPUs if there is no GPU; nothing written

``attention`` is context parallel: each rank has its part of one sequence, keys and values are gathered from all ranks, and
each rank reads T5's bias at the offset of its queries. ``experts`` is expert parallel: each rank has its part of the tokens
and of the experts, and rows travel to the rank of their expert and back. Parameters that every rank has are replicated, and
their gradients are summed by one all_reduce. A step is forward, backward and these sums. The problem has the same size for
any number of GPUs, so the ideal time on n GPUs is that of the same code on one, divided by n. (On one GPU, ``experts``
exchanges rows with itself, which a layer for one GPU would not do.) ``experts in n parts`` sends its tokens in parts, so
that the experts can compute on one part while others travel; on one GPU that only costs. All cases compile at the same time,
and then they are timed one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import inductor_ext  # noqa: F401  (registers the backend)

from .flex import t5_bucket
from .runner import RESULTS, environment, kernels

STEPS = 10
#: Inductor's options for a graph in which exchanges begin as early, and are waited for as late, as its order allows.
OVERLAP = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}


@dataclass(frozen=True)
class Sizes:
    """tokens: of all ranks. width: of a token. heads, buckets: of the attention. The others are of the experts."""

    width: int
    tokens: int = 65536
    heads: int = 16
    buckets: int = 32
    experts: int = 64
    topk: int = 8
    hidden: int = 1024
    parts: int = 1


SMOKE = Sizes(32, tokens=64, heads=2, experts=4, topk=2, hidden=16)


class Attention(nn.Module):
    """Attention with T5's bias ``t[bucket(k - q), h]`` over a sequence of which each rank has a part."""

    def __init__(self, sizes: Sizes, rank: int, world: int) -> None:
        super().__init__()
        self.heads, self.offset = sizes.heads, rank * (sizes.tokens // world)
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.table = nn.Parameter(torch.randn(sizes.buckets, sizes.heads))

    def forward(self, x: Tensor) -> Tensor:
        """x [1, tokens / world, width] -> the same shape."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).contiguous()
        k, v = (all_gather_tensor_autograd(t, gather_dim=2, group=dist.group.WORLD) for t in (k, v))
        offset, table = self.offset, self.table

        def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + table[t5_bucket(k - q - offset), h]

        y = flex_attention(q, k, v, score_mod=bias)
        return self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A mixture of experts of which each rank has a part.

    The tokens of a rank travel in ``parts``, and the experts compute on one part while others travel. The host reads how
    many rows go where, once for all parts, and the graph breaks there.
    """

    def __init__(self, sizes: Sizes, rank: int, world: int) -> None:
        super().__init__()
        self.topk, self.experts, self.world, self.parts = sizes.topk, sizes.experts, world, sizes.parts
        here, width, hidden = sizes.experts // world, sizes.width, sizes.hidden
        self.router = nn.Parameter(torch.randn(sizes.experts, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(here, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(here, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [1, tokens / world, width] -> the same shape."""
        rows = x[0].view(self.parts, -1, x.shape[-1])
        weight, chosen = (rows @ self.router.T).softmax(-1).topk(self.topk, -1)
        expert, order = chosen.flatten(1).sort(dim=1, stable=True)
        outgoing = F.one_hot(expert, self.experts).sum(1).view(self.parts, self.world, -1).transpose(0, 1).contiguous()
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        sent = outgoing.sum(2).T.tolist()
        received = incoming.sum(2).T.tolist()
        there, back, results = [], [], []
        for i in range(self.parts):
            there.append(self._travel(rows[i][order[i] // self.topk], received[i], sent[i]))
        for i in range(self.parts):
            back.append(self._travel(self.here(there[i], incoming[:, i]), sent[i], received[i]))
        for i in range(self.parts):
            weighted = back[i] * weight[i].flatten()[order[i], None]
            results.append(torch.zeros_like(rows[i]).index_add(0, order[i] // self.topk, weighted))
        return torch.cat(results)[None]

    def _travel(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Send this many rows to each rank, and return those that come from each rank."""
        return all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)

    def here(self, rows: Tensor, incoming: Tensor) -> Tensor:
        """Apply this rank's experts to rows that are ordered by rank and then by expert. incoming [world, experts here]."""
        of_experts = torch.arange(incoming.numel(), device=rows.device) % incoming.shape[1]
        order = of_experts.repeat_interleave(incoming.flatten(), output_size=len(rows)).argsort(stable=True)
        ends = incoming.sum(0).cumsum(0).to(torch.int32)
        outputs = grouped(F.silu(grouped(rows[order], self.up, ends)), self.down, ends)
        return outputs[order.argsort()]


def grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix. ends [E]: where the rows of each expert end."""
    if rows.is_cuda:
        return torch._grouped_mm(rows, matrices, ends)
    expert = torch.searchsorted(ends, torch.arange(len(rows)), right=True)
    return torch.einsum("nd,ndf->nf", rows, matrices[expert])


#: name -> the layer, from its sizes, the rank and the number of ranks, and its sizes
CASES: dict[str, tuple[Callable[[Sizes, int, int], nn.Module], Sizes]] = {
    "attention": (Attention, Sizes(1024)),
    "experts": (Experts, Sizes(2048, parts=1)),
    "experts in 2 parts": (Experts, Sizes(2048, parts=2)),
    "experts in 4 parts": (Experts, Sizes(2048, parts=4)),
}
#: Parameters of which each rank has its own part.
OWN = ("up", "down")


def measure(case: str, sizes: Sizes, files: Path) -> dict[str, Any]:
    """Measure steps of this rank, and return the row: the slowest rank counts in each step, and the largest peak.

    exchanges_ms, compute_ms: the durations of NCCL's kernels in a step of this rank, in which it also waits for others, and
    of all other kernels. files: where this rank writes the file ``ready.RANK`` after its first steps. Then it waits for the
    file ``go``.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    layer = CASES[case][0](sizes, rank, world).to(device, dtype)
    torch.manual_seed(1 + rank)
    x = torch.randn(1, sizes.tokens // world, sizes.width, device=device, dtype=dtype).requires_grad_()
    run = torch.compile(layer, backend="gradfuse", options=OVERLAP)
    replicated = [p for name, p in layer.named_parameters() if name not in OWN]

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        run(x).float().square().mean().backward()
        flat = torch.cat([p.grad.float().flatten() for p in replicated])
        dist.all_reduce(flat)

    begin = time.perf_counter()
    for _ in range(3):
        step()
    _wait(device)
    row = {"case": case, "gpus": world, "tokens": sizes.tokens, "first_steps_s": time.perf_counter() - begin}
    (files / f"ready.{rank}").touch()
    # A barrier would keep the GPU busy, on which others are timed. The folder goes when the process that made it ends.
    while not (files / "go").exists():
        if not files.exists():
            raise RuntimeError("the process that started this one has ended")
        time.sleep(0.1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = torch.tensor([_time(step, device) for _ in range(STEPS)], device=device)
    peak = torch.tensor(float(torch.cuda.max_memory_allocated() if device.type == "cuda" else 0), device=device)
    for most in (times, peak):
        dist.all_reduce(most, dist.ReduceOp.MAX)
    row |= {"step_ms": 1000 * statistics.median(times.tolist()), "peak_mb": float(peak) / 2**20}
    if device.type == "cuda":
        found = kernels(step, runs=STEPS)
        exchanges = sum(ms for name, (_, ms) in found.items() if "nccl" in name)
        row |= {"exchanges_ms": exchanges, "compute_ms": sum(ms for _, ms in found.values()) - exchanges}
    return row


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _time(step: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _work(case: str, smoke: bool, files: Path) -> None:
    """Measure a case in this process of ``torchrun``. The first rank prints the row."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    row = measure(case, replace(SMOKE, parts=CASES[case][1].parts) if smoke else CASES[case][1], files)
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
    dist.destroy_process_group()


class Run:
    """One case on some GPUs, by ``torchrun``."""

    def __init__(self, case: str, gpus: int, smoke: bool, files: Path) -> None:
        self.case, self.gpus, self.files = case, gpus, files
        files.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        command = [*torchrun, "-m", "benchmarks.scaling", "--worker", str(files), "--case", case, *["--smoke"] * smoke]
        own = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(files / "cache")}
        self.process = subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True)

    def wait_for_first_steps(self) -> None:
        """Wait until all ranks have taken their first steps, or torchrun has ended."""
        while self.process.poll() is None and len(list(self.files.glob("ready.*"))) < self.gpus:
            time.sleep(0.1)

    def row(self) -> dict[str, Any]:
        """Let the ranks measure, and return the row, or why there is none."""
        (self.files / "go").touch()
        out, _ = self.process.communicate()
        rows = [line for line in out.splitlines() if line.startswith("{")]
        ended = {"case": self.case, "gpus": self.gpus, "refused": f"torchrun ended with {self.process.returncode}"}
        return json.loads(rows[-1]) if rows else ended


def main() -> None:
    """Measure the chosen cases on the chosen numbers of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="may be given several times")
    parser.add_argument("--gpus", action="append", type=int, help="may be given several times")
    parser.add_argument("--smoke", action="store_true", help="small sizes, and write nothing")
    parser.add_argument("--out", type=Path, help="the file of results; needed for a part of the cases")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return _work(given.case[0], given.smoke, given.worker)
    rows: list[dict[str, Any]] = []
    runs: list[Run] = []
    # So that the processes end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        try:
            for case in given.case or CASES:
                for gpus in given.gpus or (1, 2, 4):
                    runs.append(Run(case, gpus, given.smoke, Path(folder, str(len(runs)))))
            for run in runs:
                run.wait_for_first_steps()
            for run in runs:
                rows.append(run.row())
                print(json.dumps(rows[-1]), flush=True)
        finally:
            for run in runs:
                run.process.terminate()
    # A part of the cases does not replace the results of all.
    out = given.out or (None if given.smoke or given.case or given.gpus else RESULTS / "scaling.json")
    if out is not None:
        result = {"suite": "scaling", "environment": environment(), "rows": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
