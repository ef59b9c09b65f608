"""The pictures that ``explain`` draws of every flex_attention: its mask, and each learned term of its score_mod.

Nothing here runs unless a report collects pictures (``core.report.collect(pictures=True)``). If one does, ``watch`` examines
a copy of Dynamo's graph before it is compiled. It finds the learned terms of each score_mod, their footprints, and how the
score_mod reads them after hoisting. The first call of the compiled graph fills in the values over (query, key), at most
128 x 128 of them, for batch element 0 and head 0. Only the captured tensors and their inputs are computed, eagerly and
without gradients. If that is not possible, the picture says why, and shows only the footprint.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..attention import canonical, hoisting
from ..attention.calls import ForwardCall
from ..attention.expressions import expression
from ..attention.footprints import Footprint, footprints
from ..attention.kinds import NONE, TiledKind
from ..attention.score_graphs import is_always_true
from ..attention.score_mod import ScoreMod
from ..attention.sums import adds_numbers
from ..core.dynamo_graph import graphs_in
from ..core.fx import fake_tensor, value_of
from ..core.report import log, pictures_wanted, record_picture, unrecorded, user_line
from ..options import Options
from ..torch_api.higher_order import FlexBlockMask, flex_attention_hop
from ..torch_api.sizes import length
from .grids import NotKnown, Values, block_states, cone, evaluate, sampled, score_grid


@dataclass
class Grid:
    """A function of (query, key) for batch element 0 and head 0, at some of the positions.

    queries, keys: the positions. values: [queries, keys] on the CPU, or None; then ``missing`` says why they are not known.
    """

    queries: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    values: Tensor | None = None
    missing: str = "the compiled graph was not called"


@dataclass
class Term:
    """A learned term of a score_mod: a part that does not depend on the score and that has learned inputs.

    text: the term as the user wrote it. footprint: its footprint. read: how a kernel reads it. owners: the numbers, among
    the captured tensors of the attention, of the tensors from which it is read; there are none if the term is dropped.
    hoisted: whether it is in a table.
    """

    text: str
    footprint: Footprint
    read: str
    owners: tuple[int, ...]
    hoisted: bool
    grid: Grid = field(default_factory=Grid)
    #: The values with random numbers instead of the captured tensors, which shows which values are equal. It is set if the
    #: values are not known or all equal, for example those of a bias before training.
    structure: Grid | None = None


@dataclass
class Picture:
    """The picture of one flex_attention.

    graph: the number of the compiled graph. where: the user's line. score_mod: its expression. mask: 0 is hidden, 1 is
    visible by the mask_mod, 2 is visible in a full block, for which no mask is computed; None if nothing is masked. blocks:
    0 is a block that is skipped, 1 one for which the mask_mod is computed, 2 a full one.
    """

    graph: int
    where: str
    score_mod: str
    shape: str
    terms: list[Term]
    mask: Grid | None = None
    blocks: Grid | None = None


@dataclass(frozen=True)
class _Sketch:
    """A picture without values yet: the op's graph, its operands and score_mod, and the terms as nodes of the score_mod."""

    picture: Picture
    graph: GraphModule
    query: Node
    key: Node
    score_mod: GraphModule
    captured: tuple[Any, ...]
    nodes: tuple[Node, ...]
    block_mask: FlexBlockMask
    mask_mod: GraphModule
    mask_captured: tuple[Any, ...]


def watch(gm: GraphModule, options: Options, number: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Examine a Dynamo graph before it is compiled. The function that is returned wraps the compiled graph.

    The pictures are recorded immediately, and get their values at the first call. Does nothing if no report collects
    pictures.
    """
    if not pictures_wanted() or not any(_attentions(module) for module in graphs_in(gm)):
        return lambda compiled: compiled
    try:
        sketches, values = _sketches(copy.deepcopy(gm), replace(options, strict=False), number)
    except Exception as error:
        # An error in a picture must not stop the compilation.
        log.info("there is no picture of graph %d: %s", number, error)
        return lambda compiled: compiled
    for each in sketches:
        record_picture(each.picture)
    return functools.partial(_filling, sketches, values)


def _filling(sketches: Sequence[_Sketch], values: Values, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``compiled`` so that its first call fills in the pictures. The graph is released afterwards."""
    pending = [(sketches, values)]

    @functools.wraps(compiled)
    def run(*inputs: Any) -> Any:
        if pending:
            torch.compiler.disable(_fill)(*pending.pop(), inputs)
        return compiled(*inputs)

    return run


def _attentions(gm: GraphModule) -> list[Node]:
    return list(gm.graph.find_nodes(op="call_function", target=flex_attention_hop))


# ---------------------------------------------------------------- before the compilation: terms, and how they are read


def _sketches(gm: GraphModule, options: Options, number: int) -> tuple[list[_Sketch], Values]:
    """Sketch every attention of a graph. The passes that rewrite score_mods change the graph."""
    sketches = []
    with unrecorded():
        for module in graphs_in(gm):
            canonical.rewrite(module, options)
            made = [(node, _sketch(module, node, number)) for node in _attentions(module)]
            hoisting.rewrite(module, options)
            for node, sketch in made:
                _describe_reads(module, node, sketch)
                sketches.append(sketch)
    return sketches, Values(gm)


def _sketch(gm: GraphModule, node: Node, number: int) -> _Sketch:
    call = ForwardCall.of(node)
    module = getattr(gm, call.score_mod.target)
    graph = module.graph
    terms = learned_terms(graph)
    depends = footprints(graph, _extents(node))
    for i, term in enumerate(terms):
        term.meta["terms"] = {i}
    made = [Term(expression(t), depends[t], "", (), False) for t in terms]
    (root,) = graph.find_nodes(op="output")[0].args
    sizes = [f"{name}={n}" for name, n in zip("BHQK", _extents(node), strict=True)]
    picture = Picture(number, user_line(node), expression(root), ", ".join(sizes), made)
    mask_mod = getattr(gm, call.mask.mask_mod.target)
    operands = (tuple(call.captured), tuple(terms), call.mask, mask_mod, tuple(call.mask_captured))
    # This is the graph before hoisting, which replaces it by another one.
    return _Sketch(picture, gm, call.query, call.key, module, *operands)


def _extents(node: Node) -> list[Any]:
    """Return the numbers of batch elements, heads, queries and keys of an attention of Dynamo's graph."""
    query, key = (value_of(n).shape for n in node.args[:2])
    return [*query[:3], key[2]]


def learned_terms(graph: Graph) -> list[Node]:
    """Return the learned terms of a score_mod's graph.

    They are the largest parts that have learned inputs, are not sums, and do not depend on the score.
    """
    inputs = ScoreMod.of(graph)
    learns = {n for n in inputs.captured if _is_learned(n)}
    scored = {inputs.score}
    for node in graph.nodes:
        scored |= {node} if scored.intersection(node.all_input_nodes) else set()
        learns |= {node} if learns.intersection(node.all_input_nodes) and _is_float(node) else set()
    found: dict[Node, None] = {}

    def visit(node: Any) -> None:
        if not isinstance(node, Node) or node not in learns or node in found:
            return
        # A read at an index that is computed from the score is a term too, although it cannot be drawn.
        read_by_score = any(n.op == "placeholder" for n in node.all_input_nodes if n in learns)
        if adds_numbers(node) or (node in scored and not read_by_score):
            for n in node.all_input_nodes:
                visit(n)
        elif node.op != "output":
            found[node] = None

    (root,) = graph.find_nodes(op="output")[0].args
    visit(root)
    return list(found)


def _is_learned(placeholder: Node) -> bool:
    value = fake_tensor(placeholder)
    return value is not None and value.is_floating_point() and value.requires_grad


def _is_float(node: Node) -> bool:
    value = fake_tensor(node)
    return value is None or value.is_floating_point()


def _describe_reads(gm: GraphModule, attention: Node, sketch: _Sketch) -> None:
    """Describe for every term how the score_mod reads it after hoisting."""
    call = ForwardCall.of(attention)
    graph = getattr(gm, call.score_mod.target).graph
    operands = dict(zip(ScoreMod.of(graph).captured, call.captured, strict=True))
    tables = {p for p, operand in operands.items() if operand not in sketch.captured}
    owners, depends = list(operands), footprints(graph, _extents(attention))
    for i, term in enumerate(sketch.picture.terms):
        # A sum of a term and others has the metadata of the term too. The term itself comes first.
        node = next((n for n in graph.nodes if i in n.meta.get("terms", ()) and n.op != "placeholder"), None)
        if node is None:
            term.read = "it is not read: it does not depend on the key, so softmax cancels it"
            continue
        reads = _reads(node, operands)
        term.owners = tuple(dict.fromkeys(owners.index(read.args[0]) for read in reads))
        term.hoisted = any(read.args[0] in tables for read in reads)
        on_gpu = value_of(sketch.query).device.type != "cpu"
        parts = [_reading(read, operands[read.args[0]], read.args[0] in tables, depends[read], on_gpu) for read in reads]
        term.read = ("" if node in reads else "computed in the kernel from ") + "; ".join(dict.fromkeys(parts))


def _reads(node: Node, operands: dict[Node, Any]) -> list[Node]:
    """Return the reads of captured tensors of floats from which a node is computed."""
    return [n for n in cone(node) if n.op == "call_function" and n.args and n.args[0] in operands and _is_float(n)]


def _reading(read: Node, operand: Any, is_table: bool, footprint: Footprint, on_gpu: bool) -> str:
    """Describe what a kernel reads for one expression of a score_mod."""
    shape = [length(n) for n in value_of(operand).shape]
    name = "a table made outside the kernel" if is_table else expression(read.args[0])
    how = "looked up for every pair" if footprint.unknown or footprint.score else footprint.kind.reads
    if is_table and isinstance(footprint.kind, TiledKind) and footprint.kind.as_vector and on_gpu:
        how += ", M + N - 1 of them for a tile of M x N"
    return f"{name} {shape}: {how}"


# ---------------------------------------------------------------- at the first call: the values


def _fill(sketches: Sequence[_Sketch], values: Values, inputs: Sequence[Any]) -> None:
    """Compute the values from the inputs of a call. If values cannot be computed, the picture has the reason instead."""
    with torch.no_grad():
        values.begin(inputs)
        for sketch in sketches:
            try:
                _fill_one(sketch, values)
            except Exception as error:
                for grid in (*(t.grid for t in sketch.picture.terms), sketch.picture.mask):
                    if grid is not None:
                        grid.missing = _reason(error)


def _fill_one(sketch: _Sketch, values: Values) -> None:
    of = functools.partial(values.of, sketch.graph)
    lengths = [length(value_of(x).shape[2]) for x in (sketch.query, sketch.key)]
    device = value_of(sketch.query).device
    rows, columns = (sampled(n) for n in lengths)
    for node, term in zip(sketch.nodes, sketch.picture.terms, strict=True):
        at = functools.partial(evaluate, sketch.score_mod, node, rows, columns, device)
        term.grid = _drawn(rows, columns, lambda at=at: at(of(sketch.captured)))
        same = term.grid.values is None or bool((term.grid.values == term.grid.values[0, 0]).all())
        if same and term.footprint.kind is not NONE:
            random = _drawn(rows, columns, lambda at=at: at([_stand_in(x, of) for x in sketch.captured]))
            term.structure = random if random.values is not None else None
    sketch.picture.mask, sketch.picture.blocks = _mask(sketch, of, rows, columns, lengths, device)


def _stand_in(operand: Any, of: Callable[[Any], Any]) -> Any:
    """Return random numbers for a captured tensor of floats, the same every time. Other operands keep their values."""
    value = fake_tensor(operand)
    if value is None or not value.is_floating_point():
        return of(operand)
    shape = [length(n) for n in value.shape]
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return numbers.to(value.device, value.dtype)


def _drawn(rows: list[int], columns: list[int], compute: Callable[[], Tensor]) -> Grid:
    try:
        return Grid(rows, columns, compute(), "")
    except Exception as error:
        return Grid(rows, columns, None, _reason(error))


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _mask(
    sketch: _Sketch,
    of: Callable[[Any], Any],
    rows: list[int],
    columns: list[int],
    lengths: Sequence[int],
    device: torch.device,
) -> tuple[Grid | None, Grid | None]:
    """Compute what the mask shows at the sampled positions, and which blocks are skipped, partial or full."""
    mask = sketch.block_mask
    height, width = of((mask.query_block_size, mask.key_block_size))
    everything = is_always_true(sketch.mask_mod)
    if everything and height >= lengths[0] and width >= lengths[1]:
        return None, None

    def mask_values() -> Tensor:
        return (score_grid(sketch.mask_mod, rows, columns, device, of(sketch.mask_captured)) != 0).long()

    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    try:
        states = block_states(*of(lists))
    except NotKnown as error:
        # Draw only the mask_mod, as if every block were partial.
        grid = _drawn(rows, columns, lambda: mask_values().float())
        return grid, Grid([], [], None, _reason(error))
    rows_of, columns_of = (torch.tensor([i // n for i in p]) for p, n in ((rows, height), (columns, width)))

    def shown() -> Tensor:
        state = states[rows_of[:, None], columns_of[None, :]]
        return torch.where(state == 2, 2, torch.where(state == 1, mask_values(), 0)).float()

    block_rows, block_columns = sampled(states.shape[0]), sampled(states.shape[1])
    picked = states[torch.tensor(block_rows)[:, None], torch.tensor(block_columns)[None, :]].float()
    return _drawn(rows, columns, shown), Grid(block_rows, block_columns, picked, "")
