"""Shapes of which a part may be symbolic, or known only once the data is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..torch_api.sizes import statically_known_true


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal, without a guard."""
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in zip(a, b, strict=True))
