"""Templates in Gluon, Triton's language in which warps, layouts and barriers are explicit.

Inductor emits, builds and launches kernels in Triton's language only. A kernel in Gluon is the same kind of object, so that
it needs three things: another decorator, names of Gluon in its source, and that Triton is told how to read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch._inductor.runtime import triton_heuristics
from torch._inductor.select_algorithm import TritonTemplateKernel

#: What an emitted kernel begins with. It also prepares the process in which Inductor builds it.
_IMPORTS = """
from inductor_ext.torch_api.gluon import prepare
from inductor_ext.core.gluon_names import *
prepare()
"""


def prepare() -> None:
    """Let Inductor build kernels of Gluon in this process."""
    if not hasattr(triton_heuristics.ASTSource, "of_triton"):
        triton_heuristics.ASTSource = _Source(triton_heuristics.ASTSource)


class _Source:
    """Makes the source of a kernel for Triton's compiler, for kernels of either language."""

    def __init__(self, of_triton: Callable[..., Any]) -> None:
        self.of_triton = of_triton

    def __call__(self, kernel: Any, *arguments: Any, **options: Any) -> Any:
        if not getattr(kernel, "is_gluon", bool)():
            return self.of_triton(kernel, *arguments, **options)
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, *arguments, **options)


class GluonKernel(TritonTemplateKernel):
    """A kernel whose template is in Gluon. What Inductor inlines into it is in Triton's language."""

    def jit_lines(self) -> str:
        """Return the lines in front of the kernel's ``def``."""
        return super().jit_lines().replace("@triton.jit", "@gluon.jit")

    @classmethod
    def gen_common_triton_imports(cls) -> str:
        """Return the imports of the kernel's module."""
        return super().gen_common_triton_imports() + _IMPORTS

    def modification(self, *arguments: Any, **options: Any) -> str:
        """Return the code of a subgraph."""
        return _in_gluon(super().modification(*arguments, **options))

    def _register_hook(self, name: str, hook: Callable[[], str], **options: Any) -> str:
        return super()._register_hook(name, lambda: _in_gluon(hook()), **options)


def _in_gluon(code: str) -> str:
    """Write constants as numbers, and call our minimum and maximum: in Inductor's are tensors that have no layout."""
    code = re.sub(r"triton_helpers\.(minimum|maximum)\(", r"\1(", code)
    return re.sub(r"tl\.full\(\[1?\], ([^,]+), tl\.\w+\)", r"(\1)", code)
