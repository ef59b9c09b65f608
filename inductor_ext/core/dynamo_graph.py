"""Insert nodes into Dynamo's graphs, and find all graphs in a graph: bodies of checkpoints, branches, loops and regions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..torch_api.frontend import saved_tensors_hooks_disabled
from ..torch_api.graph import pytree
from ..torch_api.higher_order import associative_scan_hop, flex_attention_backward_hop, flex_attention_hop
from ..torch_api.sizes import composed, statically_known_true
from .constants import Constants, call_of
from .fx import value_of, value_or_none


class Inserter:
    """Inserts new nodes at the graph's insertion point, with values and metadata as if Dynamo had traced them there.

    AOTAutograd's cache takes a graph only if every tensor has its ``example_value``, and a report or an error names the
    user's line only if there is a stack trace. The stack trace comes from ``like``, the node for which the new ones are
    made, and the fake mode of the values from its inputs. ``like`` must not come after the insertion point, because sizes
    that are computed before it are used again, and so are constants (constants.py).
    """

    def __init__(self, graph: Graph, like: Node) -> None:
        self.graph = graph
        self._like = like
        self._kept = {k: v for k, v in like.meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")}
        # The mode of the tracing context would be wrong, because Dynamo may already have set a new one for AOTAutograd.
        modes = (getattr(value_or_none(n), "fake_mode", None) for n in like.all_input_nodes)
        self._fake_mode = next((mode for mode in modes if mode is not None), contextlib.nullcontext())
        self._sizes: dict[str, Any] = {}
        self._constants = Constants.of(graph)

    def function(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert a call of a function."""
        args, kwargs = self._with_size_nodes((args, kwargs))
        return self._inserted("call_function", target, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """Insert a call of a method of a tensor, which is the first argument."""
        args, kwargs = self._with_size_nodes((args, kwargs))
        return self._inserted("call_method", name, args, kwargs)

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], value: Callable[[], Any]) -> Node:
        """Insert a call of an op with graphs among its operands, which cannot run here. ``value`` makes its value."""
        node = self.graph.call_function(target, args)
        node.meta.update(self._kept)
        return self._valued(node, value)

    def copy(self, node: Node, inputs: Callable[[Node], Any]) -> Node:
        """Insert a copy of a node with other inputs."""
        if node.op not in ("call_function", "call_method"):
            return self.graph.node_copy(node, inputs)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), inputs)
        return self._inserted(node.op, node.target, args, kwargs, node.meta)

    def take_place(self, old: Node, new: Node, for_user: Callable[[Node], bool]) -> None:
        """Replace ``old`` by ``new``, of the same shape, dtype and strides, for the users for which ``for_user`` holds.

        ``new`` also gets the value of ``old``. The values of views share memory with it, and passes find out by that memory
        what the graph returns.
        """
        old.replace_all_uses_with(new, delete_user_cb=for_user)
        new.meta["example_value"] = value_of(old)

    def _inserted(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Any = ()) -> Node:
        """Insert a call, or return the constant that it is, if there is one before ``like``. meta: of the new node."""
        call = call_of(target, args, kwargs)
        node = self._constants.find(call, self._like)
        if node is None:
            node = self.graph.create_node(op, target, args, kwargs)
            node.meta.update({k: v for k, v in dict(meta).items() if k != "example_value"})
            self._with_value(node, getattr(torch.Tensor, target) if op == "call_method" else target)
            self._constants.add(call, node)
        return node

    def _with_size_nodes(self, arguments: Any) -> Any:
        """Return arguments in which nodes stand for symbolic sizes, as Dynamo traces them."""
        return pytree.tree_map_only(torch.SymInt, self._size_node, arguments)

    def _size_node(self, size: torch.SymInt) -> Any:
        if str(size) not in self._sizes:
            self._sizes[str(size)] = self._found_size(size)
        return self._sizes[str(size)]

    def _found_size(self, size: torch.SymInt) -> Any:
        """Return a node for a size: of an input, of the graph, or a new one. Without one, the size itself stays."""
        found = self._size_of_input(size) or self._size_before(size)
        if found is None:
            found = composed(size, self._size_of_input)
            if found is not None:
                self._value_sizes(found)
        return size if found is None else found

    def _size_before(self, size: torch.SymInt) -> Node | None:
        """Return the first node that computes a size before the node for which new ones are made, or None."""
        for node in self.graph.nodes:
            if node is self._like:
                return None
            if isinstance(value_or_none(node), torch.SymInt) and statically_known_true(value_or_none(node) == size):
                return node
        return None

    def _size_of_input(self, size: torch.SymInt) -> Node | None:
        """Return a node for a size that is an input of the graph, or a dim of one; None if it is neither."""
        inputs = self.graph.find_nodes(op="placeholder")
        for node in inputs:
            if isinstance(value_or_none(node), torch.SymInt) and statically_known_true(value_or_none(node) == size):
                return node
        for node in inputs:
            for dim, n in enumerate(getattr(value_or_none(node), "shape", ())):
                if isinstance(n, torch.SymInt) and statically_known_true(n == size):
                    return self._with_value(self.graph.call_method("size", (node, dim)), torch.Tensor.size)
        return None

    def _value_sizes(self, node: Node) -> None:
        """Give a value to each node, of those that compute a size, that has none."""
        if value_or_none(node) is None:
            for before in node.all_input_nodes:
                self._value_sizes(before)
            self._with_value(node, node.target)

    def _with_value(self, node: Node, target: Callable[..., Any]) -> Node:
        node.meta.update(self._kept)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_or_none)
        return self._valued(node, lambda: target(*args, **kwargs))

    def _valued(self, node: Node, value: Callable[[], Any]) -> Node:
        # The hooks of a checkpoint around the region must not run, because these values are not part of its forward.
        with self._fake_mode, saved_tensors_hooks_disabled():
            node.meta["example_value"] = value()
        return node


def erase_unused(before: Node, last: Node) -> None:
    """Erase the new nodes between these two that nothing uses: what was only tried, or turned out to be refused."""
    node = last.prev
    while node is not before:
        node, inserted = node.prev, node
        if not inserted.users:
            last.graph.erase_node(inserted)


#: Ops whose graphs are functions of numbers.
_OF_NUMBERS = (flex_attention_hop, flex_attention_backward_hop, associative_scan_hop)


def graphs_in(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield ``gm`` and all graphs of ops in it, each once. A graph comes after the graphs that it contains."""
    yield from _graphs_in(gm, set())


def _graphs_in(gm: GraphModule, seen: set[GraphModule]) -> Iterator[GraphModule]:
    seen.add(gm)
    for node in gm.graph.find_nodes(op="get_attr"):
        body = attribute(gm, node.target)
        # A kernel inlines a function of numbers, so the passes do not visit it.
        if isinstance(body, GraphModule) and body not in seen and not is_function_of_numbers(node):
            yield from _graphs_in(body, seen)
    yield gm


def is_function_of_numbers(node: Node) -> bool:
    """Return whether only ops that take a function of numbers, as a score_mod, use what a ``get_attr`` node reads."""
    return bool(node.users) and all(user.target in _OF_NUMBERS for user in node.users)


def attribute(gm: GraphModule, path: str) -> Any:
    """Return what a ``get_attr`` node reads, given its target, or None if there is nothing."""
    value: Any = gm
    for name in path.split("."):
        value = getattr(value, name, None)
    return value
