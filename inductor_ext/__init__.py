"""gradfuse: a ``torch.compile`` backend with fused, exact and reproducible backward kernels.

    model = torch.compile(model, backend="gradfuse")

Importing this package registers the backend, which the entry point does by itself where gradfuse is installed.
"""

from .backend import gradfuse
from .core.report import Decision, Report
from .explain import Explanation, explain
from .options import OPTIONS, OptionError

__version__ = "0.1.0"

__all__ = ["OPTIONS", "Decision", "Explanation", "OptionError", "Report", "__version__", "explain", "gradfuse"]
