"""How far from zero the values of an element may be."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...core.fx import dtype_of
from .elements import Apply, Constant, Element, Position, Read
from .indices import Ranges

#: The largest values of what a tensor of these dtypes holds. Others are taken to hold anything.
_LARGEST = {torch.bool: 1.0, torch.uint8: 255.0, torch.int8: 128.0}


class Magnitudes:
    """Bounds on the absolute values of elements, for positions in ``ranges``. They need not be reached."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
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
            return float(max(abs(within.low), abs(within.high)))
        if isinstance(element, Read):
            return _LARGEST.get(dtype_of(element.node), math.inf)
        if not isinstance(element, Apply):
            return math.inf
        return 1.0 if element.dtype is torch.bool else self._result(element)

    def _result(self, element: Apply) -> float:
        name, args = element.name, element.args
        if name == "to" and element.dtype.is_floating_point:
            return self.of(args[0])
        if element.kwargs or any(math.isnan(size) for size in map(self.of, args)):
            return math.inf
        if name == "where" and len(args) == 3:
            return self._chosen(*args[1:])
        if name == "masked_fill" and len(args) == 3:
            return self._chosen(args[0], args[2])
        if name in ("add", "sub") and len(args) == 2:
            return self.of(args[0]) + self.of(args[1])
        if name in ("neg", "abs") and len(args) == 1:
            return self.of(args[0])
        if name == "mul" and len(args) == 2:
            first, second = map(self.of, args)
            return math.inf if math.inf in (first, second) else first * second
        if name == "div" and len(args) == 2 and isinstance(args[1], (int, float)) and args[1]:
            return self.of(args[0]) / self.of(args[1])
        return math.inf

    def _chosen(self, *branches: Any) -> float:
        """Return the bound of a choice. A branch that is -inf hides keys, and does not say how large the others are."""
        values = [x.value if isinstance(x, Constant) else x for x in branches]
        return max((self.of(x) for x, value in zip(branches, values, strict=True) if value != -math.inf), default=0.0)
