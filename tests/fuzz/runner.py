"""Run many programs in worker processes, so that a program that hangs or crashes does not affect the others.

A worker is ``python -m tests.fuzz --worker``; it writes a line of JSON before and after each program.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .program import Program

FAMILIES = ("score_mods", "indices", "casts", "scans", "attentions")
OUTCOMES = ("ok", "wrong", "crash", "stock_too", "stock_crashes_too", "discarded")
#: This marks the lines of a worker's output that are for the runner.
MARK = "@fuzz "


@dataclass(frozen=True)
class Settings:
    """How programs are made and run. A program that takes longer than ``timeout`` seconds counts as a crash."""

    device: str = "cpu"
    mode: str = "graphs"
    dtype: str = "any"
    deterministic: bool = False
    timeout: int = 60


@dataclass(frozen=True)
class Outcome:
    """The result of one program."""

    family: str
    seed: int
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    dtype: str = ""


@dataclass
class Summary:
    """The results of many programs."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    def failures(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.outcome in ("wrong", "crash")]

    def counts(self) -> dict[str, dict[str, int]]:
        families = dict.fromkeys(o.family for o in self.outcomes)
        return {f: dict(Counter(o.outcome for o in self.outcomes if o.family == f)) for f in families}


def generate(family: str, seed: int, dtype: str = "any") -> Program:
    """Make the program of a seed."""
    return importlib.import_module(f"{__package__}.{family}").generate(seed, dtype)


class Timeout(BaseException):
    """A program took too long."""


@contextlib.contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Timeout(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_one(family: str, seed: int, settings: Settings) -> Outcome:
    """Make, run and judge one program in this process."""
    from .judge import judge, one_line

    start, dtype = time.perf_counter(), ""
    try:
        with _alarm(settings.timeout):
            program = generate(family, seed, settings.dtype)
            dtype = program.dtype
            result = judge(program, settings.mode, settings.device, settings.deterministic)
            outcome, reason = result.outcome, result.reason
    except Timeout as error:
        outcome, reason = "crash", str(error)
    except Exception as error:  # a generator or judge that raises must not hide
        outcome, reason = "crash", f"fuzzer: {one_line(error)}"
    return Outcome(family, seed, outcome, reason, round(time.perf_counter() - start, 3), dtype)


def work(jobs: Sequence[tuple[str, int]], settings: Settings) -> None:
    """Run the jobs of a worker."""
    from . import judge  # takes seconds, which must not count as those of a program

    for family, seed in jobs:
        print(MARK + json.dumps({"start": [family, seed]}), flush=True)
        print(MARK + json.dumps(asdict(run_one(family, seed, settings))), flush=True)
        if judge.context_lost(settings.device):
            # The next programs would all raise, in eager mode too. The runner starts another process for them.
            return


class _Worker:
    """A process with its share of the jobs. A thread calls ``done`` with every outcome."""

    def __init__(self, jobs: list[tuple[str, int]], settings: Settings, done: Callable[[Outcome], None]) -> None:
        self.jobs, self.settings, self.done = jobs, settings, done
        self.stopped = False
        self.process: subprocess.Popen[str] | None = None
        self.started = time.monotonic()
        self.current: tuple[str, int] | None = None
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    def _live(self) -> None:
        while self.jobs and not self.stopped:
            self._run_process()

    def _run_process(self) -> None:
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        if self.settings.mode == "interpreted":
            environment["TRITON_INTERPRET"] = "1"
        package = __package__
        command = [sys.executable, "-m", package, "--worker"]
        self.started, self.current = time.monotonic(), None
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"jobs": self.jobs, "settings": asdict(self.settings)}))
            self.process.stdin.close()
        finished = False
        for line in self.process.stdout:
            if not line.startswith(MARK):
                continue
            message = json.loads(line[len(MARK) :])
            self.started = time.monotonic()
            finished = True
            if "start" in message:
                self.current = tuple(message["start"])
            else:
                self._drop(self.current)
                self.done(Outcome(**message))
        code = self.process.wait()
        if self.stopped:
            return
        if self.current is not None:
            lost = self.current
            self._drop(lost)
            self.done(Outcome(*lost, "crash", f"the process ended with {code}", time.monotonic() - self.started))
        elif not finished:
            raise RuntimeError(f"a worker did not start (exit code {code}): {' '.join(command)}")

    def _drop(self, job: tuple[str, int] | None) -> None:
        self.jobs = [j for j in self.jobs if tuple(j) != job]
        self.current = None

    def watch(self) -> None:
        """Kill a process that hangs in code that an alarm does not interrupt."""
        hung = self.current is not None and time.monotonic() - self.started > 2 * self.settings.timeout + 10
        if hung and self.process is not None:
            self.process.kill()

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None:
            self.process.kill()


def run(
    jobs: Sequence[tuple[str, int]],
    settings: Settings,
    workers: int = 1,
    time_limit: float | None = None,
    progress: Callable[[Outcome, int, int], None] | None = None,
) -> Summary:
    """Run every job (family, seed), spread over the workers. Jobs that are left at the time limit, or at Ctrl-C, do not run."""
    summary, results = Summary(), queue.SimpleQueue()
    begin = time.monotonic()
    shares = [list(jobs[i::workers]) for i in range(workers)]
    crew = [_Worker(share, settings, results.put) for share in shares if share]
    try:
        while any(w.thread.is_alive() for w in crew) or not results.empty():
            with contextlib.suppress(queue.Empty):
                outcome = results.get(timeout=1.0)
                summary.outcomes.append(outcome)
                if progress is not None:
                    progress(outcome, len(summary.outcomes), len(jobs))
            for worker in crew:
                worker.watch()
            if time_limit is not None and time.monotonic() - begin > time_limit:
                break
    except KeyboardInterrupt:
        # An hour of results must not be lost.
        print(f"stopped after {len(summary.outcomes)} programs", file=sys.stderr)
    finally:
        for worker in crew:
            worker.stop()
    summary.outcomes.sort(key=lambda o: (o.family, o.seed))
    summary.seconds = time.monotonic() - begin
    return summary


def interleaved(families: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """The jobs of several families, mixed, so that some of each run before a time limit."""
    return [(family, seed) for seed in seeds for family in families]


def versions(device: str) -> dict[str, str]:
    """Return the versions to which the results apply."""
    import torch

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"torch": torch.__version__, "triton": triton_version, "python": platform.python_version(), "device": name}


def to_json(path: str | Path, summary: Summary, settings: Settings, families: Sequence[str], seeds: str) -> None:
    """Write the results of a run."""
    failing = [
        {"program": f"{o.family}:{o.seed}", "dtype": o.dtype, "outcome": o.outcome, "reason": o.reason}
        for o in summary.outcomes
        if o.outcome not in ("ok", "discarded")
    ]
    dtypes = dict(Counter(o.dtype for o in summary.outcomes))
    discarded = Counter(o.reason[:100] for o in summary.outcomes if o.outcome == "discarded")
    record = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "versions": versions(settings.device),
        "families": list(families),
        "seeds": seeds,
        "settings": asdict(settings),
        "dtypes": dtypes,
        "programs": len(summary.outcomes),
        "seconds": round(summary.seconds, 1),
        "counts": summary.counts(),
        "discarded": dict(discarded.most_common(20)),
        "failing": failing,
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n")
