"""Reports of the decisions: what gradfuse did, where in the user's code, and why.

Every rewrite and lowering calls ``record``, and ``explain`` collects the decisions that are recorded while a model compiles.
The same lines go to the logger ``gradfuse`` as INFO. If an operation is left to stock although the user could change that,
there is also one WARNING for each line of user code.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..torch_api.tracing import traced_meta
from .table import short_path, table

log = logging.getLogger("gradfuse")

#: The path of a decision that leaves an op to stock Inductor.
STOCK = "stock"


@dataclass(frozen=True)
class Decision:
    """One decision: ``pass_name`` did ``path`` to ``op`` at ``where`` in the user's code, because of ``why``.

    graph: the number of the compiled graph that the decision is about. reductions: for the backward of an attention, pairs
    of the index of a captured tensor and the way in which its gradient is reduced.
    """

    pass_name: str
    op: str
    path: str
    why: str
    where: str = ""
    graph: int | None = field(default=None, compare=False, repr=False)
    reductions: tuple[tuple[int, str], ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        return f"{self.pass_name}: {self.op}{at} -> {self.path} ({self.why})"


#: The text of a report if gradfuse changed nothing.
NOTHING = "gradfuse found nothing to do here; stock Inductor compiled everything."


@dataclass
class Report:
    """The decisions of one or several compilations, in order; ``print(report)`` shows a table.

    graphs: the numbers of the compiled graphs, each with the first line of the user's code in it. pictures: the pictures of
    their attentions (``inductor_ext.explanations``), which are collected if ``wants_pictures`` is True.
    """

    decisions: list[Decision] = field(default_factory=list)
    graphs: dict[int, str] = field(default_factory=dict, repr=False)
    pictures: list[Any] = field(default_factory=list, repr=False)
    wants_pictures: bool = field(default=False, repr=False)

    @property
    def fallbacks(self) -> list[Decision]:
        """The decisions that leave an op to stock."""
        return [d for d in self.decisions if d.path == STOCK]

    def of_graph(self, number: int | None) -> Report:
        """Return the part of the report that is about one graph."""
        graphs = {n: where for n, where in self.graphs.items() if n == number}
        pictures = [p for p in self.pictures if p.graph == number]
        return Report([d for d in self.decisions if d.graph == number], graphs, pictures, self.wants_pictures)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the rows of the table without duplicates: the decision, the reason, and the line of the user's code."""
        return list(dict.fromkeys((f"{d.op}\n-> {d.path}\n(pass {d.pass_name})", d.why, d.where) for d in self.decisions))

    def text(self, width: int | None = None) -> str:
        """Return the table with lines of at most ``width`` characters.

        The default is the width of the terminal, or 100 if there is no terminal.
        """
        return table(("decision", "why", "where"), self.rows(), width) if self.decisions else NOTHING

    def __str__(self) -> str:
        return self.text()


_collecting: list[Report] = []
#: The lines of user code and the reasons that the user was already warned about.
_warned: set[tuple[str, str]] = set()


#: The number of the graph that is being compiled.
_graph: ContextVar[int | None] = ContextVar("gradfuse_graph", default=None)


@contextlib.contextmanager
def compiling(number: int, where: str = "") -> Iterator[None]:
    """Decisions inside the block are about the graph of this number, which begins at ``where`` in the user's code."""
    for report in _collecting:
        report.graphs.setdefault(number, where)
    token = _graph.set(number)
    try:
        yield
    finally:
        _graph.reset(token)


@contextlib.contextmanager
def collect(pictures: bool = False) -> Iterator[Report]:
    """Collect every decision that is recorded inside the block; with ``pictures``, also the pictures of attentions.

    Pictures cost a copy of every graph with an attention, and the time to compute its learned terms a second time.
    """
    report = Report(wants_pictures=pictures)
    _collecting.append(report)
    try:
        yield report
    finally:
        _collecting[:] = [r for r in _collecting if r is not report]


def pictures_wanted() -> bool:
    """Return whether some open report collects pictures."""
    return any(report.wants_pictures for report in _collecting)


def record_picture(picture: Any) -> None:
    """Add a picture to every open report that collects pictures."""
    for report in _collecting:
        if report.wants_pictures:
            report.pictures.append(picture)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Record nothing inside the block, where decisions are taken a second time only to look at them."""
    collecting, warned, level = list(_collecting), set(_warned), log.level
    _collecting.clear()
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _collecting[:] = collecting
        _warned.clear()
        _warned.update(warned)
        log.setLevel(level)


def record(
    pass_name: str, op: str, path: str, why: str, where: str = "", reductions: tuple[tuple[int, str], ...] = ()
) -> None:
    """Record one decision in every open report and in the log."""
    decision = Decision(pass_name, op, path, why, where, _graph.get(), reductions)
    for report in _collecting:
        report.decisions.append(decision)
    log.info("%s", decision)


class Refused(NotImplementedError):
    """Raised under ``strict`` if an op for which gradfuse has kernels is left to stock Inductor."""


def leave_to_stock(strict: bool, pass_name: str, op: str, why: str, where: str, advice: str = "") -> None:
    """Record that an op is left to stock Inductor, which costs speed or exactness. Raises Refused under ``strict``.

    The user is warned once for each line of code, and told what to do. There is no second warning for the backward or for
    another compilation.
    """
    record(pass_name, op, STOCK, why, where)
    if strict:
        at = f" at {where}" if where else ""
        raise Refused(f"gradfuse has no kernel for {op}{at}, and the option strict is on: {why}. {advice}".rstrip())
    _warn_once(where, why, f"{op} is left to stock Inductor{f' at {where}' if where else ''}: {why}. {advice}".rstrip())


def warn_of_cost(op: str, why: str, where: str, advice: str) -> None:
    """Warn the user once for a line of code that makes a kernel of ours slow, and say what to do."""
    _warn_once(where, why, f"{op}{f' at {where}' if where else ''} may be slow: {why}. {advice}")


def _warn_once(where: str, why: str, text: str) -> None:
    if (where, why) not in _warned:
        _warned.add((where, why))
        log.warning("%s", text)


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)\n\s*(?P<code>[^\n]*)')


def _is_ours(file: str) -> bool:
    """Return whether a file is part of gradfuse. The demo does not count, because it is written like user code."""
    return "/inductor_ext/" in file and "/inductor_ext/demo/" not in file


def user_line(node: Any) -> str:
    """Return ``path:line: code`` of the user's innermost line that made an FX node, or "" if it is not known.

    Lines of torch and of our ops are skipped.
    """
    return _user_line(node.meta) if node is not None else ""


def traced_line() -> str | None:
    """Return the user's line, as ``user_line``, of what AOTAutograd traces now, or None if nothing is being traced."""
    meta = traced_meta()
    return None if meta is None else _user_line(meta)


def _user_line(meta: dict[str, Any]) -> str:
    frames = list(_FRAME.finditer(meta.get("stack_trace") or ""))
    users = [f for f in frames if "/torch/" not in f["file"] and not _is_ours(f["file"])]
    if not users:
        return ""
    frame = users[-1]
    return f"{short_path(frame['file'])}:{frame['line']}: {frame['code'].strip()}"
