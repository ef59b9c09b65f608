"""Seconds of the first step of unmodified models, with empty caches (cold) and then with full ones in a new process (warm).

python -m benchmarks.compile_time                      # ten models; writes results/compile_time.json
python -m benchmarks.compile_time --model mpnet --at-once 2      # prints the rows, and writes nothing
python -m benchmarks.compile_time --models-run models.json --caches DIR  # after a run of benchmarks.models with --caches DIR

The processes of a model, stock and gradfuse, run at the same time as others, so that both compile beside the same load. Warm
starts are short, and fewer of them run at once, so that they have cores to themselves. The rows have the counters of the
caches, too: what was hit, missed and loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from inductor_ext.core.table import progress

from .models import MODELS, answer, start
from .runner import RESULTS, write_rows

TEN = (
    "t5_base_512",
    "swin_b",
    "beit_b",
    "deberta_v3_base",
    "mpnet",
    "wav2vec2_conformer",
    "esmfold_trunk",
    "mixtral",
    "qwen3_moe",
    "xlstm_125m",
)
PEERS = ("stock", "gradfuse")
#: A model and a peer.
Job = tuple[str, str]


def main() -> None:
    """Measure the chosen models, and write the rows anew after each process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be given several times")
    parser.add_argument("--at-once", type=int, default=2 * len(TEN), help="cold starts at the same time")
    parser.add_argument("--warm-at-once", type=int, default=4, help="warm starts at the same time")
    parser.add_argument("--models-run", type=Path, help="results of a run of benchmarks.models, whose starts are cold")
    parser.add_argument("--caches", help="the folder with the caches of that run")
    parser.add_argument("--smoke", action="store_true", help="reduced models, on any device")
    parser.add_argument("--out", type=Path, help="the file of results; needed for a part of the models")
    given = parser.parse_args()
    if given.models_run and not given.caches:
        parser.error("--models-run needs the --caches of that run, or the warm starts would be cold")
    if given.out is None and not (given.model or given.smoke):
        given.out = RESULTS / "compile_time.json"
    jobs = [(name, peer) for name in given.model or TEN for peer in PEERS]
    rows: dict[Job, dict[str, Any]] = {job: dict(zip(("model", "peer"), job, strict=True)) for job in jobs}
    with tempfile.TemporaryDirectory() as temporary:
        caches = given.caches or temporary
        cold = _of_models(given.models_run, jobs) if given.models_run else _starts(jobs, given.smoke, caches, given.at_once)
        for when, starts in (("cold_s", cold), ("warm_s", _starts(jobs, given.smoke, caches, given.warm_at_once))):
            for job, took in starts:
                rows[job] |= took if "refused" in took else {when: took["first_step_s"], f"{when}_caches": took["caches"]}
                print(json.dumps(rows[job]), flush=True)
                if given.out is not None:
                    _write(list(rows.values()), given)


def _write(rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    at_once = len(json.loads(given.models_run.read_text())["rows"]) if given.models_run else given.at_once
    loads = {"cores": os.cpu_count(), "at_once": at_once, "warm_at_once": given.warm_at_once}
    rows = [row | loads for row in rows]
    write_rows(given.out, "compile_time", "model", rows, {"transformers": hf.__version__})


def _of_models(path: Path, jobs: list[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
    for row in json.loads(path.read_text())["rows"]:
        if (row["model"], row["peer"]) in jobs:
            yield (row["model"], row["peer"]), row


def _starts(jobs: list[Job], smoke: bool, caches: str, at_once: int) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield the rows of first steps in new processes, as they end."""
    with ThreadPoolExecutor(at_once) as pool:
        begun = {pool.submit(_first_step, *job, smoke, caches): job for job in jobs}
        for done in progress("first steps", "process", of=as_completed(begun)):
            yield begun[done], done.result()


def _first_step(name: str, peer: str, smoke: bool, caches: str) -> dict[str, Any]:
    """Return the row of a new process that takes one step. The models are dealt out to the GPUs."""
    numbers = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")
    with start(name, peer, smoke, caches, gpus[list(MODELS).index(name) % len(gpus)]) as worker:
        row = answer(worker)
        worker.stdin.close()
        return row


if __name__ == "__main__":
    main()
