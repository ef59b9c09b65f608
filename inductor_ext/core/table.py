"""Output for people: tables that fit the terminal, short paths, and progress bars."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: The numbers of characters that the table format adds between two columns, at both ends, and around a heading.
_BETWEEN, _ENDS, _AROUND_A_HEADING = 3, 4, 2
#: The width of a table if the width of the terminal is not known.
DEFAULT_WIDTH = 100
#: A progress bar appears after this many seconds.
PATIENCE = 3.0


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Format a table. Its cells are wrapped, so that no line is longer than ``width`` (default: the terminal's width)."""
    from tabulate import tabulate

    width = _width() if width is None else width
    # If the terminal is too narrow for a table, it wraps the lines itself.
    room = max(width - _BETWEEN * (len(header) - 1) - _ENDS, 12 * len(header))
    longest = [max(len(line) for row in rows for line in row[i].splitlines() or [""]) for i in range(len(header))]
    # tabulate leaves space at both sides of a heading.
    longest = [max(n, len(name) + _AROUND_A_HEADING) for n, name in zip(longest, header, strict=True)]
    widths = column_widths(longest, room)
    return tabulate(rows, header, tablefmt="simple_grid", maxcolwidths=widths, disable_numparse=True)


def wrapped(text: str, width: int | None = None) -> str:
    """Wrap a text into lines of at most ``width`` characters (default: the terminal's width)."""
    return textwrap.fill(text, _width() if width is None else width)


def _width() -> int:
    return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns


def column_widths(longest: Sequence[int], room: int) -> list[int]:
    """Return the width of each column: the width that it needs, or an equal share of ``room`` if it needs more than that."""
    widths = [0] * len(longest)
    left = room
    for count, column in enumerate(sorted(range(len(longest)), key=lambda i: longest[i])):
        widths[column] = max(1, min(longest[column], left // (len(longest) - count)))
        left -= widths[column]
    return widths


_SITE_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")


def short_path(file: str) -> str:
    """Return a path relative to the working directory, site-packages or the home directory if it is in one of them."""
    if _SITE_PACKAGES.match(file):
        return _SITE_PACKAGES.sub("", file)
    for base, mark in ((os.getcwd(), ""), (str(Path.home()), "~/")):
        if base != "/" and file.startswith(base.rstrip("/") + "/"):
            return mark + file[len(base.rstrip("/")) + 1 :]
    return file


def progress(what: str, unit: str, *, of: Iterable[Any] | None = None, total: int | None = None) -> Any:
    """Return a ``tqdm`` bar on stderr. It appears after a few seconds, and only if stderr is a terminal.

    of: the iterable over which the bar iterates. Without it, the caller uses the bar as a context manager and calls
    ``update()`` on it ``total`` times.
    """
    from tqdm import tqdm

    return tqdm(of, desc=what, unit=unit, total=total, delay=PATIENCE, leave=False, disable=None)
