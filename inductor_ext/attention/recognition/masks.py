"""Masks in a score_mod: rows of scores that masks move far from zero are moved back.

Models mask a score with a large negative number. A row in which every key is masked keeps the scores that this leaves: with
the lowest number of the dtype, a uniform row. A kernel stores one number for each row, the logsumexp, and a logsumexp of
-1e38 cannot tell a row of one key from a row of a thousand. Softmax does not change if a number is subtracted from a whole
row, so the largest number that is added to a row is subtracted, wherever that is far from zero.

A score is a sum of the product and of other terms, scaled and chosen by what does not depend on the product. The largest
number of a term in each row is computed outside the kernel, unless the term is known to be small (magnitudes.py).
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch

from ...core.fx import dtype_of, requires_grad, working_dtype
from ...core.writes import Writes
from ..ordinary import FAR
from .elements import Apply, Constant, Element, Read, Score, depends_on_scores
from .indices import Ranges
from .lifting import NotAttention
from .magnitudes import Magnitudes


def shifted(score: Element, row: Read) -> Element:
    """Return ``score - row``, at least in fp32."""
    dtype = working_dtype(_dtype(score))
    wide = Apply("call_method", "to", (score, dtype), {}, dtype)
    return Apply("call_function", operator.sub, (wide, row), {}, dtype)


def masks_of(score: Element, ranges: Ranges, writes: Writes) -> Element | None:
    """Return the terms of a score that decide which number of a row is the largest, or None if all of them are small.

    Softmax is over the keys that -inf does not hide. If all the others of a row are far from zero, the largest of these
    counts, so that -inf counts where there is another mask. Raises NotAttention where a mask would not be understood.
    """
    if Masks(ranges, writes).far(score) is None:
        return None
    return Masks(ranges, writes, minus_infinity=True).far(score)


class _NotASum(Exception):
    """An expression is not a sum, or none whose parts are understood."""


class Masks:
    """The terms of one score that may be far from zero. ranges: those of its positions. writes: those of its graph.

    minus_infinity: whether -inf counts.
    """

    def __init__(self, ranges: Ranges, writes: Writes, minus_infinity: bool = False) -> None:
        self._magnitudes = Magnitudes(ranges, writes, minus_infinity)
        self._found: dict[Element, Element | None] = {}

    def far(self, x: Element) -> Element | None:
        """Return the terms of a score, or of a part of it, that may be far from zero; None if there are none.

        -inf, which hides a key from any row, need not count. Raises NotAttention where a mask would not be understood.
        """
        if x not in self._found:
            self._found[x] = None if self._magnitudes.of(x) <= FAR else self._computed(x)
        return self._found[x]

    def _computed(self, x: Element) -> Element | None:
        if isinstance(x, Score):
            return None
        rules = {"add": self._sum, "sub": self._sum, "neg": self._changed, "to": self._changed, "mul": self._scaled}
        rules |= {"div": self._scaled, "where": self._where, "masked_fill": self._masked_fill}
        if isinstance(x, Apply) and x.name in rules and x.dtype.is_floating_point:
            with contextlib.suppress(_NotASum):
                return rules[x.name](x)
        if not depends_on_scores(x):
            return x
        self._check_ordinary(x)
        return None

    def _part(self, x: Any, dtype: torch.dtype) -> Element | None:
        return self.far(x if isinstance(x, Element) else Constant(x, working_dtype(dtype)))

    def _sum(self, x: Apply) -> Element | None:
        if len(x.args) != 2 or x.kwargs:
            raise _NotASum
        first, second = (self._part(a, x.dtype) for a in x.args)
        if second is not None and x.name == "sub":
            second = Apply("call_function", operator.neg, (second,), {}, _dtype(second))
        if first is None or second is None:
            return second if first is None else first
        return Apply("call_function", operator.add, (first, second), {}, working_dtype(x.dtype))

    def _where(self, x: Apply) -> Element | None:
        if len(x.args) != 3 or x.kwargs:
            raise _NotASum
        return self._chosen(*x.args, x.dtype)

    def _masked_fill(self, x: Apply) -> Element | None:
        arguments = dict(zip(("input", "mask", "value"), x.args, strict=False)) | x.kwargs
        if set(arguments) != {"input", "mask", "value"}:
            raise _NotASum
        return self._chosen(arguments["mask"], arguments["value"], arguments["input"], x.dtype)

    def _chosen(self, condition: Any, first: Any, second: Any, dtype: torch.dtype) -> Element | None:
        branches = [self._part(x, dtype) for x in (first, second)]
        if branches == [None, None]:
            return None
        if is_learned(condition):
            raise NotAttention("a number that may be a mask is chosen by what is learned")
        zero = Constant(0.0, working_dtype(dtype))
        return Apply("call_function", torch.where, (condition, *(x or zero for x in branches)), {}, working_dtype(dtype))

    def _scaled(self, x: Apply) -> Element | None:
        """The factor, or divisor, must not depend on the scores: it is the same in the kernel and outside of it."""
        if len(x.args) != 2 or x.kwargs:
            raise _NotASum
        first, second = x.args
        if x.name == "mul" and not depends_on_scores(first):
            first, second = second, first
        if depends_on_scores(second) or not depends_on_scores(first):
            raise _NotASum
        inner = self.far(first)
        if inner is None:
            return None
        factor = operator.mul if x.name == "mul" else operator.truediv
        return Apply("call_function", factor, (inner, second), {}, working_dtype(x.dtype))

    def _changed(self, x: Apply) -> Element | None:
        if x.kwargs or not isinstance(x.args[0], Element):
            raise _NotASum
        inner = self.far(x.args[0])
        if inner is None or x.name == "to":
            return inner
        return Apply("call_function", operator.neg, (inner,), {}, working_dtype(x.dtype))

    def _check_ordinary(self, x: Apply) -> None:
        """Raise NotAttention if an op of the scores without a rule has another operand that may be far from zero."""
        for part in (*x.args, *x.kwargs.values()):
            if isinstance(part, Element) and depends_on_scores(part):
                if self.far(part) is not None:
                    raise NotAttention("a number that may be a mask is changed by an op of the scores that is no sum")
            elif isinstance(part, (Element, int, float)) and not self._magnitudes.of(part) <= FAR:
                raise NotAttention("a number that may be a mask is part of an op of the scores that is no sum")


# ------------------------------------------------ properties


def is_learned(x: Any) -> bool:
    """Return whether an element depends on the scores or on a tensor that needs a gradient."""
    if not isinstance(x, Element):
        return False
    return any(isinstance(e, Score) or (isinstance(e, Read) and requires_grad(e.node)) for e in x.walk())


def _dtype(element: Element) -> torch.dtype:
    return dtype_of(element.node) if isinstance(element, Read) else element.dtype
