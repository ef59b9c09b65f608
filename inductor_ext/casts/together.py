"""Casts the inputs of a graph that matmuls read in half precision in groups, with one kernel for each group.

Under autocast a forward casts each weight and each bias for the matmul that reads it. Inductor cannot fuse a cast into a
matmul of cuBLAS or into a convolution, so each is a kernel of its own, and half of the kernels of Swin's forward are such
casts. Most take less time on the GPU than a launch takes on the host. A group is one launch. It changes no bit.

    convert_element_type(w, bf16), ...       cast_all([w, ...], bf16, [1, ...])[i], ...

Weights that are concatenated before their cast are written next to each other by the same kernel (linears.py).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..core.fx import HALF, VIEWS, cast_of, dtype_of, fake_tensor, shape_of
from ..core.kernel_op import KernelOp
from ..core.purity import written
from ..core.report import record, user_line
from ..core.target import Target
from ..core.terms import arg
from ..options import Options
from ..torch_api.config import addmm_stays_whole, templates_multiply
from ..torch_api.ir import one_kernel
from ..torch_api.lowering import lowerings, pointwise_cat

NAME = "casts_together"

aten = torch.ops.aten

#: The most casts of a group (a kernel's code has a branch for each), and the most elements of a group: memory for the casts
#: of a group is taken before its first cast is read, and this is 32 MB.
MOST_CASTS, MOST_ELEMENTS = 32, 2**24
#: A tensor with more elements takes the GPU longer than a launch takes the host.
MOST_OF_ONE = 2**22

#: Ops whose kernels read operands from memory, so that casts are stored for them, with the positions of these operands. The
#: bias of a convolution or of a baddbmm is not among them: Inductor adds it in a kernel of its own, into which it fuses the
#: cast, and there it may not round.
_READ = dict.fromkeys((aten.mm.default, aten.mm.dtype, aten.bmm.default, aten.bmm.dtype, aten.convolution.default), (0, 1))
_READ |= {aten.addmm.default: (0, 1, 2), aten.baddbmm.default: (1, 2)}


@torch.library.custom_op("gradfuse::cast_all", mutates_args=())
def cast_all(xs: Sequence[Tensor], dtype: torch.dtype, joined: Sequence[int]) -> list[Tensor]:
    """The tensors ``xs``, of any shapes and another dtype, in ``dtype``.

    joined: for each result the number of tensors, in order, that are concatenated along their first dim, or 1.
    """
    return [_cast(parts, dtype) for parts in _parts(xs, joined)]


@cast_all.register_fake
def _(xs: Sequence[Tensor], dtype: torch.dtype, joined: Sequence[int]) -> list[Tensor]:
    return [_cast(parts, dtype) for parts in _parts(xs, joined)]


def _cast(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(dtype)


def _parts(xs: Sequence[Any], joined: Sequence[int]) -> list[Sequence[Any]]:
    ends = list(accumulate(joined))
    return [xs[end - count : end] for end, count in zip(ends, joined, strict=True)]


def _lower(xs: Sequence[Any], dtype: torch.dtype, joined: Sequence[int]) -> list[Any]:
    """Lower ``cast_all``."""
    values = [pointwise_cat(parts) if len(parts) > 1 else parts[0] for parts in _parts(xs, joined)]
    return one_kernel([lowerings[torch.ops.prims.convert_element_type.default](x, dtype) for x in values])


KERNEL = KernelOp(NAME, "casts a list of tensors in one kernel", cast_all, _lower)


def rewrite(gm: GraphModule, options: Options) -> None:
    """Group the casts of a forward or backward graph, in place. Another run changes nothing."""
    if templates_multiply() or not addmm_stays_whole():
        return
    for casts in _groups(gm.graph):
        if len(casts) > 1:
            _cast_at_once(gm.graph, casts)


def _groups(graph: Graph) -> list[list[Node]]:
    """Return the casts that may be done together, in the order of the graph."""
    groups: list[list[Node]] = []
    open_groups: dict[Any, list[Node]] = {}
    elements: dict[Any, int] = defaultdict(int)
    changed = written(graph)
    for node in graph.nodes:
        if not _is_alone(node) or changed.intersection(_sources(node)):
            continue
        value = node.meta["val"]
        key, size = (value.device, value.dtype), value.numel()
        group = open_groups.get(key)
        if group is None or len(group) == MOST_CASTS or elements[key] + size > MOST_ELEMENTS:
            group, elements[key] = [], 0
            open_groups[key] = group
            groups.append(group)
        group.append(node)
        elements[key] += size
    return groups


def _is_alone(node: Node) -> bool:
    """Return whether a node is a cast of an input to half precision for which Inductor would make a kernel of its own."""
    value = fake_tensor(node)
    if not _sources(node) or value is None or value.dtype not in HALF:
        return False
    is_static = all(isinstance(n, int) for n in (*value.shape, *value.stride()))
    if not is_static or not 0 < value.numel() <= MOST_OF_ONE:
        return False
    return Target.of(value.device).triton and _is_stored(node)


def _sources(node: Node) -> list[Node]:
    """Return the inputs of the graph that a node casts: one, or several that are concatenated. No other cast has any.

    ``cat`` also takes tensors of several dtypes, and drops empty ones of another rank; these are left to it.
    """
    source = cast_of(node)
    if source is None or source.op == "placeholder":
        return [] if source is None else [source]
    if source.target is not aten.cat.default or arg(source, 1, "dim", 0) != 0:
        return []
    parts = source.args[0]
    kinds = {(dtype_of(x), len(shape_of(x))) for x in parts}
    return [*parts] if len(kinds) == 1 and all(x.op == "placeholder" for x in parts) else []


def _is_stored(node: Node) -> bool:
    """Return whether nothing but matmuls, convolutions and the caller of the graph reads a tensor or a view of it."""
    return bool(node.users) and all(
        user.op == "output" or _is_read_from_memory(node, user) or (user.target in VIEWS and _is_stored(user))
        for user in node.users
    )


def _is_read_from_memory(node: Node, user: Node) -> bool:
    """Return whether a matmul or convolution reads a tensor where its kernel reads memory."""
    return all(i in _READ.get(user.target, ()) for i, operand in enumerate(user.args) if operand is node)


def _cast_at_once(graph: Graph, casts: Sequence[Node]) -> None:
    """Replace casts by one ``cast_all``, in the place of the first."""
    sources, dtype = [_sources(node) for node in casts], casts[0].meta["val"].dtype
    with graph.inserting_before(casts[0]):
        operands = ([*chain(*sources)], dtype, [len(parts) for parts in sources])
        together = graph.call_function(KERNEL.overload, operands)
        together.meta = {"val": [node.meta["val"] for node in casts], "stack_trace": casts[0].meta.get("stack_trace")}
        for index, node in enumerate(casts):
            part = graph.call_function(operator.getitem, (together, index))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
    for node in casts:
        source = cast_of(node)
        graph.erase_node(node)
        if source.op != "placeholder" and not source.users:
            graph.erase_node(source)
    record(NAME, "cast_all", "one kernel", f"for {len(casts)} casts to {dtype}", user_line(casts[0]))
