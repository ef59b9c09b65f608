"""Tensors that a ``combine_fn`` captures, which become leaves whose elements are all the same.

The gradient of such a tensor is a sum over time. In half precision its terms must not be rounded before they are added, as
autograd would round them at every op of the ``combine_fn``. So the leaves are in fp32, and ``Captured.unrounded`` is a
``combine_fn`` with the same values whose gradients are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ..core.fx import working_dtype
from ..torch_api.graph import pytree


class Captured:
    """A ``combine_fn`` of ``count`` leaves, then a leaf for each captured tensor.

    combine: takes the ``count`` leaves twice, and then ``additional``: tensors that broadcast to an element, and numbers.
    """

    def __init__(self, combine: Callable[..., Any], count: int, additional: Sequence[Any]) -> None:
        self.combine, self.count = combine, count
        self.additional = [x.dtype if isinstance(x, Tensor) else x for x in additional]
        self.dtypes = [x for x in self.additional if isinstance(x, torch.dtype)]

    def leaves(self, tensors: Sequence[Tensor], shape: Sequence[Any]) -> list[Tensor]:
        """A leaf of ``shape`` [T, ...] for each captured tensor."""
        return [x.to(working_dtype(x.dtype)).expand(shape[1:]).expand(shape) for x in tensors]

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        """The leaves of an element from those of two, in the dtypes of the program."""
        return self._combined(self.combine, flat, [x.to(d) for x, d in zip(self._now(flat), self.dtypes, strict=True)])

    def unrounded(self, *flat: Tensor) -> list[Tensor]:
        """The same for leaves that are all in fp32 where ``flat``, the leaves of the program, are in half precision.

        Only a graph can be run with the values of half precision. Of any other function, the values too are in fp32.
        """
        widened = [x.to(working_dtype(x.dtype)) for x in flat]
        if not isinstance(self.combine, GraphModule):
            return self._combined(self.combine, widened, self._now(widened))
        dtypes = [x.dtype for x in flat[: self.count]] * 2 + self.dtypes
        run = _Unrounded(self.combine, dtypes).run
        return self._combined(run, widened, self._now(widened))

    def narrow(self) -> list[int]:
        """The leaves that stand for captured tensors of half precision."""
        return [self.count + i for i, dtype in enumerate(self.dtypes) if working_dtype(dtype) != dtype]

    def _now(self, flat: Sequence[Tensor]) -> Sequence[Tensor]:
        return flat[2 * self.count + len(self.dtypes) :]

    def _combined(self, combine: Callable[..., Any], flat: Sequence[Tensor], captured: Sequence[Tensor]) -> list[Tensor]:
        before, now = flat[: self.count], flat[self.count + len(self.dtypes) :][: self.count]
        tensors = iter(captured)
        rest = [next(tensors) if isinstance(x, torch.dtype) else x for x in self.additional]
        # A result of the op must not be one of its operands.
        return [*pytree.tree_leaves(combine(*before, *now, *rest)), *(x.clone() for x in self._now(flat))]


class _WithValues(torch.autograd.Function):
    """``values``, with the gradient of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Unrounded(Interpreter):
    """Runs a graph on tensors in fp32, each of which has the values that it has in the graph's own dtypes.

    dtypes: those of the tensors among the operands.
    """

    def __init__(self, graph: GraphModule, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__(graph)
        self.dtypes = iter(dtypes)
        self.narrow: dict[Node, Any] = {}

    def run_node(self, node: Node) -> Any:
        wide = super().run_node(node)
        if node.op == "output":
            return wide
        if node.op == "placeholder":
            self.narrow[node] = wide.detach().to(next(self.dtypes)) if isinstance(wide, Tensor) else wide
            return wide
        if node.op == "get_attr":
            self.narrow[node] = wide
            return wide
        with torch.no_grad():
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.narrow.__getitem__)
            values = self.narrow[node] = getattr(self, node.op)(node.target, args, kwargs)
        return pytree.tree_map(_with_values, wide, values)


def _with_values(wide: Any, values: Any) -> Any:
    differentiable = isinstance(wide, Tensor) and (wide.is_floating_point() or wide.is_complex())
    return _WithValues.apply(wide, values) if differentiable else values


def unrounded_gradients(
    combine: Callable[..., Any], before: Sequence[Tensor], now: Sequence[Tensor], outgoing: dict[int, Tensor]
) -> dict[int, Tensor]:
    """The gradients of the leaves that stand for captured tensors of half precision, in fp32, by the number of the leaf.

    before, now: the operands of ``combine``. outgoing: the gradients of its results that have one, by number.
    """
    leaves = combine.narrow() if isinstance(combine, Captured) else []
    if not leaves:
        return {}
    after = combine.unrounded(*before, *now)
    through = [i for i in outgoing if after[i].requires_grad]
    if not through:
        return {}
    grads = [outgoing[i].to(after[i].dtype) for i in through]
    found = torch.autograd.grad([after[i] for i in through], [now[i] for i in leaves], grads, allow_unused=True)
    return {leaf: grad for leaf, grad in zip(leaves, found, strict=True) if grad is not None}
