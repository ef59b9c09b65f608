"""Nsight Compute's counters of the attention kernels that benchmarks.cudnn times: where a missed goal's time goes.

python -m benchmarks.counters --out benchmarks/results/counters.json
python -m benchmarks.counters --case "t5 64" --case "none 64 causal" --out some.json

Each case first compiles in a process of its own, all at the same time. Then ncu runs each once more. These processes start
together, too, and once all are ready, they take turns: ncu watches one forward and one backward of each, alone. It
needs permission to read the counters, and leaves the clocks alone.
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
import time
from collections.abc import Iterator
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


def run(name: str, turns: Path | None) -> None:
    """Compile a case, and take one step of it. With ``turns``, wait for this case's turn, and take another one for ncu."""
    operands, attention = attention_of(*CASES[name])
    run_compiled = torch.compile(attention, backend="gradfuse")

    def step() -> None:
        out = run_compiled(*operands[:3])
        torch.autograd.grad(out, operands, torch.ones_like(out))
        torch.cuda.synchronize()

    step()
    if turns:
        (turns / f"{name} is ready").touch()
        while not (turns / f"{name} may begin").exists():
            time.sleep(0.05)
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


def watch(name: str, turns: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    """Start a case under ncu. It waits for its turn."""
    command = ["ncu", "--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start", "off"]
    command += [x for section in SECTIONS for x in ("--section", section)]
    command += ["--kernel-name", "regex:triton", sys.executable, "-m", "benchmarks.counters", "--program", name]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, "--turns", str(turns)], env=environ, stdout=pipe, stderr=pipe, text=True)


def rows_of(name: str, turns: Path, process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Let a case that waits begin, and return a row for each of its kernels, or one that says what failed."""
    (turns / f"{name} may begin").touch()
    out, errors = process.communicate()
    if process.returncode or '"ID"' not in out:
        return [{"case": name, "refused": (out + errors)[-600:]}]
    return [{"case": name} | row for row in kernels_of(out)]


def main() -> None:
    """Watch the chosen cases, and write the results anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="may be given several times")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--program", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.program:
        run(given.program, given.turns)
        return
    if given.out is None:
        parser.error("--out is needed")
    names = given.case or list(CASES)
    own = os.environ | {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp()}
    command = [sys.executable, "-m", "benchmarks.counters", "--program"]
    for process in [subprocess.Popen([*command, name], env=own) for name in names]:
        process.wait()
    turns = Path(tempfile.mkdtemp())
    waiting = {name: watch(name, turns, own) for name in names}
    while any(process.poll() is None and not (turns / f"{n} is ready").exists() for n, process in waiting.items()):
        time.sleep(0.1)
    rows: list[dict[str, Any]] = []
    for name in progress("counters", "case", of=names):
        rows += rows_of(name, turns, waiting[name])
        result = {"suite": "counters", "environment": environment(), "shape": SHAPE, "rows": rows}
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
