"""How far from zero the values of an element may be."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...core.fx import dtype_of
from ...core.writes import Writes
from ..ordinary import Ordinary
from .elements import Apply, Constant, Element, Position, Read
from .indices import Ranges

#: What a parameter holds, and what layers compute, is taken to be no larger. It is learned, and no mask.
LEARNED = 16.0
#: Elementwise functions with values between -1 and 1.
_UP_TO_ONE = {"sigmoid", "tanh", "sin", "cos", "erf", "sign", "softsign"}


class Magnitudes:
    """Bounds on the absolute values of elements, for positions in ``ranges``. They need not be reached.

    writes: those of the graph. minus_infinity: whether they hold for -inf too.
    """

    def __init__(self, ranges: Ranges, writes: Writes, minus_infinity: bool = False) -> None:
        self._ranges, self._minus_infinity = ranges, minus_infinity
        self._ordinary = Ordinary(writes, minus_infinity)
        self._known: dict[Element, float] = {}

    def of(self, x: Any) -> float:
        """Return the bound of an element or a Python number; inf if none is known."""
        if not isinstance(x, Element):
            return abs(float(x)) if isinstance(x, (bool, int, float)) else math.inf
        if x not in self._known:
            self._known[x] = self._bound(x)
        return self._known[x]

    def _bound(self, element: Element) -> float:
        if isinstance(element, Constant):
            return self.of(element.value)
        if isinstance(element, Position):
            within = self._ranges.interval(element.value)
            return _wrapped(float(max(abs(within.low), abs(within.high))), element.dtype)
        if isinstance(element, Read):
            largest = {torch.bool: 1.0, torch.uint8: 255.0, torch.int8: 128.0}.get(dtype_of(element.node), math.inf)
            return LEARNED if self._ordinary(element.node) else largest
        return _wrapped(self._result(element), element.dtype) if isinstance(element, Apply) else math.inf

    def _result(self, element: Apply) -> float:
        name, args = element.name, element.args
        if element.dtype is torch.bool or name in _UP_TO_ONE:
            return 1.0
        if name == "to":
            return self.of(args[0]) + (not element.dtype.is_floating_point)
        if element.kwargs or any(math.isnan(size) for size in map(self.of, args)):
            return math.inf
        if name == "where" and len(args) == 3:
            return self._chosen(*args[1:])
        if name == "masked_fill" and len(args) == 3:
            return self._chosen(args[0], args[2])
        if name in ("add", "sub") and len(args) == 2:
            return self.of(args[0]) + self.of(args[1])
        if name in ("neg", "abs", "relu") and len(args) == 1:
            return self.of(args[0])
        if name == "mul" and len(args) == 2:
            first, second = map(self.of, args)
            return math.inf if math.inf in (first, second) else first * second
        if name == "div" and len(args) == 2:
            divisor = args[1].value if isinstance(args[1], Constant) else args[1]
            return self.of(args[0]) / abs(divisor) if isinstance(divisor, (int, float)) and divisor else math.inf
        return math.inf

    def _chosen(self, *branches: Any) -> float:
        """Return the bound of a choice. A branch that is -inf hides keys, and does not say how large the others are."""
        values = [x.value if isinstance(x, Constant) else x for x in branches]
        counted = [x for x, n in zip(branches, values, strict=True) if n != -math.inf or self._minus_infinity]
        return max(map(self.of, counted), default=0.0)


def _wrapped(bound: float, dtype: torch.dtype) -> float:
    """Return the bound of a result that is stored in this dtype: narrow integers wrap, and negative ones become large."""
    if dtype.is_floating_point or dtype is torch.bool:
        return bound
    largest = torch.iinfo(dtype).max
    return float(largest) + 1 if bound > largest or not dtype.is_signed else bound
