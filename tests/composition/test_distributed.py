"""Data, tensor, context and expert parallelism: two processes on the CPU, two and four GPUs with ``-m multi_gpu``.

All selected scenarios run one after another in one set of processes, and each test reads its result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from .scenarios import SCENARIOS
from .small import ROOT

#: Scenarios in which stock fails too (``backend="aot_eager"`` without flex_attention's refusal of the CPU), and the reason.
STOCK_FAILS: dict[str, str] = {}
#: These build C++ on the CPU, or cover the same as other scenarios.
SLOW = [name for name, function in SCENARIOS.items() if getattr(function, "generated", False)]
SLOW += ["tp_bucket_bias_sharded_by_head", "cp_pair_bias", "ddp_fp16_hook", "fsdp_per_block_compiled_whole"]
WORLDS = [
    pytest.param(("cpu", 2), id="cpu-2"),
    *(
        pytest.param(
            ("cuda", world),
            id=f"cuda-{world}",
            marks=[
                pytest.mark.multi_gpu,
                pytest.mark.skipif(torch.cuda.device_count() < world, reason=f"needs {world} GPUs"),
            ],
        )
        for world in (2, 4)
    ),
]
#: The longest times, in seconds, for the start and for one scenario.
START, EACH = 120, 90


def run_session(device: str, world: int, names: list[str], folder: Path) -> None:
    """Run the scenarios in ``world`` processes. It always ends within START, and EACH for every scenario."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.composition.worker", "--world", str(world)]
    command += ["--device", device, "--folder", str(folder)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(world):
        with open(folder / f"log.{rank}", "w") as log:
            arguments = [*command, "--rank", str(rank), *names]
            processes.append(subprocess.Popen(arguments, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
    begin, ended = time.time(), set()
    try:
        while any(p.poll() is None for p in processes) and time.time() < begin + START + EACH * len(names):
            time.sleep(0.2)
            for name in set(names) - ended:
                if all((folder / f"{name}.{rank}.json").exists() for rank in range(world)):
                    ended.add(name)
                    print(f"{name} ended after {time.time() - begin:.0f} s", flush=True)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture(scope="module", params=WORLDS)
def session(request, tmp_path_factory):
    """The device, the number of ranks and the folder with the results of the selected scenarios."""
    device, world = request.param
    mine = [
        i
        for i in request.session.items
        if getattr(i, "callspec", None) and i.callspec.params.get("session") == request.param
    ]
    names = list(dict.fromkeys(item.callspec.params["name"] for item in mine if "name" in item.callspec.params))
    folder = tmp_path_factory.mktemp(f"{device}-{world}")
    run_session(device, world, names, folder)
    return device, world, folder


@pytest.mark.breadth(0)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in SCENARIOS])
def test_scenario(session, name, record_property):
    _device, world, folder = session
    record_property("world", world)
    results = []
    for rank in range(world):
        path = folder / f"{name}.{rank}.json"
        assert path.exists(), f"rank {rank} did not finish\n{(folder / f'log.{rank}').read_text()[-3000:]}"
        results.append(json.loads(path.read_text()))
    errors = [r["error"] for r in results if r["error"]]
    stock = [r["stock"] for r in results if r["stock"]]
    if stock:
        record_property("stock", stock[0].strip().splitlines()[-1][:200])
    if name in STOCK_FAILS:
        assert bool(stock) or not errors, f"stock passes now, and {errors[0]}"
        return
    assert not errors, f"{errors[0][-3000:]}\nstock: {stock[0][-600:] if stock else 'passes'}"
