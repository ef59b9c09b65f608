"""Two trees of gradfuse on one GPU, in turns: what is slower than it was, and what is faster.

    git archive OLD | tar x -C /tmp/old
    python -m benchmarks.before_after /tmp/old --suite flex --suite moe --out benchmarks/results/before_after.json

Each case stays compiled in a process of each tree, and the two are timed in turns, ``ROUNDS`` times, while all others wait.
So the clock of the GPU, which drifts by more than a small change is worth, is the same for both. The old tree's benchmarks
make its cases, and one that it lacks is left out. With several GPUs, each pair of processes stays on one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

ROUNDS = 5
#: How many cases one process compiles, and how many pairs of processes share a GPU at a time.
CASES_OF_A_PROCESS, PAIRS_OF_A_GPU = 3, 8
HERE = Path(__file__).resolve().parents[1]


def names(suite: str) -> list[str]:
    """The cases of a suite in this tree."""
    from benchmarks import biases, flex, mlstm, moe, scan

    if suite == "flex":
        return [f"{name} {dim}" for name in flex.CASES for dim in (64, 128)]
    if suite == "mlstm":
        return [f"{length}x{width}" for length, width in mlstm.SHAPES]
    if suite == "scan":
        return [case.name for case in scan.cases([])]
    return list({"biases": biases.CASES, "moe": moe.CASES}[suite])


def make(suite: str, name: str) -> Any:
    """Return the case, by the benchmarks that this process imports: those of its tree."""
    from importlib import import_module

    module = import_module(f"benchmarks.{suite}")
    if suite == "flex":
        kind, dim = name.split()
        return module.make_case(kind, int(dim))
    if suite == "mlstm":
        return next(iter(module.cases([name], True)))
    if suite == "scan":
        return next(iter(module.cases([name])))
    return module.make_case(name)


def prepare(case: Any) -> Callable[[], dict[str, float]]:
    """Compile a case under gradfuse; return what times it."""
    import torch
    from triton.testing import do_bench

    from benchmarks.runner import _kernel_time

    run = case.peers["gradfuse"](case.function)
    leaves = [x for x in case.inputs if x.requires_grad]
    out = run(*case.inputs)
    grad = torch.randn_like(out)

    def forward() -> Any:
        return run(*case.inputs)

    def backward() -> Any:
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    def times() -> dict[str, float]:
        steps = {"forward": forward, "backward": backward}
        if case.kernels:
            return {f"{step}_kernels_ms": _kernel_time(function) for step, function in steps.items()}
        return {f"{step}_ms": do_bench(function, return_mode="median") for step, function in steps.items()}

    backward()
    torch.cuda.synchronize()
    return times


def serve(suite: str, cases: list[str], answers: IO[str]) -> None:
    """Compile the cases and say ``{}``, or why not, for each. Then answer each number on stdin by the times of that case."""
    import torch
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config

    torch.manual_seed(0)
    functorch_config.donated_buffer = False
    # Cases of one process may be one function with other sizes, which Dynamo would compile for dynamic sizes.
    dynamo_config.automatic_dynamic_shapes = False
    ready = []
    for name in cases:
        try:
            ready.append(prepare(make(suite, name)))
            refused = {}
        except Exception as error:
            ready.append(dict)
            refused = {"refused": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
        print(json.dumps(refused), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(ready[int(line)]()), file=answers, flush=True)


class Worker:
    """A process that has compiled some cases of a suite in one tree."""

    def __init__(self, tree: Path, suite: str, cases: list[str], gpu: str) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONSAFEPATH": "1"}
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-W", "ignore", __file__, str(tree), "--serve", suite, *cases]
        self.process = subprocess.Popen(
            command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def answer(self) -> dict[str, Any]:
        """The next line that the process writes, or why there is none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"refused": f"the process ended with {self.process.wait()}"}

    def ask(self, case: int) -> dict[str, Any]:
        """Time a case, while the other processes wait."""
        assert self.process.stdin is not None
        if self.process.poll() is not None:
            return {}
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        return self.answer()


def rows(suite: str, cases: list[str], workers: list[Worker]) -> Iterator[dict[str, Any]]:
    """A row for each time of each case that both trees have compiled, with the medians of all rounds."""
    for number, name in enumerate(cases):
        rounds = [[worker.ask(number) for worker in workers] for _ in range(ROUNDS)]
        for what in rounds[0][0]:
            if all(what in times for pair in rounds for times in pair):
                before, after = (statistics.median(pair[tree][what] for pair in rounds) for tree in (0, 1))
                ratio = statistics.median(pair[1][what] / pair[0][what] for pair in rounds)
                yield {"suite": suite, "case": name, "what": what, "before": before, "after": after, "ratio": ratio}


def measure(old: Path, wanted: list[tuple[str, list[str]]], gpus: list[str]) -> list[dict[str, Any]]:
    """Measure some cases at a time, because the tensors of all of them may not fit into memory."""
    at_once = PAIRS_OF_A_GPU * len(gpus)
    return [row for i in range(0, len(wanted), at_once) for row in _measure(old, wanted[i : i + at_once], gpus)]


def _measure(old: Path, wanted: list[tuple[str, list[str]]], gpus: list[str]) -> list[dict[str, Any]]:
    """Compile cases side by side, and then time them, one at a time on each GPU."""
    jobs = []
    for number, (suite, cases) in enumerate(wanted):
        workers = [Worker(tree, suite, cases, gpus[number % len(gpus)]) for tree in (old, HERE)]
        jobs.append((suite, cases, workers))
    found: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        found.append(row)
        print(json.dumps(row), flush=True)

    for suite, cases, workers in jobs:
        for name in cases:
            for tree, worker in zip(("before", "after"), workers, strict=True):
                refused = worker.answer()
                if refused:
                    add({"suite": suite, "case": name, "tree": tree, **refused})

    def on_one_gpu(jobs_of_gpu: list[tuple[str, list[str], list[Worker]]]) -> None:
        for job in jobs_of_gpu:
            for row in rows(*job):
                add(row)

    threads = [threading.Thread(target=on_one_gpu, args=(jobs[i :: len(gpus)],)) for i in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for *_, workers in jobs:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the folder of the old tree")
    parser.add_argument("--suite", action="append", choices=["flex", "biases", "moe", "mlstm", "scan"])
    parser.add_argument("--case", action="append", help="only the cases whose names contain this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        # What the compiler prints must not end up among the answers.
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        return serve(given.serve[0], given.serve[1:], answers)
    import torch

    from benchmarks.runner import environment

    wanted = []
    for suite in given.suite or ["flex", "biases", "moe", "mlstm", "scan"]:
        cases = [name for name in names(suite) if not given.case or any(part in name for part in given.case)]
        wanted += [(suite, cases[i : i + CASES_OF_A_PROCESS]) for i in range(0, len(cases), CASES_OF_A_PROCESS)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    found = measure(given.old.resolve(), wanted, visible.split(","))
    found.sort(key=lambda row: (row["suite"], row["case"], row.get("what", "")))
    if given.out:
        result = {"suite": "before_after", "environment": environment(), "rows": found}
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
