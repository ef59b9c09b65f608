"""A training step of unmodified models of transformers: stock Inductor, gradfuse and eager, in bf16.

python -m benchmarks.models                           # every model; writes results/models.json
python -m benchmarks.models --model t5_base_512 --peer stock --peer gradfuse
python -m benchmarks.models --model swin_b --profile  # the kernels of a step, one line for each; nothing written
python -m benchmarks.models --model swin_b --smoke    # a reduced model on any device, one step, nothing written

A step is forward, loss and backward, under autocast, or with parameters in bf16 for models of experts. The time is the
median, and the peak is what a step allocates beyond parameters. Every model has a process for each peer, with an empty
cache of its own. All processes compile at the same time, and then they are timed, one at a time on each GPU. The peers of a
model take turns, ROUNDS times, on the same few cores, because many models wait for a host that is not always equally fast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch._dynamo.utils import counters

import inductor_ext  # noqa: F401  (registers the backend)
from inductor_ext.core.report import collect
from inductor_ext.core.table import progress

from .runner import RESULTS, _kernel_time, kernels, write_rows
from .zoo import MODELS

BACKENDS = {"stock": "inductor", "gradfuse": "gradfuse", "eager": None}
#: The number of times that a step is timed, and of the cores of a process meanwhile.
ROUNDS, CORES = 12, 4


def _step(model: nn.Module, inputs: dict[str, Any], device: str, autocast: torch.dtype | None) -> None:
    model.zero_grad(set_to_none=True)
    with torch.autocast(device, autocast, enabled=autocast is not None):
        hidden = model(**inputs)[0]
    hidden.float().square().mean().backward()


def _first_step(name: str, peer: str, smoke: bool) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return what is known after the first step, gradfuse's decisions among it, and a function that takes the next step."""
    case, device = MODELS[name], "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = case.build(**(case.smaller if smoke else {})).train().to(device, case.dtype)
    batch, length = (1, case.shorter) if smoke else (case.batch, case.length)
    inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in case.inputs(batch, length).items()}
    autocast = case.autocast if case.dtype is torch.float32 else None
    row: dict[str, Any] = {"model": name, "batch": batch, "length": length, "peer": peer}
    run = torch.compile(model, backend=BACKENDS[peer]) if peer != "eager" else model
    begin = time.perf_counter()
    with collect() as report:
        _step(run, inputs, device, autocast)
    if device == "cuda":
        torch.cuda.synchronize()
    row["first_step_s"] = time.perf_counter() - begin
    found = {**counters["aot_autograd"], **counters["inductor"]}
    row["caches"] = {name: count for name, count in found.items() if "cache" in name or "bundler" in name}
    if peer == "gradfuse":
        row["fired"] = Counter(d.pass_name for d in report.decisions if d.path != "stock")
    model.zero_grad(set_to_none=True)
    # All models of a run compile at the same time. Together they need more memory than a GPU has if each keeps its peak.
    torch.cuda.empty_cache()
    return row, lambda: _step(run, inputs, device, autocast)


def _time(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of a step in a short round, so that the peers see the same changes of the host's speed."""
    from triton.testing import do_bench

    return {"step_ms": do_bench(step, warmup=25, rep=250, return_mode="median")}


def _gpu(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds that the GPU is busy in a step, and the peak of its memory."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"step_kernels_ms": _kernel_time(step), "step_peak_mb": peak}


#: What a worker can be asked after its first step.
ANSWERS = {"time": _time, "gpu": _gpu, "profile": lambda step: {"kernels": kernels(step, runs=3)}}


def _work(name: str, peer: str, smoke: bool) -> None:
    """Print the row of the first step, in a process of its own, and then a row for each line of input, one of ANSWERS."""
    try:
        row, step = _first_step(name, peer, smoke)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        row = {"model": name, "peer": peer, "refused": reason}
    print(json.dumps(row), flush=True)
    for line in () if smoke or "refused" in row else sys.stdin:
        torch.cuda.empty_cache()
        _on_few_cores()
        print(json.dumps(ANSWERS[line.strip()](step)), flush=True)


def _on_few_cores() -> None:
    """Move all threads of this process to a few cores: those of every peer on this GPU."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    first = CORES * int(gpu) if gpu.isdigit() else 0
    cores = range(os.cpu_count())[first : first + CORES] or range(os.cpu_count())
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def start(name: str, peer: str, smoke: bool, caches: str, gpu: str = "") -> subprocess.Popen[str]:
    """Start a worker. gpu: the number of the GPU that it sees, or "" for those that this process sees."""
    command = [sys.executable, "-m", "benchmarks.models", "--worker", "--model", name, "--peer", peer]
    pipe, own = subprocess.PIPE, os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/{name}-{peer}"}
    # More threads of OpenMP than cores would wait for each other in each kernel on the CPU.
    own |= {"OMP_NUM_THREADS": str(CORES)}
    own |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    return subprocess.Popen(command + ["--smoke"] * smoke, stdin=pipe, stdout=pipe, text=True, env=own)


def answer(worker: subprocess.Popen[str], question: str = "") -> dict[str, Any]:
    """Return a row of a worker: that of its first step, or the answer to a question, one of ANSWERS."""
    if question:
        print(question, file=worker.stdin, flush=True)
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker ended: {' '.join(map(str, worker.args))}")
    return json.loads(line)


def _ask(workers: list[subprocess.Popen[str]], rows: list[dict[str, Any]], question: str) -> list[dict[str, Any]]:
    """Return the rows of a model's peers with their answers. The peers take turns; the time is the median of the rounds."""
    able = [i for i, row in enumerate(rows) if "refused" not in row]
    for i in able:
        rows[i] |= answer(workers[i], "gpu" if question == "time" else question)
    if question == "time":
        rounds = [{i: answer(workers[i], "time")["step_ms"] for i in able} for _ in range(ROUNDS)]
        for i in able:
            rows[i]["step_ms"] = statistics.median(times[i] for times in rounds)
    for i in able:
        workers[i].stdin.close()
    return rows


def _rows(chosen: list[tuple[str, str]], question: str, caches: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the chosen models and peers, in order, after all have taken their first step.

    The models are dealt out to the GPUs, and all peers of a model have the same one.
    """
    numbers = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")
    models = list(dict.fromkeys(name for name, _ in chosen))
    places = {name: gpus[i % len(gpus)] for i, name in enumerate(models)}
    one_at_a_time = {gpu: ThreadPoolExecutor(1) for gpu in gpus}
    workers: dict[tuple[str, str], subprocess.Popen[str]] = {}
    try:
        for name, peer in chosen:
            workers[name, peer] = start(name, peer, False, caches, places[name])
        first = {job: answer(worker) for job, worker in workers.items()}
        answers = []
        for name in models:
            jobs = [job for job in chosen if job[0] == name]
            of_peers = [workers[job] for job in jobs], [first[job] for job in jobs]
            answers.append(one_at_a_time[places[name]].submit(_ask, *of_peers, question))
        for found in progress("models", "model", of=answers):
            yield from found.result()
    finally:
        for worker in workers.values():
            worker.kill()
        for pool in one_at_a_time.values():
            pool.shutdown(cancel_futures=True)


def main() -> None:
    """Measure the chosen models and write their rows, anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be given several times")
    parser.add_argument("--peer", action="append", choices=BACKENDS, help="may be given several times")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step, and write nothing")
    parser.add_argument("--smoke", action="store_true", help="one step of a reduced model, and write nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "models.json")
    parser.add_argument("--caches", help="a folder for the caches of each model and peer, which is kept")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    chosen = [(name, peer) for name in given.model or MODELS for peer in given.peer or BACKENDS]
    if given.worker:
        _work(*chosen[0], given.smoke)
        return
    with tempfile.TemporaryDirectory() as temporary:
        caches = given.caches or temporary
        if given.profile:
            for row in _rows(chosen, "profile", caches):
                print(row["model"], row["peer"], row.get("refused", ""))
                for kernel, (count, milliseconds) in row.get("kernels", {}).items():
                    print(f"{count:5} {milliseconds:8.3f} {kernel[:150]}", flush=True)
        elif given.smoke:
            for name, peer in chosen:
                print(start(name, peer, True, caches).communicate()[0].strip().splitlines()[-1], flush=True)
        else:
            _measure(chosen, caches, given.out)


def _measure(chosen: list[tuple[str, str]], caches: str, out: Path) -> None:
    rows: list[dict[str, Any]] = []
    for row in _rows(chosen, "time", caches):
        print(json.dumps(row), flush=True)
        rows.append(row)
        write_rows(out, "models", "model", rows, {"transformers": hf.__version__})


if __name__ == "__main__":
    main()
