"""Steps that are shorter than their launches: time, kernels and memory, with and without CUDA graphs.

python -m benchmarks.launches                 # every case; writes results/launches.json
python -m benchmarks.launches --case key-512 --compile-only   # fill the compile cache, in parallel with others

A step is forward and backward of a case of the other suites, by stock Inductor and by gradfuse. Its time depends on the host
where the GPU waits for launches. CUDA graphs (``mode="reduce-overhead"``) launch all kernels of a graph at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import inductor_ext  # noqa: F401  (registers the backend)
from inductor_ext.core.table import progress

from . import biases, flex, mlstm, moe, scan
from .runner import RESULTS, Case, kernels, write_rows

BACKENDS = {"stock": "inductor", "gradfuse": "gradfuse"}


def _mlstm_case() -> Case:
    case = next(mlstm.cases(["512x128"], compile_only=True))
    case.function = mlstm.plain
    return case


#: name -> a maker of the case
CASES: dict[str, Callable[[], Case]] = {
    **{f"{name}-512": lambda name=name: flex.make_case(name, 64, length=512) for name in ("key", "relpos", "t5", "pair")},
    **{name: lambda name=name: biases.make_case(name) for name in ("swin", "beit")},
    **{name: lambda name=name: moe.make_case(name) for name in moe.CASES if name.startswith(("lookup", "embedding"))},
    **{f"gated-{n}": lambda n=n: next(scan.cases([f"gated-length-{n}"])) for n in (256, 1024)},
    "mlstm-512": _mlstm_case,
}


def _step(case: Case, backend: str, mode: str | None) -> Callable[[], None]:
    """Return a compiled step of the case, which has run three times."""
    torch._dynamo.reset()
    run = torch.compile(case.function, backend=backend, fullgraph=True, mode=mode)
    leaves = [x for x in case.inputs if x.requires_grad]
    for x in case.inputs:
        # As the parameters of a model. CUDA graphs would copy other inputs.
        torch._dynamo.mark_static_address(x)
    grad = torch.randn_like(run(*case.inputs))

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        torch.autograd.grad(run(*case.inputs), leaves, grad)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return step


def measure(name: str, peer: str, compile_only: bool) -> dict[str, Any]:
    """Return a row: median milliseconds of a step, those of its kernels, their number, the peak in MB, and CUDA graphs."""
    from triton.testing import do_bench

    torch.manual_seed(0)
    case = CASES[name]()
    row: dict[str, Any] = {"case": name, "peer": peer}
    step = _step(case, BACKENDS[peer], None)
    if not compile_only:
        found = kernels(step).values()
        row |= {"step_ms": do_bench(step, return_mode="median"), "step_kernels_ms": sum(ms for _, ms in found)}
        row |= {"kernels": sum(count for count, _ in found), "step_peak_mb": _peak(step)}
    step = _step(case, BACKENDS[peer], "reduce-overhead")
    if not compile_only:
        row["graph_ms"] = do_bench(step, return_mode="median")
    return row


def _peak(step: Callable[[], None]) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    """Measure the chosen cases and write their rows, anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "launches.json")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in progress("launches", "case", of=given.case or list(CASES)):
        for peer in BACKENDS:
            try:
                rows.append(measure(name, peer, given.compile_only))
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
                rows.append({"case": name, "peer": peer, "refused": reason})
            print(json.dumps(rows[-1]), flush=True)
        if not given.compile_only:
            write_rows(given.out, "launches", "case", rows, {})


if __name__ == "__main__":
    main()
