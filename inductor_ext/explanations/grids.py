"""Compute score_mods and masks on a grid of positions, and the operands of any op in a Dynamo graph."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from ..core.fx import called
from ..core.purity import changes_in_place, is_random
from ..reference import Reference, called_once
from ..torch_api.frontend import scalar_indexing
from ..torch_api.graph import HigherOrderOperator, pytree
from ..torch_api.higher_order import flex_attention_hop

#: The largest number of positions along one side of a picture.
MOST = 128


def sampled(length: int) -> list[int]:
    """Return at most ``MOST`` positions of ``length``, evenly spread, with the first and the last."""
    if length <= MOST:
        return list(range(length))
    return [round(i * (length - 1) / (MOST - 1)) for i in range(MOST)]


class NotKnown(Exception):
    """A value of the user's run cannot be computed a second time."""


class Values:
    """Computes the values of nodes of a Dynamo graph, and of the graphs in it, from the inputs of a call.

    Only the requested values, and the values that they need, are computed. Raises NotKnown if a value cannot be computed a
    second time, because it comes from random numbers or from a tensor that is written in place.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._callers: dict[GraphModule, tuple[GraphModule, Node]] = {}
        self._inputs: dict[Node, Any] = {}
        self._interpreters: dict[GraphModule, Reference] = {}
        self._top = gm
        self._find_callers(gm)

    def _find_callers(self, gm: GraphModule) -> None:
        """Find, for each graph in ``gm``, the op that calls it, and the graph of that op, if the op only calls it once."""
        for node in gm.graph.nodes:
            if not isinstance(node.target, HigherOrderOperator) or not called_once(node.target):
                continue
            bodies = [a for a in node.args if isinstance(a, Node) and a.op == "get_attr"]
            body = gm.get_submodule(bodies[0].target) if bodies else None
            if isinstance(body, GraphModule) and body not in self._callers:
                self._callers[body] = (gm, node)
                self._find_callers(body)

    def begin(self, inputs: Sequence[Any]) -> None:
        """Set the inputs of the call."""
        self._inputs = dict(zip(self._top.graph.find_nodes(op="placeholder"), inputs, strict=True))

    def of(self, gm: GraphModule, argument: Any) -> Any:
        """Return the value of an argument: a node of ``gm``, a constant, or a tuple of these."""
        if isinstance(argument, (tuple, list)):
            return tuple(self.of(gm, a) for a in argument)
        return self._node(gm, argument) if isinstance(argument, Node) else argument

    def _node(self, gm: GraphModule, node: Node) -> Any:
        if gm not in self._interpreters:
            self._interpreters[gm] = Reference(gm, None)
        interpreter = self._interpreters[gm]
        needed = _with_writes(node)
        if any(is_random(n) for n in needed):
            raise NotKnown("it depends on random numbers")
        if any("batch_dim" in called(n) for n in needed):
            # The ops that begin and end a region under vmap have no users, so ``cone`` does not find them.
            raise NotKnown("it is computed under vmap in the compiled graph")
        for n in gm.graph.nodes:
            if n not in needed or n in interpreter.env:
                continue
            not_read = dict.fromkeys(x for x in n.all_input_nodes if x not in needed and x not in interpreter.env)
            interpreter.env.update(not_read)
            interpreter.env[n] = self._placeholder(gm, n) if n.op == "placeholder" else interpreter.run_node(n)
            for x in not_read:
                del interpreter.env[x]
        return interpreter.env[node]

    def _placeholder(self, gm: GraphModule, placeholder: Node) -> Any:
        if gm is self._top:
            return self._inputs[placeholder]
        if gm not in self._callers:
            raise NotKnown("it is computed inside a branch or a loop")
        caller, node = self._callers[gm]
        names = gm.graph.find_nodes(op="placeholder")
        operands = [a for a in node.args if not isinstance(a, str)][-len(names) :]
        return self.of(caller, operands[names.index(placeholder)])


def cone(node: Node) -> set[Node]:
    """Return a node and all nodes from which it is computed.

    Of an attention's block mask only the mask_mod counts, because ``Reference`` uses only that.
    """
    seen, stack = {node}, [node]
    while stack:
        new = set(_operands(stack.pop())) - seen
        seen |= new
        stack += new
    return seen


def _operands(node: Node) -> list[Node]:
    if node.target is not flex_attention_hop:
        return node.all_input_nodes
    arguments = (*node.args[:4], node.args[4][-1], *node.args[5:])
    return [n for n in pytree.tree_leaves(arguments) if isinstance(n, Node)]


def _with_writes(node: Node) -> set[Node]:
    """Return all nodes from which a node is computed, with the earlier writes to them.

    Raises NotKnown if a write changes an input.
    """
    needed, before = cone(node), itertools.takewhile(lambda n: n is not node, node.graph.nodes)
    writes = [n for n in before if changes_in_place(n)]
    while True:
        new = [n for n in writes if n not in needed and not needed.isdisjoint(_may_share_memory(n))]
        if not new:
            return needed
        if any(x.op in ("placeholder", "get_attr") for n in new for x in _may_share_memory(n)) or any(n.kwargs for n in new):
            raise NotKnown("it depends on a tensor that is written in place")
        needed |= set().union(*map(cone, new))


def _may_share_memory(write: Node) -> list[Node]:
    """Return the nodes to which an in-place op may write: its operand, and all nodes of which that may be a view."""
    found: list[Node] = []
    node: Any = write.args[0] if write.args else None
    while isinstance(node, Node):
        found.append(node)
        node = node.args[0] if node.args else None
    return found


class _Scalars(Interpreter):
    """Runs a graph of numbers under vmap. An index outside of a tensor, which a mask may hide, is moved inside."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call. Reads stay inside the tensor."""
        if target is operator.getitem and isinstance(args[0], Tensor):
            table, index = args
            indices = index if isinstance(index, tuple) else (index,)
            args = (table, tuple(_inside(i, n) for i, n in zip(indices, table.shape, strict=False)))
        return super().call_function(target, args, kwargs)


def _inside(index: Any, size: int) -> Any:
    if not isinstance(index, Tensor) or index.dim() or index.dtype == torch.bool:
        return index
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)


def evaluate(
    module: GraphModule, node: Node, rows: list[int], columns: list[int], device: torch.device, captured: Sequence[Any]
) -> Tensor:
    """Compute a node of a score_mod as [rows, columns], for b = h = 0. The node must not depend on the score."""
    copies: dict[Node, Node] = {}
    graph = Graph()
    graph.graph_copy(module.graph, copies)
    graph.output(copies[node])
    graph.eliminate_dead_code()
    score = module.graph.find_nodes(op="placeholder")[0]
    if score in cone(node):
        raise NotKnown("it depends on the score")
    zero = torch.zeros((), device=device)
    return score_grid(GraphModule(module, graph), rows, columns, device, captured, [zero])


def score_grid(
    module: GraphModule,
    rows: list[int],
    columns: list[int],
    device: torch.device,
    captured: Sequence[Any],
    first: Sequence[Tensor] = (),
) -> Tensor:
    """Compute ``module(*first, 0, 0, row, column, *captured)`` as [rows, columns], in fp32 on the CPU."""
    interpreter = _Scalars(module)
    nothing = torch.zeros((), dtype=torch.int32, device=device)

    def at(q: Tensor, k: Tensor) -> Tensor:
        return torch.as_tensor(interpreter.run(*first, nothing, nothing, q, k, *captured), device=device)

    q, k = (torch.tensor(p, dtype=torch.int32, device=device) for p in (rows, columns))
    with scalar_indexing():
        result = torch.vmap(torch.vmap(at, in_dims=(None, 0)), in_dims=(0, None))(q, k)
    return result.float().cpu()


def block_states(num_blocks: Tensor, indices: Tensor, full_num_blocks: Tensor | None, full_indices: Tensor | None) -> Tensor:
    """Return [query blocks, key blocks] for batch element 0 and head 0: 0 is skipped, 1 is partial, 2 is full."""
    counts, listed = num_blocks[0, 0].cpu(), indices[0, 0].cpu()
    states = torch.zeros(listed.shape, dtype=torch.int64)
    lists = [(counts, listed, 1)]
    if full_num_blocks is not None and full_indices is not None:
        lists.append((full_num_blocks[0, 0].cpu(), full_indices[0, 0].cpu(), 2))
    for number, blocks, state in lists:
        for row in range(states.shape[0]):
            states[row, blocks[row, : int(number[row])].long()] = state
    return states
