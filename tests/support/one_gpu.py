"""A pytest plugin for machines with several GPUs: ``CUDA_VISIBLE_DEVICES=0,1 pytest -p tests.support.one_gpu -n 29``.

Each worker of pytest-xdist sees one of the GPUs in that list. Tests marked ``full`` are last. If the variable OUT names a
folder, each outcome is written to its file ``outcomes.txt`` as it comes, so that a run that is cut off has results too, and each
phase of a test to ``phases.txt``: when it ended and how long it took, in seconds. If the variable DONE names a file of outcomes,
the tests that have passed there are left out.
"""

import os
import time
from pathlib import Path

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")

if WORKER and len(GPUS) > 1:
    os.environ["CUDA_VISIBLE_DEVICES"] = GPUS[int(WORKER.removeprefix("gw")) % len(GPUS)]


BEGIN = time.monotonic()


def pytest_collection_modifyitems(items):
    """Start with the tests that matter most, and leave out those that have passed."""
    items.sort(key=lambda item: item.get_closest_marker("full") is not None)
    if "DONE" in os.environ:
        lines = Path(os.environ["DONE"]).read_text().splitlines()
        passed = {line.split(" ", 2)[2] for line in lines if line.startswith("passed ")}
        items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_logreport(report):
    """Write the outcome of a test, in the process that collects them."""
    if WORKER or "OUT" not in os.environ:
        return
    with (Path(os.environ["OUT"]) / "phases.txt").open("a") as file:
        file.write(f"{time.monotonic() - BEGIN:.1f} {report.duration:.1f} {report.when} {report.nodeid}\n")
    if not (report.when == "call" or report.failed or report.skipped):
        return
    with (Path(os.environ["OUT"]) / "outcomes.txt").open("a") as file:
        file.write(f"{report.outcome} {report.duration:.1f} {report.nodeid}\n")
        if report.failed:
            file.write(f"{str(report.longrepr)[-6000:]}\n")
