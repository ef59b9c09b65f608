"""flex_attention with learned biases, and attention that is spelt out.

``dropout(p)`` makes kernel options with which flex_attention drops probabilities, and ``dropout_mask`` returns which it
keeps. They are imported when they are used, so that importing a part of this package does not import all of it.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["dropout", "dropout_mask"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".kernel_dropout", __name__), name)
