"""``gradfuse bisect SCRIPT``: which of our passes, on which graph, makes a script fail, and a small file that shows it.

The script fails if its exit code is not 0: it raises, or asserts that a loss or a gradient is right. It runs a dozen times.
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

#: More graphs than any script compiles.
_MOST_GRAPHS = 1024


@dataclass(frozen=True)
class Script:
    """A script with its arguments; every run is a process of its own."""

    path: str
    arguments: Sequence[str]

    def fails(self, disabled: Sequence[str] = (), graphs: int | None = None, repro: Path | None = None) -> bool:
        """Whether it fails without some passes, with our passes on the first ``graphs`` graphs alone.

        repro: where the last of these graphs is to be written.
        """
        environment = {**os.environ, "GRADFUSE_DISABLE": ",".join(disabled)}
        environment |= {} if graphs is None else {"GRADFUSE_GRAPHS": str(graphs)}
        environment |= {} if repro is None else {"GRADFUSE_REPRO": str(repro)}
        run = subprocess.run([sys.executable, self.path, *self.arguments], env=environment, capture_output=True)
        return run.returncode != 0


def first(fails: Callable[[int], bool], most: int) -> int:
    """The least n in 1 .. most for which ``fails(n)``, given that it fails for ``most`` and for all above the least."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle + 1, high)
    return low


def run(path: str, arguments: Sequence[str] = (), repro: str = "gradfuse_repro.py") -> int:
    """Find the guilty pass and graph, print them and write ``repro``; 0 where they are found."""
    script, names = Script(path, arguments), list(NAMES)
    print(f"Running {path} as it is ...", flush=True)
    if not script.fails():
        print("It succeeds: there is nothing to find.")
        return 1
    print("It fails. Running it without our passes ...", flush=True)
    if script.fails(names):
        print('It fails without any pass of gradfuse too. Try backend="inductor", and torch._inductor.compiler_bisector.')
        return 1

    def with_passes(count: int) -> bool:
        print(f"  with {', '.join(names[:count])} ...", flush=True)
        return script.fails(names[count:])

    guilty = first(with_passes, len(names)) - 1
    others = names[guilty + 1 :]

    # Halving 1 .. n takes at most as many runs as n - 1 has binary digits.
    with progress("finding the graph", "run", total=(_MOST_GRAPHS - 1).bit_length()) as bar:

        def with_graphs(count: int) -> bool:
            failed = script.fails(others, graphs=count)
            bar.update()
            return failed

        count = first(with_graphs, _MOST_GRAPHS)
    script.fails(others, graphs=count, repro=Path(repro))
    print(f"The pass {names[guilty]!r} makes it fail ({NAMES[names[guilty]]}), on graph {count - 1}.")
    print(f"options={{'disable': [{names[guilty]!r}]}} leaves it out. {repro} shows that graph with its inputs.")
    return 0
