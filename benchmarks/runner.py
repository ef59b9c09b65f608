"""The common runner: cases, peers, medians, errors against float64, peak memory, JSON beside its environment.

A suite (``flex.py``, ...) yields ``Case``s. A case has inputs and a function of them; each peer turns the function into
something callable (or says why it cannot). Forward and backward are timed with ``triton.testing.do_bench`` (median) in one
process, peers one after the other, so that the ratios of one run can be trusted where absolute times cannot.
"""

from __future__ import annotations

import datetime
import json
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from inductor_ext.core.table import progress

RESULTS = Path(__file__).parent / "results"


@dataclass
class Case:
    """One row: ``function(*inputs)`` is the thing measured, ``reference(*inputs)`` the same in float64 (or None)."""

    name: str
    parameters: dict[str, Any]
    inputs: list[torch.Tensor]
    function: Callable[..., torch.Tensor]
    reference: Callable[..., list[torch.Tensor]] | None = None
    peers: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = field(default_factory=dict)
    #: Add up the durations of the kernels too: what is left when a slow host does not hold up the GPU between them.
    kernels: bool = False
    #: Peers that compute less than the function, to show what the rest of it costs. They have no errors.
    partial: frozenset[str] = frozenset()


def stock(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="inductor", fullgraph=True)


def gradfuse(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="gradfuse", fullgraph=True)


def deterministic(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="gradfuse", fullgraph=True, options={"deterministic": True})


def environment() -> dict[str, Any]:
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "date": datetime.date.today().isoformat(),
        "device": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error in float64; against zero (float64's own noise) the norm of what should be zero."""
    got, want = got.double(), want.double()
    scale = want.norm()
    return float((got - want).norm() / scale) if scale > 1e-9 else float(got.norm())


def write_rows(path: Path, suite: str, name: str, rows: list[dict[str, Any]], versions: dict[str, Any]) -> None:
    """Write rows, each with its date and device, into a file that may have others.

    A row replaces that of the same case and peer; ``name`` is the column of the case. Rows of other versions are dropped.
    """
    here = environment() | versions
    of_a_row = {fact: here.pop(fact) for fact in ("date", "device")}
    before = json.loads(path.read_text()) if path.exists() else {"environment": None}
    kept = before["rows"] if before["environment"] == here else []
    merged = {(row[name], row["peer"]): row for row in [*kept, *(row | of_a_row for row in rows)]}
    path.write_text(json.dumps({"suite": suite, "environment": here, "rows": [*merged.values()]}, indent=1) + "\n")


def measure(case: Case, *, compile_only: bool = False) -> list[dict[str, Any]]:
    """One row a peer: forward and backward medians in ms, error of each gradient, peak memory of a step in MB."""
    rows = []
    leaves = [x for x in case.inputs if x.requires_grad]
    want: list[torch.Tensor] | None = None
    grad: torch.Tensor | None = None
    for peer, prepare in case.peers.items():
        row: dict[str, Any] = {"case": case.name, **case.parameters, "peer": peer}
        rows.append(row)
        torch._dynamo.reset()
        try:
            run = prepare(case.function)
            out = run(*case.inputs)
            if grad is None:
                grad = torch.randn_like(out)
            grads = torch.autograd.grad(out, leaves, grad, retain_graph=True, allow_unused=peer in case.partial)
            if compile_only:
                continue
            if want is None and case.reference is not None:
                want = case.reference(*case.inputs, grad)
            if want is not None and peer not in case.partial:
                got = [out, *grads]
                row["error"] = [relative_error(g, w) for g, w in zip(got, want, strict=True)]
            used = [x for x, g in zip(leaves, grads, strict=True) if g is not None]
            row.update(_times(run, case.inputs, out, used, grad, case.kernels))
            del out, grads
        except Exception as error:
            row["refused"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        print(json.dumps(row), flush=True)
    return rows


def _times(
    run: Callable[..., Any],
    inputs: list[torch.Tensor],
    out: torch.Tensor,
    leaves: list[torch.Tensor],
    grad: torch.Tensor,
    kernels: bool,
) -> dict[str, float]:
    from triton.testing import do_bench

    def backward() -> Any:
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    result = {
        "forward_ms": do_bench(lambda: run(*inputs), return_mode="median"),
        "backward_ms": do_bench(backward, return_mode="median"),
    }
    if kernels:
        result["forward_kernels_ms"] = _kernel_time(lambda: run(*inputs))
        result["backward_kernels_ms"] = _kernel_time(backward)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(run(*inputs), leaves, grad)
    torch.cuda.synchronize()
    result["step_peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return result


def kernels(function: Callable[[], Any], runs: int = 10) -> dict[str, tuple[int, float]]:
    """How often each kernel runs in one call, and its milliseconds there by the profiler. The longest is first."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(runs):
            function()
        torch.cuda.synchronize()
    on_gpu = [e for e in profiled.key_averages() if e.device_type.name == "CUDA" and e.device_time_total]
    on_gpu.sort(key=lambda e: -e.device_time_total)
    return {e.key: (e.count // runs, e.device_time_total / runs / 1000) for e in on_gpu}


def _kernel_time(function: Callable[[], Any]) -> float:
    """Milliseconds that the GPU is busy in one call. (`before_after` finds it by this name in older trees, too.)"""
    return sum(milliseconds for _, milliseconds in kernels(function).values())


def run_suite(name: str, cases: Iterable[Case], *, compile_only: bool = False, out: Path | None = None) -> None:
    """Measure every case and write ``results/<name>.json``, anew after each: what a time limit cuts off is not lost."""
    import torch._functorch.config as functorch_config

    functorch_config.donated_buffer = False
    path, rows = out or RESULTS / f"{name}.json", []
    for case in progress(name, "case", of=cases):
        rows += measure(case, compile_only=compile_only)
        if not compile_only:
            path.write_text(json.dumps({"suite": name, "environment": environment(), "rows": rows}, indent=1) + "\n")


def time_compilation(name: str, warm_up: Case, cases: Iterable[tuple[Case, str]], *, out: Path | None = None) -> None:
    """Seconds from ``torch.compile`` to the first gradient without any cache; write ``results/<name>.json``.

    cases: each with a mode of ``torch.compile``.
    ``warm_up`` is compiled first and not recorded: whoever comes first starts worker processes and the GPU.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    rows = []
    with inductor_config.patch(force_disable_caches=True), functorch_config.patch(enable_autograd_cache=False):
        for number, (case, mode) in enumerate(progress(f"{name}: compiling", "case", of=[(warm_up, "default"), *cases])):
            leaves = [x for x in case.inputs if x.requires_grad]
            for peer in ("stock", "gradfuse"):
                torch._dynamo.reset()
                torch.cuda.synchronize()
                start = time.perf_counter()
                with inductor_config.patch(torch._inductor.list_mode_options(mode)):
                    out_tensor = case.peers[peer](case.function)(*case.inputs)
                    torch.autograd.grad(out_tensor.sum(), leaves)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                if number:
                    rows.append({"case": case.name, **case.parameters, "mode": mode, "peer": peer, "compile_s": seconds})
                    print(json.dumps(rows[-1]), flush=True)
    path = out or RESULTS / f"{name}.json"
    path.write_text(json.dumps({"suite": name, "environment": environment(), "rows": rows}, indent=1) + "\n")
