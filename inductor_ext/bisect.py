"""``gradfuse bisect SCRIPT`` finds the pass and the graph that make a script fail, and writes a small file that shows it.

A script fails if its exit code is not 0, for example because it raises, or because it asserts that a loss or a gradient is
right and that is false. The script runs about a dozen times.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .core.table import progress
from .registry import NAMES
from .torch_api import bisector

#: No script compiles more graphs than this.
_MOST_GRAPHS = 1024


@dataclass(frozen=True)
class Script:
    """A script with its arguments. Every run is a new process."""

    path: str
    arguments: Sequence[str]

    def fails(self, disabled: Sequence[str] = (), graphs: int | None = None, repro: Path | None = None) -> bool:
        """Return whether the script fails if some passes are disabled and ours run on the first ``graphs`` graphs only.

        repro: the file to which the last of these graphs is written.
        """
        environment = {**os.environ, "GRADFUSE_DISABLE": ",".join(disabled)}
        environment |= {} if graphs is None else {"GRADFUSE_GRAPHS": str(graphs)}
        environment |= {} if repro is None else {"GRADFUSE_REPRO": str(repro)}
        run = subprocess.run([sys.executable, self.path, *self.arguments], env=environment, capture_output=True)
        return run.returncode != 0


def first(fails: Callable[[int], bool], most: int) -> int:
    """Return the least n in 1 .. most for which ``fails(n)``.

    ``fails`` must be true for ``most``, and for every number above the least one for which it is true.
    """
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle + 1, high)
    return low


def run(path: str, arguments: Sequence[str] = (), repro: str = "gradfuse_repro.py") -> int:
    """Find the pass and the graph that make the script fail, print them and write ``repro``. Returns 0 if they are found."""
    script, names = Script(path, arguments), list(NAMES)
    print(f"Running {path} as it is ...", flush=True)
    if not script.fails():
        print("The script succeeds, so there is no failure to search for.")
        return 1
    print("The script fails. Running it without our passes ...", flush=True)
    if script.fails(names):
        print(f'The script also fails without any pass of gradfuse. Try backend="inductor" and {bisector.MODULE}.')
        return 1

    def with_passes(count: int) -> bool:
        print(f"  with {', '.join(names[:count])} ...", flush=True)
        return script.fails(names[count:])

    guilty = first(with_passes, len(names)) - 1
    others = names[guilty + 1 :]

    # A binary search over 1 .. n takes at most as many runs as n - 1 has binary digits.
    with progress("finding the graph", "run", total=(_MOST_GRAPHS - 1).bit_length()) as bar:

        def with_graphs(count: int) -> bool:
            failed = script.fails(others, graphs=count)
            bar.update()
            return failed

        count = first(with_graphs, _MOST_GRAPHS)
    script.fails(others, graphs=count, repro=Path(repro))
    print(f"The pass {names[guilty]!r} ({NAMES[names[guilty]]}) makes the script fail on graph {count - 1}.")
    print(f"Use options={{'disable': [{names[guilty]!r}]}} to disable this pass. Run {repro} to reproduce the failure: it")
    print("contains this graph and loads the inputs of its first call.")
    return 0
