"""Compute what a graph computes from numbers only, such as a scale ``sqrt(tensor(64) * 3)``."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...core.fx import fake_tensor
from ...torch_api.tracing import real_tensors
from .elements import Apply, Constant, Element

#: Ops with the same result on every device, as IEEE 754 defines it.
_EXACT = {"add", "sub", "mul", "div", "sqrt", "neg", "abs", "to", "where", "eq", "ne", "lt", "le", "gt", "ge", "not"}
_EXACT |= {"minimum", "maximum", "clamp", "floor", "ceil", "round"}
#: With integers, these have another result for a divisor of zero on another device, or raise an error.
_DIVISIONS = {"div", "floordiv", "floor_divide", "remainder", "fmod", "mod"}


def folded(element: Apply, node: Node) -> Element:
    """Return the number that ``element``, an element of ``node``, is if its operands are numbers; otherwise ``element``.

    A logarithm, for example, has other last digits on a GPU. It is computed here only if the graph does so on a CPU.
    """
    parts = list(element.parts())
    if not parts or not all(isinstance(part, Constant) for part in parts):
        return element
    if element.name not in _EXACT and fake_tensor(node).device.type != "cpu":
        return element
    if element.name in _DIVISIONS and not element.dtype.is_floating_point:
        return element
    target = getattr(torch.Tensor, element.target) if element.op == "call_method" else element.target
    with real_tensors():
        args, kwargs = [_number(x) for x in element.args], {name: _number(x) for name, x in element.kwargs.items()}
        value = target(*args, **kwargs).to(element.dtype).item()
    return Constant(value, element.dtype)


def _number(x: Any) -> Any:
    return torch.full((), x.value, dtype=x.dtype, device="cpu") if isinstance(x, Constant) else x
