"""Masks in a score_mod: numbers stay finite in base 2, and rows that are hidden as a whole are shifted.

Models mask a score with a large negative number. A row in which every key is masked keeps the scores that this leaves: with
the lowest number of the dtype, a uniform row. Two things would change that in a kernel:

    it computes exponentials in base 2, and the lowest number times log2(e) is -inf. So the lowest numbers are halved.
    it stores one number for each row, the logsumexp, and a logsumexp of -1e38 cannot tell a row of one key from a row of a
    thousand. Softmax does not change if a number is subtracted from a whole row, so the largest number that the masks add
    to a row is subtracted, wherever it is that low.

A mask is a part of a sum, or a branch of a ``where``, that depends neither on the scores nor on anything learned. Its
largest number in each row is computed outside the kernel.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...core.fx import dtype_of, fake_tensor, working_dtype
from ..kinds import K
from .elements import Apply, Constant, Element, Read, Score
from .lifting import NotAttention

#: A row whose masks are nowhere higher is shifted. The scores of other rows are precise enough as they are.
LOWEST_UNSHIFTED = -1e3
_SUMS = {"add", "iadd", "add_"}
_DIFFERENCES = {"sub", "isub", "sub_", "subtract"}
_FACTORS = {"mul", "imul", "mul_", "multiply", "div", "truediv", "itruediv", "div_", "true_divide"}
_CASTS = {"to", "float", "double", "contiguous"}


@dataclass(frozen=True)
class Masked:
    """score: the score, with masks that stay finite. masks: what they add to it, or None if nothing is hidden."""

    score: Element
    masks: Element | None


def masked(score: Element) -> Masked:
    """Split the masks off a score. Raises NotAttention if there may be a mask in a place where it is not understood."""
    if not _is_learned(score):
        finite = _finite(score)
        return Masked(finite, finite)
    if isinstance(score, Apply) and (rule := _RULES.get(_name(score))) is not None:
        found = rule(score)
        if found is not None:
            return found
    _check_ordinary(score)
    return Masked(score, None)


def may_hide(masks: Element) -> bool:
    """Return whether masks may be lower than any score of an ordinary row."""
    reads_floats = any(isinstance(e, Read) and _is_float(e) for e in masks.walk())
    return reads_floats or any(x < LOWEST_UNSHIFTED for x in _numbers(masks))


def shifted(score: Element, row: Read) -> Element:
    """Return ``score - row``, at least in fp32."""
    dtype = working_dtype(_dtype(score))
    wide = Apply("call_method", "to", (score, dtype), {}, dtype)
    return Apply("call_function", operator.sub, (wide, row), {}, dtype)


# ------------------------------------------------ where masks are understood


def _sum(score: Apply) -> Masked | None:
    if len(score.args) != 2 or score.kwargs:
        return None
    first, second = (_part(a, score.dtype) for a in score.args)
    return Masked(replace(score, args=(first.score, second.score)), _added(first.masks, second.masks, score.dtype))


def _difference(score: Apply) -> Masked | None:
    if len(score.args) != 2 or score.kwargs or (isinstance(score.args[1], Element) and _is_learned(score.args[1])):
        return None
    second = score.args[1]
    negated = (
        -second if isinstance(second, (int, float)) else Apply("call_function", operator.neg, (second,), {}, _dtype(second))
    )
    return _sum(replace(score, op="call_function", target=operator.add, args=(score.args[0], negated)))


def _where(score: Apply) -> Masked | None:
    if len(score.args) != 3 or score.kwargs or _is_learned(score.args[0]):
        return None
    condition, *branches = score.args
    dtype = working_dtype(score.dtype)
    first, second = (_part(b, dtype) for b in branches)
    zero = Constant(0.0, dtype)
    masks = Apply("call_function", torch.where, (condition, first.masks or zero, second.masks or zero), {}, dtype)
    return Masked(replace(score, args=(condition, first.score, second.score)), masks)


def _masked_fill(score: Apply) -> Masked | None:
    arguments = dict(zip(("input", "mask", "value"), score.args, strict=False)) | score.kwargs
    if set(arguments) != {"input", "mask", "value"}:
        return None
    branches = (arguments["mask"], _as_element(arguments["value"], score.dtype), arguments["input"])
    return _where(Apply("call_function", torch.where, branches, {}, score.dtype))


def _scaled(score: Apply) -> Masked | None:
    numbers = [a for a in score.args if type(a) in (int, float)]
    if len(score.args) != 2 or score.kwargs or len(numbers) != 1 or numbers[0] <= 0 or score.args[1] is not numbers[0]:
        return None
    inner = _part(score.args[0], score.dtype)
    if inner.masks is None:
        return Masked(score, None)
    scale = lambda x: replace(score, op="call_function", target=_FUNCTION[_name(score)], args=(x, numbers[0]))  # noqa: E731
    return Masked(scale(inner.score), replace(scale(inner.masks), dtype=working_dtype(score.dtype)))


def _cast(score: Apply) -> Masked | None:
    if not score.dtype.is_floating_point:
        return None
    inner = _part(score.args[0], score.dtype)
    return Masked(replace(score, args=(inner.score, *score.args[1:])), inner.masks)


_FUNCTION = {name: operator.mul if "mul" in name else operator.truediv for name in _FACTORS}
_RULES = {
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(_DIFFERENCES, _difference),
    **dict.fromkeys(_FACTORS, _scaled),
    **dict.fromkeys(_CASTS, _cast),
    "where": _where,
    "masked_fill": _masked_fill,
    "masked_fill_": _masked_fill,
}


def _part(x: Any, dtype: torch.dtype) -> Masked:
    return masked(x if isinstance(x, Element) else Constant(float(x), working_dtype(dtype)))


def _added(first: Element | None, second: Element | None, dtype: torch.dtype) -> Element | None:
    if first is None or second is None:
        return second if first is None else first
    return Apply("call_function", operator.add, (first, second), {}, working_dtype(dtype))


def _check_ordinary(score: Element) -> None:
    """Raise NotAttention if there may be a mask in an expression of scores and learned tensors that is no sum."""
    if any(x < LOWEST_UNSHIFTED for x in _numbers(score)):
        raise NotAttention("a number that may be a mask is chosen or changed by what is learned")
    has_score = any(isinstance(e, Score) for e in score.walk())
    frozen = [e for e in score.walk() if isinstance(e, Read) and _is_float(e) and not _is_learned(e)]
    if has_score and any(K in e.positions() for e in frozen):
        raise NotAttention("a tensor that may be a mask is part of an expression that is no sum")


# ------------------------------------------------ finite masks


def _finite(mask: Element) -> Element:
    """Return a mask with numbers that are finite in base 2, where it hides as it does. -inf stays what it is."""
    if not _dtype(mask).is_floating_point or _dtype(mask) is torch.float16:
        return mask
    half = torch.finfo(working_dtype(_dtype(mask))).min / 2
    if isinstance(mask, Constant):
        low = -float("inf") < mask.value < half
        return Constant(half, mask.dtype) if low else mask
    if isinstance(mask, Apply) and _name(mask) == "where" and len(mask.args) == 3:
        branches = (_finite(_as_element(x, mask.dtype)) for x in mask.args[1:])
        return replace(mask, args=(mask.args[0], *branches))
    if isinstance(mask, Apply) and not any(isinstance(e, Read) and _is_float(e) for e in mask.walk()) and not _low(mask):
        return mask
    low = Apply("call_function", operator.lt, (mask, half), {}, torch.bool)
    halved = Apply("call_function", operator.mul, (mask, 0.5), {}, _dtype(mask))
    return Apply("call_function", torch.where, (low, halved, mask), {}, _dtype(mask))


def _low(mask: Element) -> bool:
    """Return whether there is a number in an expression that is large enough for a mask, whatever its sign."""
    return any(abs(x) > -LOWEST_UNSHIFTED for x in _numbers(mask))


# ------------------------------------------------ properties


def _is_learned(x: Any) -> bool:
    """Return whether an element depends on the scores or on a tensor that needs a gradient."""
    if not isinstance(x, Element):
        return False
    return any(isinstance(e, Score) or (isinstance(e, Read) and fake_tensor(e.node).requires_grad) for e in x.walk())


def _is_float(read: Read) -> bool:
    return dtype_of(read.node).is_floating_point


def _numbers(score: Element) -> list[float]:
    found: list[Any] = []
    for e in score.walk():
        found += [e.value] if isinstance(e, Constant) else []
        found += [*e.args, *e.kwargs.values()] if isinstance(e, Apply) else []
    return [float(x) for x in found if type(x) in (int, float) and abs(x) != float("inf")]


def _as_element(x: Any, dtype: torch.dtype) -> Element:
    return x if isinstance(x, Element) else Constant(x, dtype)


def _dtype(element: Element) -> torch.dtype:
    if isinstance(element, Score):
        return torch.float32
    return dtype_of(element.node) if isinstance(element, Read) else element.dtype


def _name(element: Apply) -> str:
    return element.target if isinstance(element.target, str) else element.target.__name__
