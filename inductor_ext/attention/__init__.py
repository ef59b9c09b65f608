"""flex_attention with learned biases.

``dropout(p)`` makes kernel options with which it drops probabilities, and ``dropout_mask`` returns which it keeps.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["dropout", "dropout_mask"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".kernel_dropout", __name__), name)
