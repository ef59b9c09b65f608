"""The questions that every analysis asks about an FX node: its value, shape and dtype, its name, and what its op does.

Dynamo's graphs keep the value with which a node was traced in ``meta["example_value"]``, and the graphs of AOTAutograd keep
it in ``meta["val"]``. No node has both, so the same functions serve both kinds of graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..torch_api.graph import OpOverload
from ..torch_api.sizes import statically_known_true

aten = torch.ops.aten
prims = torch.ops.prims

# ------------------------------------------------ values, shapes and dtypes

HALF = (torch.bfloat16, torch.float16)
#: The dtypes of tensors that index as masks.
MASKS = (torch.bool, torch.uint8)


def value_or_none(x: Any) -> Any:
    """The value with which a node was traced, or None if it has none; ``x`` itself if it is no node."""
    return x.meta.get("example_value", x.meta.get("val")) if isinstance(x, Node) else x


def value_of(x: Any) -> Any:
    """The value with which a node was traced; ``x`` itself if it is no node. A KeyError if the node has no value."""
    if not isinstance(x, Node):
        return x
    return x.meta["example_value"] if "example_value" in x.meta else x.meta["val"]


def fake_tensor(x: Any) -> torch.Tensor | None:
    """The fake tensor with which a node was traced; None for a node without one, and for anything that is no node."""
    value = value_or_none(x) if isinstance(x, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: Node) -> tuple[Any, ...]:
    """The shape of a node's tensor."""
    return tuple(value_of(node).shape)


def dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of a node's tensor; None for a node that computes anything else (a number, several tensors)."""
    value = fake_tensor(node)
    return None if value is None else value.dtype


def requires_grad(node: Node) -> bool:
    """Whether a node computes a tensor that needs a gradient."""
    value = fake_tensor(node)
    return value is not None and value.requires_grad


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are computed and summed: fp32 for narrower floats, otherwise ``dtype``."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes, whose sizes may be symbolic or depend on the data, are known to be equal. No guard is added."""
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in zip(a, b, strict=True))


def same_shape(a: Node, b: Node) -> bool:
    """Whether two tensors are known to have the same shape."""
    return same_sizes(shape_of(a), shape_of(b))


# ------------------------------------------------ names and operands


def called(node: Node) -> str:
    """The name of the function or method that a node calls; "" for a node that calls nothing."""
    if node.op not in ("call_function", "call_method"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def name_of(node: Node) -> str:
    """The name of a node's target without its module and overload: ``called`` for Dynamo's graphs and for ATen's."""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.split("::")[1]
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def indices_of(getitem: Node) -> tuple[Any, ...]:
    """The indices of ``x[i, j]``, one for each position in the brackets. A list is one index."""
    index = getitem.args[1]
    return index if isinstance(index, tuple) else (index,)


def full_index(entries: Sequence[Any], rank: int) -> list[Any]:
    """The entries in brackets without an ellipsis, and with a slice for each dim that they do not name."""
    if any(e is Ellipsis for e in entries):
        at = [e is Ellipsis for e in entries].index(True)
    else:
        at, entries = len(entries), [*entries, Ellipsis]
    missing = rank - sum(e is not None and e is not Ellipsis for e in entries)
    return [*entries[:at], *[slice(None)] * missing, *entries[at + 1 :]]


def cone(*nodes: Node, until: Iterable[Node] = ()) -> KeysView[Node]:
    """The nodes themselves and all nodes from which they are computed, each once, in a fixed order.

    until: nodes beyond which it does not go. They are in it themselves.
    """
    ends = set(until)
    seen: dict[Node, None] = dict.fromkeys(nodes)
    pending = list(nodes)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in seen:
                seen[source] = None
                if source not in ends:
                    pending.append(source)
    return seen.keys()


# ------------------------------------------------ what an op does to its first operand

CASTS = {aten._to_copy.default, prims.convert_element_type.default}
#: Ops that return the operand, perhaps as a copy or in another dtype.
CASTS_AND_COPIES = CASTS | {aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default}
#: Ops that keep all values and their flattened order.
SAME_ORDER = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default}
SAME_ORDER |= {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
SAME_ORDER |= {aten.clone.default, aten.alias.default, aten.detach.default}
#: Ops that are usually views of all values, in any order, and read no memory. ``expand`` has a value several times.
VIEWS = SAME_ORDER - {aten.clone.default}
VIEWS |= {aten.permute.default, aten.transpose.int, aten.t.default, aten.expand.default}
#: The views into which Inductor decomposes the others, and ``clone``. What stands behind them is fused with their operand.
DECOMPOSED_VIEWS = {aten.view.default, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dims}
DECOMPOSED_VIEWS |= {aten.expand.default, aten.clone.default}
#: Ops whose result has only values of the operand, each once, several times or never.
MOVES = SAME_ORDER | VIEWS | {aten.slice.Tensor, aten.select.int, aten.diagonal.default, aten.unfold.default}
MOVES |= {aten.repeat.default, aten.flip.default, prims.rev.default}
MOVES |= {aten.index.Tensor, aten.index_select.default, aten.gather.default}
#: Moves that return a list, from which getitem takes one tensor.
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
#: Ops whose result is all zeros.
ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}


def cast_of(node: Node) -> Node | None:
    """The operand of ``convert_element_type``, which a joint graph has for every cast; None for other nodes."""
    return node.args[0] if node.op == "call_function" and node.target is prims.convert_element_type.default else None


def fill_of(node: Node) -> Any:
    """The Python number with which ``full`` fills a tensor; None for other nodes."""
    filled = node.target is aten.full.default and isinstance(node.args[1], (int, float))
    return node.args[1] if filled else None
