"""gradfuse: a ``torch.compile`` backend with fused, exact and reproducible backward kernels.

    model = torch.compile(model, backend="gradfuse")

The installed package is found by that name without any import. Importing it costs little: everything below is loaded when it
is first asked for.
"""

import importlib
from importlib.metadata import entry_points
from typing import Any

__version__ = "0.1.0"

#: The public names and the modules that hold them. ``from inductor_ext.mlstm import mlstm, MLSTMCell`` is public too.
_HOMES = {
    "Decision": "core.report",
    "Explanation": "explanations.api",
    "OPTIONS": "options",
    "OptionError": "options",
    "Report": "core.report",
    "explain": "explanations.api",
    "gradfuse": "backend",
}

__all__ = ["OPTIONS", "Decision", "Explanation", "OptionError", "Report", "__version__", "explain", "gradfuse"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not entry_points(group="torch_dynamo_backends", name="gradfuse"):
    # Run from a source tree that is not installed: nothing but this import tells torch.compile of the backend.
    importlib.import_module(".backend", __name__)
