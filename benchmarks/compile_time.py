"""Seconds of the first step of unmodified models, with empty caches (cold) and then with full ones in a new process (warm).

python -m benchmarks.compile_time                      # ten models; writes results/compile_time.json
python -m benchmarks.compile_time --model mpnet --at-once 2

The processes of a model, stock and gradfuse, run at the same time as others, so that both compile beside the same load. The
rows have the counters of the caches, too: what was hit, missed and loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from inductor_ext.core.table import progress

from .models import MODELS, row_of, start
from .runner import RESULTS, environment

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


def main() -> None:
    """Measure the chosen models, and write the rows anew after each process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be given several times")
    parser.add_argument("--at-once", type=int, default=2 * len(TEN), help="processes at the same time")
    parser.add_argument("--smoke", action="store_true", help="reduced models, on any device")
    parser.add_argument("--out", type=Path, default=RESULTS / "compile_time.json")
    given = parser.parse_args()
    jobs = [(name, peer) for name in given.model or TEN for peer in PEERS]
    rows: dict[tuple[str, str], dict[str, Any]] = {job: dict(zip(("model", "peer"), job, strict=True)) for job in jobs}
    here = environment() | {"transformers": hf.__version__, "cores": os.cpu_count(), "at_once": given.at_once}
    with tempfile.TemporaryDirectory() as caches, ThreadPoolExecutor(given.at_once) as pool:
        for when in ("cold_s", "warm_s"):
            begun = {pool.submit(_first_step, *job, given.smoke, caches): job for job in jobs}
            for done in progress(f"first steps, {when}", "process", of=as_completed(begun)):
                row = rows[begun[done]]
                took = done.result()
                row |= took if "refused" in took else {when: took["first_step_s"], f"{when}_caches": took["caches"]}
                print(json.dumps(row), flush=True)
                result = {"suite": "compile_time", "environment": here, "rows": list(rows.values())}
                given.out.write_text(json.dumps(result, indent=1) + "\n")


def _first_step(name: str, peer: str, smoke: bool, caches: str) -> dict[str, Any]:
    """Return the row of a new process that takes one step. The models are dealt out to the GPUs."""
    numbers = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")
    with start(name, peer, smoke, caches, gpus[list(MODELS).index(name) % len(gpus)]) as worker:
        return row_of(worker, worker.stdout.readline(), "")


if __name__ == "__main__":
    main()
