"""``import gradfuse`` is ``import inductor_ext``; the name also lets ``TORCH_LOGS="+gradfuse"`` name our logger."""

from typing import Any

import inductor_ext
from inductor_ext import __all__, __version__  # noqa: F401


def __getattr__(name: str) -> Any:
    return getattr(inductor_ext, name)
