"""``explain`` compiles a function forward and backward, and shows what gradfuse did with it and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core.report import Decision, Report, collect
from ..torch_api.config import without_caches
from ..torch_api.graph import pytree


@dataclass(frozen=True)
class Explanation:
    """The result of ``explain``. ``print(explanation)`` shows a table, and a notebook also shows pictures.

    report: the decisions, in the order in which they were taken. output: the result of the function.
    """

    report: Report
    output: Any

    @property
    def decisions(self) -> list[Decision]:
        """Every decision, in order."""
        return self.report.decisions

    @property
    def fallbacks(self) -> list[Decision]:
        """The decisions that leave an op to stock Inductor."""
        return self.report.fallbacks

    def html(self, title: str = "gradfuse") -> str:
        """Return an HTML page that needs no other files.

        It shows the decisions and, for each flex_attention, heat maps over (query, key) of its mask and of each learned
        term of its score_mod.
        """
        from .html import page

        return page(self.report, title)

    def _repr_html_(self) -> str:
        from .html import fragment

        return fragment(self.report)

    def __str__(self) -> str:
        return str(self.report)


def explain(
    function: Callable[..., Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Explanation]:
    """Return a function that compiles ``function`` (or a module) on its arguments, forward and backward, and explains.

        print(inductor_ext.explain(model)(batch))

    The compilation starts from scratch: torch.compile is reset and the compile caches are off, so that every decision is
    taken again. The backward runs with gradients of ones, and does not change any ``.grad``.
    """

    def run(*args: Any, **kwargs: Any) -> Explanation:
        torch.compiler.reset()
        with collect(pictures=True) as report, without_caches():
            compiled = torch.compile(function, backend="gradfuse", mode=mode, options=options, dynamic=dynamic)
            output = compiled(*args, **kwargs)
            tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
            leaves = [x for x in _inputs(function, args, kwargs) if x.requires_grad]
            if tensors and leaves:
                ones = [torch.ones_like(t) for t in tensors]
                torch.autograd.grad(tensors, leaves, ones, allow_unused=True)
        return Explanation(report, output)

    return run


def _inputs(function: Callable[..., Any], args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that can get a gradient: arguments, parameters of a module, tensors in the function's closure."""
    found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    modules = [function, *(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())]
    modules += [value for value in getattr(function, "__globals__", {}).values() if isinstance(value, torch.Tensor)]
    for item in modules:
        if isinstance(item, torch.nn.Module):
            found += list(item.parameters())
        elif isinstance(item, torch.Tensor) and item.is_leaf:
            found.append(item)
    return list({id(x): x for x in found}.values())
