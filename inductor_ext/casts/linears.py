"""Linear layers that read the same input, as the query, key and value of an attention do, become one under autocast.

    q = linear(x, v, a)                  both = linear(x, cat([v, w]), cat([a, b]))
    k = linear(x, w, b)                  q, k = split(both, [v.shape[0], w.shape[0]], -1)

The backward then has one matmul for the gradient of ``x`` instead of one for each layer and their sum, one for the gradients
of all weights, and one sum for those of all biases. Autocast casts the weights in any case, and the casts write them next to
each other (together.py). Without a cast the copy would cost what the matmuls save, so these layers stay as they are.

The results are slices, whose rows are not next to each other. Where a model takes a view that only other strides allow, or
hands a result to code that is not torch's, the layers stay as they are. So does a layer whose parameters get no gradient.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..core.dynamo_graph import Inserter
from ..core.fx import HALF, fake_tensor, value_or_none
from ..core.outside import is_returned
from ..core.purity import sets_autocast, sets_gradient_mode
from ..core.report import record, user_line
from ..core.target import Target
from ..core.terms import CASTS, arg, calls_torch, op
from ..core.writes import VIEWS, Writes
from ..options import Options
from ..torch_api.config import addmm_stays_whole, templates_multiply
from ..torch_api.graph import OpOverload, is_graph_argument, is_wrapper, pytree, storage_of
from ..torch_api.higher_order import flex_attention_hop
from ..torch_api.sizes import is_unbacked
from .together import MOST_OF_ONE

NAME = "linears_together"

#: Ops whose result depends on the strides of their operand.
_READS_STRIDES = {"as_strided", "stride", "is_contiguous", "data_ptr", "storage_offset", "view_as_complex"}
#: The number of rows of each weight is a multiple of this. So every slice begins at a multiple of 16 bytes, which kernels of
#: attention read at once.
_ROWS = 8


def rewrite(gm: GraphModule, options: Options) -> None:
    """Replace linear layers of Dynamo's graph that read the same input by one, in place."""
    if templates_multiply() or not addmm_stays_whole():
        return
    writes = Writes(gm.graph)
    for layers in _groups(gm.graph, writes):
        if len(layers) > 1 and not writes.during(_operands(layers[0])[:1], layers[0], layers[-1]):
            _compute_at_once(gm.graph, layers)


def _groups(graph: Graph, writes: Writes) -> list[list[Node]]:
    """Return the layers of the same input that may be one, in the order of the graph."""
    groups: dict[Any, list[Node]] = defaultdict(list)
    sizes: dict[Any, int] = defaultdict(int)
    reached = _reached_by_gradients(graph)
    mode = 0
    for node in graph.nodes:
        mode += sets_gradient_mode(node) or sets_autocast(node)
        if not _is_layer(node) or fake_tensor(node).grad_fn not in reached or not _may_be_slice(node, writes):
            continue
        source, weight, *bias = _operands(node)
        size = fake_tensor(weight).numel()
        key = (source, mode, fake_tensor(node).dtype, not bias)
        if sizes[key] + size <= MOST_OF_ONE:
            groups[key].append(node)
            sizes[key] += size
    return list(groups.values())


def _operands(layer: Node) -> list[Node]:
    """Return the input, the weight and, if there is one, the bias of a linear layer."""
    operands = (arg(layer, 0, "input"), arg(layer, 1, "weight"), arg(layer, 2, "bias"))
    return [x for x in operands if x is not None]


def _is_layer(node: Node) -> bool:
    """Return whether a node is a linear layer of the graph's inputs in fp32 that autocast computes in half precision."""
    result = fake_tensor(node)
    if op(node) != "linear" or not calls_torch(node) or result is None or result.dtype not in HALF:
        return False
    source, *parameters = _operands(node)
    values = [fake_tensor(x) for x in (source, *parameters)]
    if any(x is None or is_wrapper(x) for x in values) or not Target.of(result.device).triton:
        return False
    shape = values[1].shape
    if len(shape) != 2 or shape[0] % _ROWS or any(x.shape != shape[:1] for x in values[2:]):
        return False
    return all(_is_parameter(x) for x in parameters)


def _is_parameter(node: Node) -> bool:
    """Return whether a node is an input of the whole graph, not of a graph in it: fp32, contiguous, and with a gradient."""
    value = fake_tensor(node)
    is_static = all(isinstance(n, int) for n in (*value.shape, *value.stride()))
    known = is_graph_argument(node) and is_static and value.is_contiguous()
    return known and value.dtype is torch.float32 and value.requires_grad


def _may_be_slice(layer: Node, writes: Writes) -> bool:
    """Return whether nothing changes if a layer's result is a slice of a larger tensor."""
    result = fake_tensor(layer)
    width = result.shape[-1]
    wide = result.new_empty([*result.shape[:-1], 2 * width])[..., :width]
    changed = writes.after(layer) or any(writes.after(x) for x in _operands(layer)[1:])
    return not changed and not is_returned(layer) and _users_take(layer, wide)


def _reached_by_gradients(graph: Graph) -> set[Any]:
    """Return autograd's functions of all values on which a result of the graph depends in a differentiable way.

    If a layer is not among them, its parameters have no gradient. That is not the same as zeros: an optimizer leaves such a
    parameter alone. Dynamo has run the graph on fake tensors, so autograd itself knows.
    """
    results = pytree.tree_leaves([value_or_none(node) for node in graph.output_node().all_input_nodes])
    pending = [x.grad_fn for x in results if isinstance(x, torch.Tensor)]
    seen: set[Any] = set()
    while pending:
        function = pending.pop()
        if function is not None and function not in seen:
            seen.add(function)
            pending += [before for before, _ in function.next_functions]
    return seen


def _users_take(node: Node, value: Any) -> bool:
    """Return whether every user of a tensor, or of several, takes what has the strides of ``value``."""
    return all(_takes(user, node, value) for user in node.users)


def _takes(user: Node, node: Node, value: Any) -> bool:
    """Return whether one user does. A view is taken of ``value``, and its users are asked in turn."""
    if user.target is flex_attention_hop:
        return True
    if not calls_torch(user) or isinstance(user.target, OpOverload) or op(user) in _READS_STRIDES:
        return False
    if op(user) not in VIEWS | CASTS:
        return not _shares_memory(user, node)
    others = [value_or_none(x) for x in user.all_input_nodes if x is not node]
    # A tensor among the operands may be an index, and what it finds may have a size that is not known.
    depends_on_data = any(isinstance(x, torch.Tensor) for x in others) or is_unbacked(others)
    if depends_on_data or is_unbacked(pytree.tree_leaves(value_or_none(user))):
        return not _shares_memory(user, node)
    args, kwargs = map_arg((user.args, user.kwargs), lambda n: value if n is node else value_or_none(n))
    function = getattr(torch.Tensor, user.target) if user.op == "call_method" else user.target
    try:
        return _users_take(user, function(*args, **kwargs))
    except (RuntimeError, ValueError):
        return False


def _shares_memory(user: Node, node: Node) -> bool:
    """Return whether a result of ``user`` may be a view of ``node``, which is a tensor or several."""
    mine, others = (
        {storage_of(x) for x in pytree.tree_leaves(value_or_none(n)) if isinstance(x, torch.Tensor)} for n in (user, node)
    )
    return not mine.isdisjoint(others)


def _compute_at_once(graph: Graph, layers: Sequence[Node]) -> None:
    """Replace layers by one, in the place of the first."""
    first = layers[0]
    source, *parameters = zip(*(_operands(layer) for layer in layers), strict=True)
    dtype = fake_tensor(first).dtype
    insert = Inserter(graph, first)
    with graph.inserting_before(first):
        joined = [insert.function(torch.cat, [*each]) for each in parameters]
        operands = (source[0], *joined)
        together = insert.call(F.linear, operands, lambda: _value(operands, dtype))
        parts = insert.function(torch.split, together, [fake_tensor(layer).shape[-1] for layer in layers], -1)
        for index, layer in enumerate(layers):
            insert.take_place(layer, insert.function(operator.getitem, parts, index), lambda user: True)
    for layer in layers:
        graph.erase_node(layer)
    record(NAME, "linear", "one matmul", f"for {len(layers)} layers that read the same input", user_line(first))


def _value(operands: Sequence[Node], dtype: torch.dtype) -> torch.Tensor:
    """Return what autocast to ``dtype`` computes of fake operands. While this compiles, its mode may be another one."""
    values = [fake_tensor(x) for x in operands]
    with torch.autocast(values[0].device.type, enabled=False):
        return F.linear(*(x.to(dtype) for x in values))
