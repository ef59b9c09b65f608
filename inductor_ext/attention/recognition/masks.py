"""Masks in a score_mod: rows of scores that masks move far from zero are moved back.

Models mask a score with a large negative number. A row in which every key is masked keeps the scores that this leaves: with
the lowest number of the dtype, a uniform row. A kernel stores one number for each row, the logsumexp, and a logsumexp of
-1e38 cannot tell a row of one key from a row of a thousand. Softmax does not change if a number is subtracted from a whole
row, so the largest number that the masks add to a row is subtracted, wherever that is far from zero.

A mask is a part of a sum, or a branch of a ``where``, that depends neither on the scores nor on anything learned, or a
learned tensor into which this graph or an earlier one may have put a mask. Its largest number in each row is computed
outside the kernel, unless it is known to be small.
"""

from __future__ import annotations

import contextlib
import math
import operator
from typing import Any

import torch
from torch.fx import Node

from ...core.fx import dtype_of, fake_tensor, requires_grad, working_dtype
from ...core.terms import is_tensor, op
from ..footprints import is_pointwise
from ..kinds import K
from .elements import Apply, Constant, Element, Read, Score
from .indices import Ranges
from .lifting import NotAttention
from .magnitudes import Magnitudes
from .views import VIEWS

#: A row is shifted if the largest number of its masks is further from zero. The logsumexp of other rows is precise enough.
FAR = 1e3


def shifted(score: Element, row: Read) -> Element:
    """Return ``score - row``, at least in fp32."""
    dtype = working_dtype(_dtype(score))
    wide = Apply("call_method", "to", (score, dtype), {}, dtype)
    return Apply("call_function", operator.sub, (wide, row), {}, dtype)


class _NotASum(Exception):
    """An expression is not a sum, or none whose parts are understood."""


class Masks:
    """The masks in one score. ranges: those of its positions."""

    def __init__(self, ranges: Ranges) -> None:
        self._magnitudes = Magnitudes(ranges)
        self._found: dict[Element, Element | None] = {}

    def row_maximum_of(self, score: Element) -> Element | None:
        """Return what a score adds that may be far from zero, so that its largest number in each row must be computed.

        Returns None if there is nothing like that. -inf does not count: it hides a key from any row. Raises NotAttention if
        there may be a mask in a place where it is not understood.
        """
        masks = self._of(score)
        return None if masks is None or self._magnitudes.of(masks) <= FAR else masks

    def _of(self, score: Element) -> Element | None:
        """Return the part of a score that may be a mask, or None."""
        if score not in self._found:
            self._found[score] = self._computed(score)
        return self._found[score]

    def _computed(self, score: Element) -> Element | None:
        if not is_learned(score) or (isinstance(score, Read) and _may_hold_a_mask(score)):
            return score
        rules = {"add": self._sum, "sub": self._sum, "mul": self._scaled, "div": self._scaled, "to": self._cast}
        rules |= {"where": self._where, "masked_fill": self._masked_fill}
        if isinstance(score, Apply) and score.name in rules:
            with contextlib.suppress(_NotASum):
                return rules[score.name](score)
        _check_ordinary(score)
        return None

    def _part(self, x: Any, dtype: torch.dtype) -> Element | None:
        return self._of(x if isinstance(x, Element) else Constant(x, working_dtype(dtype)))

    def _sum(self, score: Apply) -> Element | None:
        if len(score.args) != 2 or score.kwargs:
            raise _NotASum
        first, second = (self._part(a, score.dtype) for a in score.args)
        if second is not None and score.name == "sub":
            second = Apply("call_function", operator.neg, (second,), {}, _dtype(second))
        if first is None or second is None:
            return second if first is None else first
        return Apply("call_function", operator.add, (first, second), {}, working_dtype(score.dtype))

    def _where(self, score: Apply) -> Element:
        if len(score.args) != 3 or score.kwargs:
            raise _NotASum
        return self._chosen(*score.args, score.dtype)

    def _masked_fill(self, score: Apply) -> Element:
        arguments = dict(zip(("input", "mask", "value"), score.args, strict=False)) | score.kwargs
        if set(arguments) != {"input", "mask", "value"}:
            raise _NotASum
        return self._chosen(arguments["mask"], arguments["value"], arguments["input"], score.dtype)

    def _chosen(self, condition: Any, first: Any, second: Any, dtype: torch.dtype) -> Element:
        if is_learned(condition):
            raise _NotASum
        zero = Constant(0.0, working_dtype(dtype))
        branches = (self._part(x, dtype) or zero for x in (first, second))
        return Apply("call_function", torch.where, (condition, *branches), {}, working_dtype(dtype))

    def _scaled(self, score: Apply) -> Element | None:
        number = score.args[1] if len(score.args) == 2 and not score.kwargs else None
        if type(number) not in (int, float) or number <= 0:
            raise _NotASum
        inner = self._part(score.args[0], score.dtype)
        if inner is None:
            return None
        factor = operator.mul if score.name == "mul" else operator.truediv
        return Apply("call_function", factor, (inner, number), {}, working_dtype(score.dtype))

    def _cast(self, score: Apply) -> Element | None:
        if not score.dtype.is_floating_point:
            raise _NotASum
        return self._part(score.args[0], score.dtype)


def _check_ordinary(score: Element) -> None:
    """Raise NotAttention if there may be a mask in an expression of scores and learned tensors that is no sum."""
    values = list(score.walk(indices=False))
    reads = [e for e in values if isinstance(e, Read) and _is_float(e)]
    far = any(abs(x) > FAR for e in values for x in _numbers(e))
    if far or (score not in reads and any(_has_far_numbers(e.node) for e in reads if is_learned(e))):
        raise NotAttention("a number that may be a mask is chosen or changed by what is learned")
    has_score = any(isinstance(e, Score) for e in values)
    if has_score and any(K in e.positions() and not is_learned(e) for e in reads):
        raise NotAttention("a tensor that may be a mask is part of an expression that is no sum")


# ------------------------------------------------ learned tensors that may hold a mask


def _may_hold_a_mask(read: Read) -> bool:
    """Return whether a mask may have been added to a learned tensor.

    A parameter, and what layers compute, is no mask. Another tensor that is passed to the graph may hold one.
    """
    return requires_grad(read.node) and (_has_far_numbers(read.node) or any(map(_is_passed, _parts(read.node))))


def _has_far_numbers(node: Node) -> bool:
    """Return whether the graph puts a number that is far from zero into a tensor."""
    arguments = [a for x in _parts(node) if op(x) not in VIEWS for a in (*x.args, *x.kwargs.values())]
    return any(type(a) in (int, float) and FAR < abs(a) < math.inf for a in arguments)


def _is_passed(node: Node) -> bool:
    return node.op == "placeholder" and requires_grad(node) and not isinstance(fake_tensor(node), torch.nn.Parameter)


def _parts(node: Node) -> set[Node]:
    """Return the nodes from which a tensor is made by ops that move, choose or add numbers."""
    seen, pending = {node}, [node]
    while pending:
        x = pending.pop()
        if op(x) in VIEWS or op(x) in _JOINS or is_pointwise(op(x), len(x.all_input_nodes)):
            floats = {n for n in x.all_input_nodes if is_tensor(n) and dtype_of(n).is_floating_point}
            pending += floats - seen
            seen |= floats
    return seen


#: Ops that put tensors, or a tensor and a number, side by side.
_JOINS = {"pad", "cat", "concat", "stack", "masked_fill", "where", "index_put", "scatter"}


# ------------------------------------------------ properties


def is_learned(x: Any) -> bool:
    """Return whether an element depends on the scores or on a tensor that needs a gradient."""
    if not isinstance(x, Element):
        return False
    return any(isinstance(e, Score) or (isinstance(e, Read) and requires_grad(e.node)) for e in x.walk())


def _is_float(read: Read) -> bool:
    return dtype_of(read.node).is_floating_point


def _numbers(element: Element) -> list[float]:
    """Return the finite Python numbers in an element itself, without its parts."""
    found: tuple[Any, ...] = (element.value,) if isinstance(element, Constant) else ()
    found += (*element.args, *element.kwargs.values()) if isinstance(element, Apply) else ()
    return [float(x) for x in found if type(x) in (int, float) and abs(x) != math.inf]


def _dtype(element: Element) -> torch.dtype:
    return dtype_of(element.node) if isinstance(element, Read) else element.dtype
