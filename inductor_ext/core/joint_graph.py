"""Adds nodes to a traced graph. They get fake values, sizes and metadata as if they had been traced."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..torch_api.tracing import detect_fake_mode
from .fx import HALF, fake_tensor, value_of
from .purity import viewed

aten = torch.ops.aten
prims = torch.ops.prims


@contextlib.contextmanager
def building(graph: Graph) -> Iterator[Builder | None]:
    """A builder for the rewrites of one graph, or None for a graph without tensors.

    All rewrites of the graph share the builder, so a rewrite finds the nodes that earlier ones created.
    """
    fake_mode = detect_fake_mode([value_of(n) for n in graph.nodes if fake_tensor(n) is not None])
    if fake_mode is None:
        yield None
        return
    with fake_mode:
        build = Builder(graph)
        yield build
    if build.changed:
        graph.eliminate_dead_code()
        graph.lint()


class Builder:
    """Inserts new nodes before the node that is being replaced. Use it inside the graph's fake mode.

    shared: nodes that several replacements use (the inverse of a permutation). Each of them is created once, right after its
    source.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.changed = False
        self._before: Node | None = None
        self._like: Node | None = None
        self.shared: dict[Any, Node] = {}

    @contextlib.contextmanager
    def before(self, node: Node, like: Node | None = None) -> Iterator[None]:
        """Insert new nodes before ``node``, with its metadata or with that of ``like``."""
        outer = self._before, self._like
        self._before, self._like = node, like or node
        try:
            yield
        finally:
            self._before, self._like = outer

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node that calls ``target``, with a new fake value."""
        with self.graph.inserting_before(self._before):
            node = self.graph.call_function(target, args, kwargs)
        copy_meta(self._like, node)
        self.changed = True
        fake_args, fake_kwargs = torch.fx.node.map_aggregate((args, kwargs), value_of)
        node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def size(self, node: Node, dim: int) -> Any:
        """The size of a dim, in elements, as an argument of a new node: an int or a node."""
        size = value_of(node).shape[dim]
        if isinstance(size, int):
            return size
        found = self.call(aten.sym_size.int, node, dim)
        if isinstance(value_of(found), int):
            # A guard has made the size a constant since the graph was traced.
            self.graph.erase_node(found)
            return value_of(found)
        return found

    def sizes(self, node: Node, dims: Sequence[int]) -> list[Any]:
        """The sizes of several dims, each an int or a node."""
        return [self.size(node, d) for d in dims]

    def product(self, sizes: Sequence[Any]) -> Any:
        """The product of sizes, each an int or a node."""
        total: Any = 1
        for size in sizes:
            if isinstance(total, Node) or isinstance(size, Node):
                total = size if total == 1 else total if size == 1 else self.call(operator.mul, total, size)
            else:
                total *= size
        return total

    def wide(self, node: Node) -> Node:
        """``node`` cast to fp32 if it is in half precision; otherwise ``node``."""
        return self.convert(node, torch.float32) if value_of(node).dtype in HALF else node

    def convert(self, node: Node, dtype: torch.dtype) -> Node:
        """``node`` cast to ``dtype``, or ``node`` itself if it has this dtype."""
        return node if value_of(node).dtype is dtype else self.call(prims.convert_element_type.default, node, dtype)

    def full(self, sizes: Sequence[Any], fill: Any, dtype: torch.dtype, device: torch.device) -> Node:
        """A tensor of the given sizes (each an int or a node) that is filled with one value."""
        return self.call(aten.full.default, list(sizes), fill, dtype=dtype, device=device)

    def replace(self, node: Node, result: Node) -> None:
        """Replace all uses of ``node`` by ``result``, and erase ``node``."""
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)
        self.refresh_views(result)

    def refresh_views(self, node: Node) -> None:
        """After the operand of views has changed, give the views new fake values that share memory with ``node``.

        Stock's passes use these values to decide what may be returned. A stale value hides that an output would be an input.
        A view that the new strides do not allow becomes a reshape.
        """
        for user in node.users:
            if viewed(user) is node:
                args, kwargs = torch.fx.node.map_arg((user.args, user.kwargs), value_of)
                try:
                    user.meta["val"] = user.target(*args, **kwargs)
                except (RuntimeError, ValueError):
                    if user.target not in (aten.view.default, aten._unsafe_view.default):
                        raise
                    user.target = aten.reshape.default
                    user.meta["val"] = user.target(*args, **kwargs)
                self.refresh_views(user)

    def count(self, length: Any, device: torch.device) -> Node:
        """The tensor 0, 1, ..., length - 1: [length], int64. ``length`` is an int or a node."""
        return self.call(prims.iota.default, length, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False)


def copy_meta(source: Node, target: Node) -> None:
    """Copy metadata such as the stack trace and the partitioner's tags to a new node from the node that it replaces."""
    kept = {k: v for k, v in source.meta.items() if k not in ("val", "tensor_meta", "eager_input_vals")}
    target.meta.update(kept)


def after_tangents(graph: Graph) -> set[Node]:
    """The nodes of a joint graph that are computed in the backward."""
    found: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if tangent or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
