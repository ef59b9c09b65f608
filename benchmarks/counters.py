"""Nsight Compute's counters of the attention kernels that benchmarks.cudnn times: where a missed goal's time goes.

python -m benchmarks.counters --out benchmarks/results/counters.json
python -m benchmarks.counters --case "t5 64" --case "none 64 causal" --out some.json

Each case first compiles in a process of its own, all at the same time. Then ncu runs it once more, a case at a time on each
GPU, and watches one forward and one backward. It needs permission to read the counters, and leaves the clocks alone.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from inductor_ext.core.table import progress

from .cudnn import SHAPE, attention_of, cases
from .runner import environment

CASES = {" ".join(str(x) for x in case if x is not None): case for case in cases()}
SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "WarpStateStats",
    "LaunchStats",
    "Occupancy",
)
#: The counters that are kept, by their names in ncu's raw page.
KEPT = re.compile(
    r"gpu__time_duration\.sum|launch__(registers_per_thread|occupancy_limit_.*|waves_per_multiprocessor)"
    r"|sm__(warps_active|inst_executed_pipe_tensor.*|pipe_tensor.*|throughput)\.avg\.pct_of_peak_sustained_(active|elapsed)"
    r"|sm__inst_issued\.avg\.pct_of_peak_sustained_active|sm__inst_executed\.avg\.per_cycle_active"
    r"|(l1tex__data_pipe_lsu_wavefronts_mem_shared|lts__throughput|dram__throughput|l1tex__throughput)\..*pct.*"
    r"|smsp__average_warps_issue_stalled_\w+_per_issue_active\.ratio|smsp__inst_executed\.sum"
)


def run(name: str, watched: bool) -> None:
    """Compile a case, and take one step of it; ``watched`` tells ncu to look at the last one."""
    operands, attention = attention_of(*CASES[name])
    run_compiled = torch.compile(attention, backend="gradfuse")

    def step() -> None:
        out = run_compiled(*operands[:3])
        torch.autograd.grad(out, operands, torch.ones_like(out))
        torch.cuda.synchronize()

    step()
    if watched:
        with torch.cuda.profiler.profile():
            step()


def kernels_of(page: str) -> Iterator[dict[str, Any]]:
    """Yield the kept counters of each kernel of ncu's raw page in CSV, whose second line has the units."""
    lines = page[page.index('"ID"') :]
    units, *rows = csv.DictReader(io.StringIO(lines))
    for row in rows:
        counters = {name: _number(row[name]) for name in row if KEPT.fullmatch(name)}
        yield {"kernel": row["Kernel Name"], "units": {n: units[n] for n in counters if units[n] != "%"}} | counters


def _number(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


def watch(name: str, environ: dict[str, str]) -> list[dict[str, Any]]:
    """Return a row for each kernel of a case, or one that says what failed."""
    command = ["ncu", "--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start", "off"]
    command += [x for section in SECTIONS for x in ("--section", section)]
    command += ["--kernel-name", "regex:triton", sys.executable, "-m", "benchmarks.counters", "--program", name, "--watched"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode or '"ID"' not in done.stdout:
        return [{"case": name, "refused": (done.stdout + done.stderr)[-600:]}]
    return [{"case": name} | row for row in kernels_of(done.stdout)]


def main() -> None:
    """Watch the chosen cases, and write the results anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="may be given several times")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--program", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.program:
        run(given.program, given.watched)
        return
    if given.out is None:
        parser.error("--out is needed")
    names, gpus = given.case or list(CASES), torch.cuda.device_count()
    own = os.environ | {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp()}
    command = [sys.executable, "-m", "benchmarks.counters", "--program"]
    for process in [subprocess.Popen([*command, name], env=own) for name in names]:
        process.wait()
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(gpus) as pool:
        on = [own | {"CUDA_VISIBLE_DEVICES": str(i % gpus)} for i in range(len(names))]
        for found in progress("counters", "case", of=pool.map(watch, names, on), total=len(names)):
            rows += found
            result = {"suite": "counters", "environment": environment(), "shape": SHAPE, "rows": rows}
            given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
