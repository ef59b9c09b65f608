"""Lower the graphs of score_mods and mask_mods to subgraphs that a template inlines.

A copy of each graph is made ready first: the tables that the kernel reads by tile become inputs of it, and every other read
stays inside its tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..core import subgraphs
from ..core.fx import CASTS_AND_COPIES, cone, dtype_of, fake_tensor
from ..core.templates import Listed
from ..torch_api.ir import contiguous_strides, input_buffer
from ..torch_api.sizes import known_at_most
from .blocks import Block, block
from .bounds import become_address, clamp_reads
from .captured_grads import Contribution, JointGraph
from .pair_entries import dim_of_heads, read_for_each_pair
from .score_mod import ScoreMod, output_nodes, returning
from .tile_inputs import ConditionalTile, Coordinate, EarlyRead, condition_of, coordinate_of, values_read_early
from .tile_tables import TileTables, reads_of
from .writers import Writers, writers

aten = torch.ops.aten

#: A kernel sums for each key and each entry of the query if there are at most this many entries of queries.
MOST_ENTRIES = 32
_POSITIONS = tuple((name, torch.int32) for name in ("b", "h", "m", "n"))
_SCORE = (("score", torch.float32), *_POSITIONS)
_JOINT = (*_SCORE, ("grad_score_mod", torch.float32))


@dataclass(frozen=True)
class InlinedContribution:
    """A contribution to a captured gradient with its subgraphs.

    writers: which scores are added to one element. block: the matrices that its elements are, or None. buffers: its value,
    its offset in the gradient, and in_bounds. checked: in_bounds is not proven. address: the graph of offset and in_bounds,
    to be run on all positions at once, or None where that is not needed. dim_of_heads: as of the function of that name.
    by_entry: offset and in_bounds of its ``query_dim`` alone, and of the other dims; empty if there are no few entries of
    the query. inside: whether a score is strictly between the bounds of all clamps of the index, if those have one writer;
    otherwise empty. condition: that of the contribution, or empty.
    """

    contribution: Contribution
    writers: Writers
    block: Block | None
    buffers: list[Any]
    checked: bool
    address: GraphModule | None = None
    dim_of_heads: int | None = None
    by_entry: list[Any] = field(default_factory=list)
    inside: list[Any] = field(default_factory=list)
    condition: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class LoweredScore:
    """A score_mod's subgraphs.

    score: its result. before: what is computed before it, the values that are read early and conditions of blocks. reads,
    conditional: what these are for, by their numbers among those.
    """

    score: Any
    before: list[Any]
    reads: list[EarlyRead]
    conditional: list[ConditionalTile]

    @property
    def reads_each_score(self) -> bool:
        """Whether something is read for each score by itself, and not by tile."""
        return any(read.by_query and read.by_key for read in self.reads)

    def options(self) -> dict[str, Any]:
        """Return the options for the templates."""
        return {"READS": Listed(self.reads), "CONDITIONAL_TILES": Listed(self.conditional)}


@dataclass(frozen=True)
class Inlining:
    """The tensors and lengths of the kernel into which graphs are inlined.

    lengths: the lengths of b, h, q and k. captured, mask_captured: the tensors that score_mod and mask_mod read. tables:
    those of ``captured`` that the kernel reads by tile. coordinates: those that the subgraphs use, by name. It grows with
    each subgraph.
    """

    device: torch.device
    lengths: Sequence[Any]
    captured: Sequence[Any]
    mask_captured: Sequence[Any]
    tables: TileTables
    coordinates: dict[str, Coordinate] = field(default_factory=dict)

    def score(self, module: GraphModule) -> LoweredScore:
        """Lower the score of a score_mod, and what the kernel reads for a tile before it."""
        module = returning(module, output_nodes(module.graph))
        graph, inputs = module.graph, ScoreMod.of(module.graph)
        by_tile = [inputs.captured[table.owner] for table in self.tables.tables]
        found = values_read_early(graph, inputs, by_tile)
        unless = [condition_of([node], graph, inputs, 2) for node in found]
        only_if = [condition_of(reads_of(table), graph, inputs, 1) for table in by_tile]
        before = list(dict.fromkeys([*found, *(c for c in (*unless, *only_if) if c is not None)]))
        lowered = [self._lowered(returning(module, [node]), ScoreMod.of, _SCORE)[0] for node in before]
        reads = [
            EarlyRead(i, inputs.q in cone(node), inputs.k in cone(node), None if c is None else before.index(c))
            for i, (node, c) in enumerate(zip(found, unless, strict=True))
        ]
        conditional = [
            ConditionalTile(table.name, before.index(c))
            for table, c in zip(self.tables.tables, only_if, strict=True)
            if c is not None
        ]
        last = graph.find_nodes(op="placeholder")[-1]
        for read, node in zip(reads, found, strict=True):
            with graph.inserting_after(last):
                last = graph.placeholder(read.name)
            last.meta = dict(node.meta)
            node.replace_all_uses_with(last)
        graph.eliminate_dead_code()
        module.recompile()
        early = [input_buffer(read.name, torch.float32, self.device) for read in reads]
        (buffer,) = self._lowered(module, ScoreMod.of, _SCORE, early)
        return LoweredScore(buffer, lowered, reads, conditional)

    def options(self) -> dict[str, Any]:
        """Return the template option with the coordinates, once everything is lowered."""
        return {"COORDINATES": Listed(self.coordinates.values())}

    def mask(self, module: GraphModule) -> Any:
        """Lower the result of a mask_mod."""
        module = returning(module, output_nodes(module.graph))
        clamp_reads(module, ScoreMod.of_mask(module.graph).ranges(self.lengths))
        (buffer,) = subgraphs.inline(module, self._placeholders(_POSITIONS), self.mask_captured)
        return buffer

    def joint(self, joint: JointGraph, in_order: bool) -> tuple[Any, list[list[InlinedContribution] | None]]:
        """Lower the gradient of the score, and the contributions to the gradient of each captured tensor.

        in_order: no atomics are used, so that a contribution whose index is not plain needs its address a second time.
        """
        module = returning(joint.module, [] if joint.grad_score is None else [joint.grad_score])
        if joint.grad_score is None:
            _return_zero(module.graph, self.device)
        (grad_score,) = self._lowered(module, ScoreMod.of_joint, _JOINT)
        return grad_score, [
            None if contributions is None else [self._contribution(joint, c, in_order) for c in contributions]
            for contributions in joint.captured
        ]

    def _contribution(self, joint: JointGraph, contribution: Contribution, in_order: bool) -> InlinedContribution:
        value = returning(joint.module, [contribution.value])
        target, checked = self._address(joint, contribution)
        buffers = [buffer for module in (value, target) for buffer in self._lowered(module, ScoreMod.of_joint, _JOINT)]
        written_by = writers(contribution, joint.inputs, self.lengths)
        strides = contiguous_strides(contribution.shape)
        matrices = block(contribution.indices, contribution.shape, strides, joint.inputs, self.lengths)
        forms: dict[str, Any] = {"dim_of_heads": dim_of_heads(contribution, joint.inputs, self.lengths)}
        if not in_order:
            forms["by_entry"] = self._by_entry(joint, contribution)
            forms["inside"] = self._inside(joint, written_by)
            forms["condition"] = self._condition(joint, contribution)
        count = sum(len(contributions or ()) for contributions in joint.captured)
        by_pair = forms["dim_of_heads"] is not None and read_for_each_pair(contribution, joint.inputs, self.lengths, count)
        if by_pair or (in_order and not contribution.plain):
            over_tensors, _ = self._address(joint, contribution)
            clamp_reads(over_tensors, ScoreMod.of_joint(over_tensors.graph).ranges(self.lengths))
            forms["address"] = over_tensors
        return InlinedContribution(contribution, written_by, matrices, buffers, checked, **forms)

    def _by_entry(self, joint: JointGraph, contribution: Contribution) -> list[Any]:
        """Lower the address in the dim of the query, and that in the other dims, if the dim of the query is short."""
        dim = contribution.query_dim
        if (
            dim is None
            or not contribution.axes[3]
            or not _stays_finite(contribution.value)
            or not known_at_most(subgraphs.expression(contribution.shape[dim]), MOST_ENTRIES)
        ):
            return []
        elsewhere = [0 if d == dim else index for d, index in enumerate(contribution.indices)]
        of_query = replace(contribution, indices=(contribution.indices[dim],), shape=(contribution.shape[dim],))
        of_key = replace(contribution, indices=tuple(elsewhere))
        modules = (self._address(joint, part)[0] for part in (of_query, of_key))
        return [buffer for module in modules for buffer in self._lowered(module, ScoreMod.of_joint, _JOINT)]

    def _inside(self, joint: JointGraph, written_by: Writers) -> list[Any]:
        """Lower the condition that no clamp of an index has a value at its bounds."""
        if not written_by.clamps:
            return []
        module = returning(joint.module, [clamp.node for clamp in written_by.clamps])
        output = module.graph.find_nodes(op="output")[0]
        compared = []
        with module.graph.inserting_before(output):
            for value, clamp in zip(output.args[0], written_by.clamps, strict=True):
                for op, end in ((aten.gt.Scalar, clamp.low), (aten.lt.Scalar, clamp.high)):
                    if end is not None:
                        compared.append(module.graph.call_function(op, (value, end)))
            inside = functools.reduce(lambda x, y: module.graph.call_function(aten.logical_and.default, (x, y)), compared)
        output.args = ([inside],)
        module.recompile()
        return self._lowered(module, ScoreMod.of_joint, _JOINT)

    def _condition(self, joint: JointGraph, contribution: Contribution) -> list[Any]:
        """Lower the condition of blocks in which there is something to add."""
        if contribution.condition is None:
            return []
        return self._lowered(returning(joint.module, [contribution.condition[0]]), ScoreMod.of_joint, _JOINT)

    def _address(self, joint: JointGraph, contribution: Contribution) -> tuple[GraphModule, bool]:
        module = returning(joint.module, contribution.indices)
        return module, become_address(module, contribution.shape, ScoreMod.of_joint(module.graph).ranges(self.lengths))

    def _lowered(
        self,
        module: GraphModule,
        inputs_of: Callable[[Graph], ScoreMod],
        operands: Sequence[Any],
        early: Sequence[Any] = (),
    ) -> list[Any]:
        """Make ``module`` ready and lower each of its results. ``early``: its inputs after the captured tensors."""
        inputs = inputs_of(module.graph)
        _narrow_float64(module.graph)
        tiles = self._read_by_tile(module, inputs)
        clamp_reads(module, inputs.ranges(self.lengths))
        coordinates = self._at_coordinates(module, inputs)
        return subgraphs.inline(module, self._placeholders(operands), [*self.captured, *early, *tiles, *coordinates])

    def _at_coordinates(self, module: GraphModule, inputs: ScoreMod) -> list[Any]:
        """Replace coordinates by new inputs. Changes ``module``, and returns placeholders for the inputs.

        The intervals of the indices are known before this, and the new inputs have none.
        """
        graph = module.graph
        last = graph.find_nodes(op="placeholder")[-1]
        made: dict[str, Node] = {}
        for node in list(graph.nodes):
            coordinate = coordinate_of(node, inputs)
            if coordinate is None:
                continue
            if coordinate.name not in made:
                with graph.inserting_after(last):
                    made[coordinate.name] = last = graph.placeholder(coordinate.name)
                last.meta = dict(node.meta)
            node.replace_all_uses_with(made[coordinate.name])
            graph.erase_node(node)
            self.coordinates[coordinate.name] = coordinate
        module.recompile()
        return [input_buffer(name, torch.int32, self.device) for name in made]

    def _read_by_tile(self, module: GraphModule, inputs: ScoreMod) -> list[Any]:
        """Replace the reads of the tables by new inputs. Changes ``module``, and returns placeholders for the inputs."""
        graph = module.graph
        last = graph.find_nodes(op="placeholder")[-1]
        made = []
        for table in self.tables.tables:
            buffer = self.captured[table.owner]
            with graph.inserting_after(last):
                tile = last = graph.placeholder(table.name)
            made.append(input_buffer(table.name, buffer.get_dtype(), buffer.get_device()))
            for read in reads_of(inputs.captured[table.owner]):
                tile.meta = dict(read.meta)
                read.replace_all_uses_with(tile)
                graph.erase_node(read)
        graph.eliminate_dead_code()
        module.recompile()
        return made

    def _placeholders(self, operands: Sequence[tuple[str, torch.dtype]]) -> list[Any]:
        return [input_buffer(name, dtype, self.device) for name, dtype in operands]


#: Ops whose results are finite if their operands are.
_FINITE = {aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.where.self, aten.index.Tensor}
_FINITE |= {aten.full.default, aten.tanh.default, aten.sigmoid.default, aten.abs.default, aten.sign.default}
_FINITE |= {aten.clamp.default, aten.maximum.default, aten.minimum.default} | CASTS_AND_COPIES


def _stays_finite(value: Node) -> bool:
    """Return whether an addend is finite if the score, its gradient and what is read are.

    A matmul with a one-hot multiplies the addends of other entries by 0, and infinity times 0 is not 0.
    """
    floats = [
        n for n in cone(value) if n.op != "placeholder" and fake_tensor(n) is not None and fake_tensor(n).is_floating_point()
    ]
    return all(n.target in _FINITE for n in floats)


def _narrow_float64(graph: Graph) -> None:
    """Cast float64 results, which a score_mod has if it reads a float64 tensor, to the fp32 in which a kernel computes."""
    output = graph.find_nodes(op="output")[0]

    def narrowed(result: Node) -> Node:
        if fake_tensor(result) is None or dtype_of(result) is not torch.float64:
            return result
        with graph.inserting_before(output):
            return graph.call_function(torch.ops.prims.convert_element_type.default, (result, torch.float32))

    output.args = torch.fx.map_arg(output.args, narrowed)


def _return_zero(graph: Graph, device: torch.device) -> None:
    output = graph.find_nodes(op="output")[0]
    with graph.inserting_before(output):
        zero = graph.call_function(aten.full.default, ([], 0.0), {"dtype": torch.float32, "device": device})
    output.args = ([zero],)
