"""Lower the graphs of score_mods and mask_mods to subgraphs that a template inlines.

A copy of each graph is made ready first: the tables that the kernel reads by tile become inputs of it, and every other read
stays inside its tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..core import subgraphs
from ..core.fx import dtype_of, fake_tensor
from ..torch_api.ir import input_buffer
from .bounds import become_address, clamp_reads
from .captured_grads import Contribution, JointGraph
from .score_mod import ScoreMod, output_nodes, returning
from .tile_tables import TileTables, reads_of

aten = torch.ops.aten

_POSITIONS = tuple((name, torch.int32) for name in ("b", "h", "m", "n"))
_SCORE = (("score", torch.float32), *_POSITIONS)
_JOINT = (*_SCORE, ("grad_score_mod", torch.float32))


@dataclass(frozen=True)
class InlinedContribution:
    """A contribution to a captured gradient with its subgraphs.

    buffers: its value, its offset in the gradient, and in_bounds. checked: in_bounds is not proven. address: the graph of
    offset and in_bounds, to be run on all positions at once, or None where that is not needed.
    """

    contribution: Contribution
    buffers: list[Any]
    checked: bool
    address: GraphModule | None = None


@dataclass(frozen=True)
class Inlining:
    """The tensors and lengths of the kernel into which graphs are inlined.

    lengths: the lengths of b, h, q and k. captured, mask_captured: the tensors that score_mod and mask_mod read. tables:
    those of ``captured`` that the kernel reads by tile.
    """

    device: torch.device
    lengths: Sequence[Any]
    captured: Sequence[Any]
    mask_captured: Sequence[Any]
    tables: TileTables

    def score(self, module: GraphModule) -> Any:
        """Lower the score of a score_mod."""
        (buffer,) = self._lowered(returning(module, output_nodes(module.graph)), ScoreMod.of, _SCORE)
        return buffer

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
        if contribution.plain or not in_order:
            return InlinedContribution(contribution, buffers, checked)
        over_tensors, _ = self._address(joint, contribution)
        clamp_reads(over_tensors, ScoreMod.of_joint(over_tensors.graph).ranges(self.lengths))
        return InlinedContribution(contribution, buffers, checked, over_tensors)

    def _address(self, joint: JointGraph, contribution: Contribution) -> tuple[GraphModule, bool]:
        module = returning(joint.module, contribution.indices)
        return module, become_address(module, contribution.shape, ScoreMod.of_joint(module.graph).ranges(self.lengths))

    def _lowered(self, module: GraphModule, inputs_of: Callable[[Graph], ScoreMod], operands: Sequence[Any]) -> list[Any]:
        """Make ``module`` ready and lower each of its results."""
        inputs = inputs_of(module.graph)
        _narrow_float64(module.graph)
        tiles = self._read_by_tile(module, inputs)
        clamp_reads(module, inputs.ranges(self.lengths))
        return subgraphs.inline(module, self._placeholders(operands), [*self.captured, *tiles])

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
