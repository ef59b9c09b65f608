"""Command line of the fuzzer.

python -m tests.fuzz --family indices --seeds 0:500 --workers 2
python -m tests.fuzz --family all --seeds 0:500 --device cuda --mode compiled --workers 16 --json fuzz.json
python -m tests.fuzz --show indices:82
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext.core.table import progress

from .runner import FAMILIES, Outcome, Settings, generate, interleaved, run, run_one, to_json, work


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=[*FAMILIES, "all"], default="all")
    parser.add_argument("--seeds", default="0:100", help="first:last+1, or a single seed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--mode",
        choices=["graphs", "compiled", "interpreted"],
        default="graphs",
        help="run the rewritten graphs op by op, compile them, or compile them to Triton for its interpreter on a CPU",
    )
    parser.add_argument("--dtype", default="any", help="float32, bfloat16, float16, float64 or any")
    parser.add_argument("--deterministic", action="store_true", help="with that option, twice, compared bit for bit")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=None, help="seconds a program")
    parser.add_argument("--time-limit", type=float, default=None, help="seconds in all")
    parser.add_argument("--json", default=None, help="write the results to this file")
    parser.add_argument("--show", metavar="FAMILY:SEED", default=None, help="print a program and end")
    parser.add_argument("--run", metavar="FAMILY:SEED", default=None, help="run one program in this process and end")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _progress() -> Callable[[Outcome, int, int], None]:
    """Show a bar if stderr is a terminal, or else a line for every hundred programs, and a line for every failure."""
    bar: Any = None
    begin = time.monotonic()

    def show(outcome: Outcome, done: int, total: int) -> None:
        nonlocal bar
        bar = bar if bar is not None else progress("programs", "program", total=total)
        bar.update()
        if bar.disable and (done % 100 == 0 or done == total):
            print(f"{done} of {total} programs, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        if outcome.outcome in ("wrong", "crash"):
            line = f"{outcome.family}:{outcome.seed} {outcome.dtype} {outcome.outcome}: {outcome.reason}"
            bar.write(line, file=sys.stderr)
        if done == total:
            bar.close()

    return show


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return 1 if a program failed."""
    given = _parser().parse_args(arguments)
    if given.worker:
        warnings.filterwarnings("ignore")
        logging.disable(logging.ERROR)
        torch.set_num_threads(1)
        message = json.load(sys.stdin)
        work([tuple(job) for job in message["jobs"]], Settings(**message["settings"]))
        return 0
    timeout = given.timeout or (60 if given.mode == "graphs" else 180)
    # Triton's interpreter knows no half precision of its own.
    dtype = "float32" if given.mode == "interpreted" else given.dtype
    settings = Settings(given.device, given.mode, dtype, given.deterministic, timeout)
    if given.run and given.mode == "interpreted":
        os.environ["TRITON_INTERPRET"] = "1"
    if given.show or given.run:
        family, seed = (given.show or given.run).split(":")
        print(generate(family, int(seed), dtype).show() if given.show else run_one(family, int(seed), settings))
        return 0
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    families = FAMILIES if given.family == "all" else (given.family,)
    summary = run(interleaved(families, seeds), settings, given.workers, given.time_limit, _progress())
    for family, counts in summary.counts().items():
        print(f"{family}: " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    print(f"{len(summary.outcomes)} programs in {summary.seconds:.0f} s")
    if given.json:
        to_json(given.json, summary, settings, families, given.seeds)
    return 1 if summary.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
