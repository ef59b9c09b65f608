"""Texts for people: a table as wide as the terminal, paths as short as they can be, a bar while something slow runs."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: Characters between two columns of the table format that is used here, at both ends, and around a heading.
_BETWEEN, _ENDS, _AROUND_A_HEADING = 3, 4, 2
#: The width of a table where nobody knows that of the terminal.
DEFAULT_WIDTH = 100
#: Seconds before a progress bar appears.
PATIENCE = 3.0


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """A table of texts, its cells wrapped so that no line is longer than ``width`` (default: that of the terminal)."""
    from tabulate import tabulate

    width = _width() if width is None else width
    # A terminal too narrow for a table wraps the lines itself.
    room = max(width - _BETWEEN * (len(header) - 1) - _ENDS, 12 * len(header))
    longest = [max(len(line) for row in rows for line in row[i].splitlines() or [""]) for i in range(len(header))]
    # tabulate leaves room at the sides of a heading.
    longest = [max(n, len(name) + _AROUND_A_HEADING) for n, name in zip(longest, header, strict=True)]
    widths = column_widths(longest, room)
    return tabulate(rows, header, tablefmt="simple_grid", maxcolwidths=widths, disable_numparse=True)


def wrapped(text: str, width: int | None = None) -> str:
    """A text in lines of at most ``width`` characters (default: as many as the terminal has)."""
    return textwrap.fill(text, _width() if width is None else width)


def _width() -> int:
    return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns


def column_widths(longest: Sequence[int], room: int) -> list[int]:
    """How wide each column may be: what it needs where that is less than its share of ``room``, else an equal share."""
    widths = [0] * len(longest)
    left = room
    for count, column in enumerate(sorted(range(len(longest)), key=lambda i: longest[i])):
        widths[column] = max(1, min(longest[column], left // (len(longest) - count)))
        left -= widths[column]
    return widths


_SITE_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")


def short_path(file: str) -> str:
    """A path relative to the working directory, or to site-packages; else from the home directory, else as it is."""
    if _SITE_PACKAGES.match(file):
        return _SITE_PACKAGES.sub("", file)
    for base, mark in ((os.getcwd(), ""), (str(Path.home()), "~/")):
        if base != "/" and file.startswith(base.rstrip("/") + "/"):
            return mark + file[len(base.rstrip("/")) + 1 :]
    return file


def progress(what: str, unit: str, *, of: Iterable[Any] | None = None, total: int | None = None) -> Any:
    """A ``tqdm`` bar on stderr, shown after a few seconds only, and only where stderr is a terminal.

    of: what is iterated over; without it the caller calls ``update()`` on the bar, a context manager, ``total`` times.
    """
    from tqdm import tqdm

    return tqdm(of, desc=what, unit=unit, total=total, delay=PATIENCE, leave=False, disable=None)
