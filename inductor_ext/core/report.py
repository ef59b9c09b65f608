"""What was decided, where in the user's code, and why.

Every rewrite and lowering calls ``record``; ``explain`` collects what was recorded while a model compiles. The same lines
go to the logger ``gradfuse``: as INFO, and once a line of user code as a WARNING where something is lost that could be had.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("gradfuse")

#: The path of a decision that left the work to stock Inductor.
STOCK = "stock"


@dataclass(frozen=True)
class Decision:
    """One decision: ``pass_name`` did ``path`` to ``op`` at ``where`` in the user's code, because of ``why``."""

    pass_name: str
    op: str
    path: str
    why: str
    where: str = ""

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.pass_name}: {self.op}{place} -> {self.path} ({self.why})"


@dataclass
class Report:
    """The decisions of one or several compilations, in order; ``print(report)`` shows a table."""

    decisions: list[Decision] = field(default_factory=list)

    @property
    def fallbacks(self) -> list[Decision]:
        """The decisions that left an op to stock."""
        return [d for d in self.decisions if d.path == STOCK]

    def __str__(self) -> str:
        if not self.decisions:
            return "gradfuse: nothing to do here; everything was compiled by stock Inductor."
        header = ("pass", "op", "path", "why", "where")
        rows = [header, *dict.fromkeys((d.pass_name, d.op, d.path, d.why, d.where) for d in self.decisions)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(lines)


_collecting: list[Report] = []
#: The places and reasons of which the user was warned.
_warned: set[tuple[str, str]] = set()


@contextlib.contextmanager
def collect() -> Iterator[Report]:
    """Collect every decision recorded inside the block."""
    report = Report()
    _collecting.append(report)
    try:
        yield report
    finally:
        _collecting[:] = [r for r in _collecting if r is not report]


def record(pass_name: str, op: str, path: str, why: str, where: str = "") -> None:
    """Record one decision in every open report and in the log."""
    decision = Decision(pass_name, op, path, why, where)
    for report in _collecting:
        report.decisions.append(decision)
    log.info("%s", decision)


class Refused(NotImplementedError):
    """What ``strict`` raises where something that gradfuse would have compiled is left to stock Inductor."""


def leave_to_stock(strict: bool, pass_name: str, op: str, why: str, where: str, advice: str = "") -> None:
    """Record that an op is left to stock Inductor, which costs speed or exactness. Raises Refused under ``strict``.

    The user is warned once a line of code, with what to do about it: not again for the backward, not for every compilation.
    """
    record(pass_name, op, STOCK, why, where)
    if strict:
        at = f" at {where}" if where else ""
        raise Refused(f"gradfuse (strict) has no kernel for {op}{at}: {why}. {advice}".rstrip())
    if (where, why) not in _warned:
        _warned.add((where, why))
        log.warning("%s", f"{op} is left to stock Inductor{f' at {where}' if where else ''}: {why}. {advice}".rstrip())


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)\n\s*(?P<code>[^\n]*)')


def _is_ours(file: str) -> bool:
    """Whether a file is part of gradfuse; the demo is written as a user would."""
    return "/inductor_ext/" in file and "/inductor_ext/demo/" not in file


def user_line(node: Any) -> str:
    """``file:line: code`` of the user's innermost line that made an FX node (not torch's, nor our ops'); "" if unknown."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or "")) if node is not None else []
    own = [f for f in frames if "/torch/" not in f["file"] and not _is_ours(f["file"])]
    if not own:
        return ""
    frame = own[-1]
    return f"{frame['file'].rsplit('/', 1)[-1]}:{frame['line']}: {frame['code'].strip()}"
