"""Run these tests and write the composition table's data: ``python -m tests.composition --json FILE [pytest arguments]``.

    python -m tests.composition --json benchmarks/results/composition.json -m "not slow"
    python -m tests.composition --json benchmarks/results/composition.json -m "gpu or multi_gpu"

Rows are kept by device and number of processes, so runs on several machines add up in one file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch


class Recorder:
    """A pytest plugin that records the outcome of each scenario."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, dict[str, Any]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The outcome of a test is that of its call, unless its set-up or tear-down fails."""
        properties = dict(report.user_properties)
        if report.skipped or (report.when != "call" and not report.failed):
            return
        cuda = {"gpu", "multi_gpu"} & set(report.keywords)
        setting = f"{'cuda' if cuda else 'cpu'}-{properties.get('world', 1)}"
        subject = Path(report.nodeid.partition("::")[0]).stem.removeprefix("test_")
        outcome = "failed" if report.failed else "stock fails too" if "stock" in properties else "passed"
        row = {"outcome": outcome, "seconds": round(report.duration, 1)}
        if "stock" in properties:
            row["stock"] = properties["stock"]
        elif report.failed:
            row["stock"] = "passes or was not asked"
        self.runs.setdefault(setting, {})[f"{subject}: {report.nodeid.partition('::')[2]}"] = row


def environment(setting: str) -> dict[str, Any]:
    """Return the device, the versions and the date of the runs."""
    cuda = setting.startswith("cuda")
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "processes": int(setting.partition("-")[2]),
    }


def write(path: Path, runs: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Add the runs to the file; a scenario that ran again replaces its row."""
    result = json.loads(path.read_text()) if path.exists() else {}
    for setting, rows in runs.items():
        known = result.setdefault(setting, {"rows": {}})
        known["environment"] = environment(setting)
        known["rows"] = dict(sorted((known["rows"] | rows).items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(result.items())), indent=1) + "\n")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    given, arguments = parser.parse_known_args()
    recorder = Recorder()
    folder = str(Path(__file__).parent)
    if not any(Path(a.partition("::")[0]).exists() for a in arguments):
        arguments.append(folder)
    status = int(pytest.main(arguments, plugins=[recorder]))
    write(given.json, recorder.runs)
    return status


if __name__ == "__main__":
    sys.exit(main())
