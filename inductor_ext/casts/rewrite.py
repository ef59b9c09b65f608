"""Rewrites the casts of the joint graph: removes round trips, and puts other casts where they move the fewest bytes.

    a -> b -> a, where b holds every value of a         a, through any chain of ops that only move values
    a -> b -> c, where b holds every value of a         a -> c
    cast(expand(x)) to a wider type                     expand(cast(x))
    slice(cast(x)) to a wider type, of every user       cast(slice(x))
    cast(mm(half, half), fp32) that leaves the graph    mm with fp32 output, on a GPU: not rounded to half precision

The first four rewrites change no bit, and leave casts that must be copies (copies.py). A chain f32 -> bf16 -> f32 stays,
because it rounds. The last rewrite is more exact than eager mode (an fp16 gradient above 65504 is not inf), and it is
disabled by Inductor's ``emulate_precision_casts``.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.fx import Node

from ..core.fx import HALF, VIEWS, cast_of, fill_of, value_of
from ..core.joint_graph import Builder, after_tangents
from ..core.purity import base, viewed
from ..core.report import record, user_line
from ..core.target import Target
from ..options import Options
from ..torch_api.config import inductor_config
from ..torch_api.sizes import size_hint
from .copies import Copies, escapes, strides_are_read
from .moves import PARTS, element_dtype, holds, moved

NAME = "casts"
MATMULS = "out_dtype"

aten = torch.ops.aten

_OUT_DTYPE = {aten.mm.default: aten.mm.dtype, aten.bmm.default: aten.bmm.dtype}


def rewrite(build: Builder, options: Options) -> None:
    """Rewrite the casts of a joint graph in place. Another run changes nothing."""
    copies = Copies(build.graph)
    trips = _RoundTrips(build, copies)
    for node in list(build.graph.nodes):
        if cast_of(node) is not None and node.users:
            trips.shorten(node)
    # Start at the end, so that a slice of a slice is rewritten before the slice.
    for node in reversed(list(build.graph.nodes)):
        if cast_of(node) is not None and node.users:
            _cast_fewer(build, copies, node)


def widen_matmuls(build: Builder, options: Options) -> None:
    """Let half-precision matmuls of a joint graph, in place, write fp32 if their result is cast to fp32 and returned."""
    if inductor_config.emulate_precision_casts:
        return
    backward = after_tangents(build.graph)
    for node in list(build.graph.nodes):
        if cast_of(node) is not None and node.users and element_dtype(node) is torch.float32:
            _widen_matmul(build, node, backward)


class _RoundTrips:
    """Finds the tensor from which a node's values were cast, and applies to it the ops that moved them after the cast."""

    def __init__(self, build: Builder, copies: Copies) -> None:
        self.build = build
        self._copies = copies
        self._has: dict[tuple[Node, torch.dtype], bool] = {}
        self._made: dict[tuple[Node, torch.dtype], Node] = {}
        self._sources: dict[Node, torch.dtype | None] = {}

    def shorten(self, cast: Node) -> None:
        """If the operand of a cast was cast to a type that holds its source, replace the cast by one from the source."""
        operand, target = cast_of(cast), element_dtype(cast)
        source = self._source(operand)
        if source is None or source is element_dtype(operand) or not self._exists(operand, source):
            return
        if strides_are_read(cast):
            return
        if target is not source and not (target.is_floating_point and target.itemsize >= 4):
            return
        if target is not source and _rounds(self._make(operand, source)):
            # Stock's pass of torch 2.11 would take a cast that rounds, followed by this cast, for a pair without effect.
            return
        kinds = [str(d).removeprefix("torch.") for d in (source, element_dtype(operand), target)]
        returned, expected = _reaches_output(cast), value_of(cast)
        result = self._make(operand, source)
        owner = base(result)
        if target is source and self._copies.kept(cast, result):
            return
        if returned and (owner in self._copies.written or (owner.op == "call_function" and escapes(owner))):
            # The cast keeps the value before a write to the tensor, or it is one of two results that must be two tensors.
            return
        with self.build.before(cast):
            result = copy = self.build.convert(result, target)
            moved_in_memory = value_of(result).stride() != expected.stride()
            if returned and moved_in_memory and not expected.is_contiguous():
                return
            if returned and (moved_in_memory or base(result).op != "call_function"):
                # A returned cast is a new tensor, so an input must not be returned instead.
                layout = {"memory_format": torch.contiguous_format} if moved_in_memory else {}
                copy = self.build.call(aten.clone.default, result, **layout)
        record(NAME, " -> ".join(kinds), "removed", f"{_bytes(operand)} bytes are not written", user_line(cast))
        self.build.replace(cast, copy)
        self._erase_unused(operand)
        if cast_of(result) is not None:
            self.shorten(result)

    def _erase_unused(self, node: Node) -> None:
        pending = {node}
        while pending:
            current = pending.pop()
            if current.op == "call_function" and not current.users and not current.is_impure():
                pending.update(current.all_input_nodes)
                self.build.graph.erase_node(current)

    def _source(self, node: Node) -> torch.dtype | None:
        """The dtype from which the values of ``node`` were last cast, if the cast was to a type that holds it; else None."""
        chain = []
        while node not in self._sources:
            chain.append(node)
            inner = cast_of(node)
            if inner is not None:
                self._sources[node] = element_dtype(inner) if holds(element_dtype(node), element_dtype(inner)) else None
                break
            operands = [n for n in moved(node) if fill_of(n) is None]
            if not operands:
                self._sources[node] = None
                break
            node = operands[0]
        found = self._sources[node]
        for link in chain:
            self._sources[link] = found
        return found

    def _exists(self, node: Node, dtype: torch.dtype) -> bool:
        """Whether the values of ``node`` can be computed in ``dtype`` without a cast."""
        pending = [node]
        while pending:
            current = pending[-1]
            key = (current, dtype)
            inner, constant, operands = cast_of(current), fill_of(current), moved(current)
            if key in self._has:
                pending.pop()
            elif element_dtype(current) is dtype:
                self._has[key] = True
            elif inner is not None:
                self._has[key] = element_dtype(inner) is dtype and holds(element_dtype(current), dtype)
            elif constant is not None:
                self._has[key] = float(torch.tensor(constant, dtype=dtype)) == float(constant)
            elif not operands:
                self._has[key] = False
            elif unknown := [n for n in operands if (n, dtype) not in self._has]:
                pending.extend(unknown)
            else:
                self._has[key] = all(self._has[n, dtype] for n in operands)
        return self._has[node, dtype]

    def _make(self, node: Node, dtype: torch.dtype) -> Node:
        """The values of ``node`` in ``dtype``: its moves are applied to the operand of the cast."""
        pending = [node]
        while pending:
            current = pending[-1]
            if (current, dtype) in self._made:
                pending.pop()
                continue
            leaf = element_dtype(current) is dtype or cast_of(current) is not None or fill_of(current) is not None
            missing = [] if leaf else [n for n in moved(current) if (n, dtype) not in self._made]
            if missing:
                pending.extend(missing)
            else:
                self._made[current, dtype] = self._make_one(current, dtype)
        return self._made[node, dtype]

    def _make_one(self, node: Node, dtype: torch.dtype) -> Node:
        if element_dtype(node) is dtype:
            return node
        if cast_of(node) is not None:
            return cast_of(node)
        # Insert right after the original, because other nodes may use the result before the cast that is being replaced.
        with self.build.before(node.next, like=node):
            if fill_of(node) is not None:
                return self.build.call(node.target, *node.args, **{**node.kwargs, "dtype": dtype})
            changed = set(moved(node))
            args = torch.fx.node.map_arg(node.args, lambda n: self._made[n, dtype] if n in changed else n)
            # The result of a cast is dense, but its operand may have strides for which a view is not possible.
            view = node.target in (aten.view.default, aten._unsafe_view.default)
            return self.build.call(aten.reshape.default if view else node.target, *args, **node.kwargs)


def _rounds(node: Node) -> bool:
    """Whether a node is a cast to a type that does not hold every value of its operand's type."""
    inner = cast_of(node)
    return inner is not None and not holds(element_dtype(node), element_dtype(inner))


def _reaches_output(node: Node) -> bool:
    """Whether the graph returns a tensor or a view of it."""
    return any(user.op == "output" or (viewed(user) is not None and _reaches_output(user)) for user in node.users)


def _bytes(node: Node) -> str:
    sizes = [size_hint(n) for n in value_of(node).shape]
    if None in sizes:
        return "an unknown number of"
    total = value_of(node).dtype.itemsize
    for n in sizes:
        total *= n
    return str(total)


def _cast_fewer(build: Builder, copies: Copies, cast: Node) -> None:
    """Move a widening cast before an expand, or behind slices if only slices of its result are used."""
    source, target = cast_of(cast), element_dtype(cast)
    if not holds(target, element_dtype(source)) or target is element_dtype(source) or _reaches_output(cast):
        return
    if strides_are_read(cast):
        return
    if source.target is aten.expand.default and len(source.users) == 1:
        with build.before(cast):
            inner = build.convert(source.args[0], target)
            result = build.call(source.target, inner, *source.args[1:], **source.kwargs)
        build.replace(cast, result)
        _cast_fewer(build, copies, inner)
    elif cast.users and all(user.target in PARTS and not copies.kept(user, source) for user in cast.users):
        for user in list(cast.users):
            with build.before(user):
                part = build.call(user.target, source, *user.args[1:], **user.kwargs)
                result = build.convert(part, target)
            build.replace(user, result)
            _cast_fewer(build, copies, result)
        build.graph.erase_node(cast)


def _widen_matmul(build: Builder, cast: Node, backward: set[Node]) -> None:
    """Let a half-precision matmul write fp32 if its result is cast to fp32 and leaves the graph."""
    chain, source = [], cast_of(cast)
    while source.target in VIEWS and len(source.users) == 1:
        chain.append(source)
        source = source.args[0]
    matmul = _OUT_DTYPE.get(source.target)
    if matmul is None or len(source.users) > 1 or element_dtype(source) not in HALF or not _leaves(cast, backward):
        return
    if not Target.of(value_of(source).device).out_dtype_matmul:
        return
    if any(element_dtype(operand) is not element_dtype(source) for operand in source.args):
        return
    with build.before(source):
        result = build.call(matmul, *source.args, torch.float32)
    for link in reversed(chain):
        with build.before(cast, like=link):
            result = build.call(link.target, result, *link.args[1:], **link.kwargs)
    record(NAME, str(source.target), "fp32 output", f"{_bytes(cast)} bytes are not cast", user_line(cast))
    build.replace(cast, result)


def _leaves(node: Node, backward: set[Node]) -> bool:
    """Whether every use of a tensor ends in a result of the graph: as it is, reshaped, or added to a gradient.

    The gradients of weights that one matmul reads (linears.py) are slices of its result. Gradients are accumulated in the
    backward, or in place into an input. For any other sum (a residual stream) the answer is no, because the matmul would
    write twice the bytes and the sum would read twice the bytes.
    """
    uses: Counter[bool] = Counter()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        # A slice in the forward may be all that is left of the result.
        part = user.target is aten.slice.Tensor and user in backward
        summed = user.target is aten.add.Tensor and (user in backward or any(map(_is_stored_in_input, user.users)))
        if _is_stored_in_input(user):
            uses[True] += 1
        elif user.target in VIEWS or user.target is aten.clone.default or part or summed:
            pending.extend(user.users)
        else:
            uses[user.op == "output"] += 1
    return uses[True] > 0 and not uses[False]


def _is_stored_in_input(node: Node) -> bool:
    """Whether a node overwrites an input of the graph, which is how an in-place operation ends."""
    return node.target is aten.copy_.default and node.args[0].op == "placeholder"
