"""Shapes with sizes that may be symbolic, or that depend on the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..torch_api.sizes import statically_known_true


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two shapes are known to be equal. No guard is added."""
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in zip(a, b, strict=True))
