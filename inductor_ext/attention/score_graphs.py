"""Properties of the graphs of score_mods and mask_mods, and of the tensors that they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ..core.fx import cone, dtype_of, name_of
from ..torch_api.ir import inductor_ir
from ..torch_api.lowering import V
from ..torch_api.sizes import hint
from .bounds import INT32_ELEMENTS

aten = torch.ops.aten


_ARITHMETIC = """
add sub rsub mul div neg abs clamp clamp_min clamp_max minimum maximum remainder floor_divide where index
ge gt le lt eq ne logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not
_to_copy convert_element_type full scalar_tensor lift_fresh_copy expand view reshape unsqueeze squeeze
"""
#: Ops that take a few instructions at most, without tanh and its like.
ARITHMETIC = frozenset(_ARITHMETIC.split())


#: Ops whose results have a dtype that is written in the kernel.
_KEEP_WIDTH = frozenset({"_to_copy", "convert_element_type", "index"})


def is_arithmetic(module: GraphModule) -> bool:
    """Return whether a score_mod's graph has only ops that take a few instructions."""
    return all(node.op != "call_function" or name_of(node) in ARITHMETIC for node in module.graph.nodes)


def makes_long_integers(module: GraphModule) -> bool:
    """Return whether a graph computes integers of 64 bits from numbers alone, and not from tensors or casts."""
    made = (n for n in module.graph.nodes if n.op == "call_function" and name_of(n) not in _KEEP_WIDTH)
    wide = (n for n in made if dtype_of(n) is torch.int64)
    return any(all(dtype_of(operand) is not torch.int64 for operand in n.all_input_nodes) for n in wide)


def is_identity(module: GraphModule) -> bool:
    """Return whether a score_mod graph returns its score unchanged."""
    (out,) = module.graph.find_nodes(op="output")[0].args
    out = out[0] if isinstance(out, (list, tuple)) else out
    return out is module.graph.find_nodes(op="placeholder")[0]


def reads(module: GraphModule) -> list[Node]:
    """Return the reads of captured tensors."""
    return list(module.graph.find_nodes(op="call_function", target=aten.index.Tensor))


def chained_reads(module: GraphModule) -> list[Node]:
    """Return the reads of captured tensors from which the index of another read is computed."""
    found = reads(module)
    return [read for read in found if any(read in cone(other) for other in found if other is not read)]


def differs_by_pair(node: Node) -> bool:
    """Return whether a node of a score_mod's graph depends on the query and on the key."""
    return set(_query_and_key(node)) <= set(cone(node))


def differs_by_position(node: Node) -> bool:
    """Return whether a node of a score_mod's graph depends on the query or on the key."""
    return not set(_query_and_key(node)).isdisjoint(cone(node))


def _query_and_key(node: Node) -> list[Node]:
    return node.graph.find_nodes(op="placeholder")[3:5]


def is_always_true(module: GraphModule) -> bool:
    """Return whether a mask_mod graph, Dynamo's or ATen's, is a constant True, as it is without a mask_mod."""
    (out,) = module.graph.find_nodes(op="output")[0].args
    out = out[0] if isinstance(out, (list, tuple)) else out
    if not isinstance(out, Node) or out.op not in ("call_function", "call_method"):
        return False
    name = name_of(out)
    if name in ("full", "full_like", "new_full"):
        at = 2 if name == "new_full" else 1
        return bool(out.args[at] if len(out.args) > at else out.kwargs.get("fill_value"))
    return name in ("ones", "new_ones", "ones_like")


def is_wide(buffers: Sequence[Any]) -> bool:
    """Return whether some captured buffer has more elements than a 32-bit index can count."""
    for buffer in buffers:
        if isinstance(buffer, inductor_ir.IRNode):
            numel = sympy.prod(buffer.get_size())
            if not V.graph.sizevars.statically_known_leq(numel, INT32_ELEMENTS):
                return V.graph.sizevars.shape_env is None or not numel.free_symbols or _hint_is_wide(numel)
    return False


def _hint_is_wide(numel: Any) -> bool:
    return hint(numel) > INT32_ELEMENTS
