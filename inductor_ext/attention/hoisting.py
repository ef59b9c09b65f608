"""Compute expressions of a score_mod that depend on less than a (query, key) pair once, outside the kernel.

This pass works on Dynamo's graph, before autograd. It takes subexpressions that do not depend on the score and whose
footprint (footprints.py) is a row, a column, a diagonal, an image, a small pair or none. Each becomes an fp32 table that
ordinary torch ops compute, and the score_mod reads the table at a canonical index. Autograd derives the rest: the backward
of T5's bucket lookup scatters Q + K values for each head, not Q * K.

    footprint     table                     read as
    none          [B?, H?]                  t[b, h]
    row           [B?, H?, Q]               t[b, h, q]
    column        [B?, H?, K]               t[b, h, k]
    diagonal      [B?, H?, Q + K - 1]       t[b, h, k - q]    (negative distances are at the end)
    antidiagonal  [B?, H?, Q + K - 1]       t[b, h, k + q]
    image W       one element for each distance of rows and of columns (kinds/images.py)
    pair          [B?, H?, Q, K]            t[b, h, q, k]     (small, or of lookups in rows and of relative shifts)

The pass applies these rules, in this order:
    lookups at the difference of captured positions are separated from those at ``k - q`` (restarts.py);
    a learned term of the result that does not depend on the key is dropped if nobody asks for the logsumexp, because
    softmax cancels it;
    inner products that are added to the score become columns of the query and the key (columns.py);
    relative shifts that TMA cannot read become tables of pairs (shifts.py);
    terms of a sum that have one footprint and do not depend on the score are merged into one table;
    other expressions are hoisted if they read a captured tensor at an index that is not a plain position.
A diagonal that is computed by cheap arithmetic from values for each row or column (``slope[h] * (q - k)``) stays in the
kernel, where its gradient is a sum in registers. Equal tables are shared. Masks are not changed.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..core import depend  # noqa: F401  (registers gradfuse::depend)
from ..core.dynamo_graph import Inserter
from ..core.fx import cone, fake_tensor, indices_of, name_of
from ..core.report import record, user_line
from ..core.target import Target
from ..core.writes import Writes
from ..options import Options
from ..torch_api.higher_order import flex_attention_hop
from .calls import ForwardCall
from .canonical import detach_frozen, drop_unused, install, needs_grad
from .columns import Columns, Product, product
from .descriptor import described
from .expressions import expression
from .footprints import Footprint, footprints, inexact_integers, join_all, names, polynomials
from .functional import impurity
from .kinds import NONE
from .no_mask import hides_nothing
from .ordinary import Ordinary
from .restarts import Restarts, separate_distances
from .row_lookups import LARGEST_TABLE, row_lookups
from .score_mod import ScoreMod
from .shifts import relative_shifts
from .sums import SUMS, adds_numbers, is_only_operand
from .tables import Tables

NAME = "hoisting"

#: The passes without which the gradient of a lookup in rows would be atomics outside of the kernel.
_LOOKUP_GRADIENTS = ("scatters", "entry_sums")
#: Ops that cost a kernel more than a read of a table.
_EXPENSIVE = names("exp exp2 log log2 log1p pow sin cos tanh sigmoid erf sqrt rsqrt atan2 softplus gelu silu")
#: Ops whose results may be infinite although their operands are finite.
_MAY_BE_INFINITE = names(
    "log log2 log10 log1p logit xlogy div divide truediv true_divide reciprocal rsqrt pow float_power exp exp2 expm1 sinh"
    " cosh tan atanh"
)
#: The number of elements of the largest table of pairs (16 MB, which stays in a GPU's L2 cache). Such a table costs a read
#: of H·Q·K elements and the tiles of its gradient. The expression in the kernel would cost B·H·Q·K lookups, and as many
#: atomics in the backward.
LARGEST_PAIR_TABLE = 2**22


def rewrite(gm: GraphModule, options: Options) -> None:
    """Hoist expressions out of every score_mod of a Dynamo graph that will need a gradient. Changes ``gm``."""
    ordinary = Ordinary(Writes(gm.graph), minus_infinity=True)
    for node in gm.graph.find_nodes(op="call_function", target=flex_attention_hop):
        call = ForwardCall.of(node)
        module = getattr(gm, call.score_mod.target)
        trains = needs_grad([call.query, call.key, call.value, *call.captured])
        # The pass ``score_mods`` has already reported an impure score_mod.
        if (trains or any(map(_is_vector, module.graph.nodes))) and impurity(module.graph) is None:
            _rewrite_node(gm, node, options, ordinary)
    gm.recompile()


def _rewrite_node(gm: GraphModule, node: Node, options: Options, ordinary: Ordinary) -> None:
    call = ForwardCall.of(node)
    module = getattr(gm, call.score_mod.target)
    graph, extents, outer = Graph(), call.extents, Inserter(gm.graph, node)
    graph.output(graph.graph_copy(module.graph, {}))
    mask_mod = getattr(gm, call.mask.mask_mod.target)
    masked = not hides_nothing(call, mask_mod)
    restarts = Restarts()
    if Target.of(fake_tensor(call.query).device).triton:
        with gm.graph.inserting_before(node):
            restarts = separate_distances(graph, call, mask_mod if masked else None, outer, LARGEST_PAIR_TABLE)
    captured = [*call.captured, *restarts.operands]
    known, sums = footprints(graph, extents), polynomials(graph, extents)
    tables = Tables(
        outer,
        graph,
        call.query,
        call.key,
        dict(zip(ScoreMod.of(graph).captured, captured, strict=True)),
        inexact_integers(graph, extents),
        masked,
        hypothetical=restarts.lookups,
        row_lookups=row_lookups(graph, known, extents) if all(map(options.enabled, _LOOKUP_GRADIENTS)) else {},
        shifts=relative_shifts(graph, known, sums, extents),
        polynomials=sums,
    )
    hoist = _Hoist(graph, known, list(captured), tables, ordinary, [("distances", text) for text in restarts.done])
    with gm.graph.inserting_before(node):
        anchors = hoist.drop_invariant() if _only_output(node) else []
        query, key = hoist.append_columns(Columns(call, tables, known))
        hoist.shifts()
        hoist.merge_sums()
        hoist.hoist_rest()
        if not hoist.done:
            return
        graph.eliminate_dead_code()
        captured = drop_unused(graph, [*captured, *tables.operands], [])
        captured = [tables.widened(x) for x in captured]
        if anchors:
            query = tables.outer.function(torch.ops.gradfuse.depend.default, query, anchors)
        made = {i: tables.kinds[operand] for i, operand in enumerate(captured) if operand in tables.kinds}
        captured = detach_frozen(outer, graph, captured)
        new_score_mod = install(gm, call.score_mod.target, GraphModule(module, graph))
    kernel_options = {**call.kernel_options, **described(made)}
    call = replace(call, query=query, key=key, score_mod=new_score_mod, captured=tuple(captured))
    node.args = replace(call, kernel_options=kernel_options).operands()
    for path, why in hoist.done:
        record(NAME, "flex_attention", path, why, user_line(node))


def _is_vector(node: Node) -> bool:
    """Return whether a node of a score_mod computes more than one number, for example a row of a captured tensor."""
    value = fake_tensor(node)
    return node.op in ("call_function", "call_method") and value is not None and value.dim() > 0


def _only_output(node: Node) -> bool:
    """Return whether nobody reads the logsumexp or the row maximum."""
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


@dataclass
class _Hoist:
    """One score_mod: its graph, the footprints of its nodes, and the decisions (path, why) for the report."""

    graph: Graph
    footprints: dict[Node, Footprint]
    captured: list[Any]
    tables: Tables
    ordinary: Ordinary
    done: list[tuple[str, str]] = field(default_factory=list)
    reads: set[Node] = field(default_factory=set)

    # ------------------------------------------------ the three rules

    def drop_invariant(self) -> list[Any]:
        """Drop learned terms of the output that do not depend on the key. Returns their tensors, whose gradient is zero."""
        output = self.graph.find_nodes(op="output")[0]
        root = output.args[0]
        terms = self._terms(root)
        gone = [n for _, n in terms if isinstance(n, Node) and not self.footprints[n].has_key and self._learned(n)]
        # Keep a term whose tensors other terms read too. In a cumulative gate that is read at the query and at the key, the
        # rounding of one sum cancels that of the other.
        elsewhere = {x for _, n in terms if n not in gone for x in self._learned_anywhere(n)}
        gone = [n for n in gone if elsewhere.isdisjoint(self._learned(n))]
        kept = [(sign, n) for sign, n in terms if n not in gone]
        if not gone or not any(isinstance(n, Node) for _, n in kept):
            return []
        with self.graph.inserting_before(output):
            output.args = (self._sum(kept, root),)
        self.done += [("dropped", f"{expression(n)} does not depend on the key, so softmax cancels it") for n in gone]
        anchors = {operand: None for n in gone for operand in self._learned(n)}
        self.graph.eliminate_dead_code()
        return list(anchors)

    def _learned(self, node: Node) -> list[Any]:
        """Return the captured tensors that a term learns, or none if it may contain an infinity, which hides a whole row.

        A term may do so if it has an infinite constant, a function with infinite values (the logarithm of a gate that is 0),
        or a tensor of floats that may be a mask of -inf: it is frozen, or the graph computes it from such a thing.
        """
        inside = cone(node)
        numbers = [a for n in inside for a in (*n.args, *n.kwargs.values()) if isinstance(a, float)]
        if any(math.isinf(x) for x in numbers) or any(name_of(n) in _MAY_BE_INFINITE for n in inside):
            return []
        operands = dict(zip(ScoreMod.of(self.graph).captured, self.captured, strict=True))
        read = [operands[n] for n in inside if n in operands]
        floats = [x for x in read if fake_tensor(x) is not None and fake_tensor(x).is_floating_point()]
        return floats if all(map(self.ordinary, floats)) else []

    def _learned_anywhere(self, node: Any) -> list[Any]:
        """Return the captured tensors that a term reads and that need a gradient."""
        operands = dict(zip(ScoreMod.of(self.graph).captured, self.captured, strict=True))
        read = [operands[n] for n in cone(node) if n in operands] if isinstance(node, Node) else []
        return [x for x in read if needs_grad([x])]

    def append_columns(self, columns: Columns) -> tuple[Node, Node]:
        """Turn inner products that are added to the score into columns of the query and key, and return these two."""
        score = root = ScoreMod.of(self.graph).score
        while is_only_operand(root) and adds_numbers(user := next(iter(root.users))):
            root = user
        terms = self._terms(root)
        found: dict[int, Product] = {}
        for i, (sign, term) in enumerate(terms if (1, score) in terms else ()):
            one = product(term, sign) if isinstance(term, Node) else None
            if one is not None and columns.takes([*found.values(), one]):
                found[i] = one
        if not found:
            return columns.call.query, columns.call.key
        query, key = columns.appended([*found.values()])
        with self.graph.inserting_before(root):
            root.replace_all_uses_with(self._sum([term for i, term in enumerate(terms) if i not in found], root))
        self.done += [("columns", f"{expression(terms[i][1])} is computed by the product of query and key") for i in found]
        self.graph.eliminate_dead_code()
        return query, key

    def shifts(self) -> None:
        """Turn relative shifts that TMA cannot read into matrices, which are then plain pairs."""
        for node in [n for n in self.tables.shifts if n.users]:
            with self.graph.inserting_before(node):
                node.replace_all_uses_with(self._read([(1, node)]))
        self.graph.eliminate_dead_code()

    def merge_sums(self) -> None:
        """Merge the terms of every sum that have one footprint and do not depend on the score into one table."""
        for root in [n for n in self.graph.nodes if adds_numbers(n) and not self._inside_a_sum(n)]:
            if root not in self.footprints or self._hoistable(root):
                continue
            terms = self._terms(root)
            # Parts of an image are pairs by themselves, and may be its kind together.
            groups: dict[str, list[tuple[int, Node]]] = {}
            for sign, n in terms:
                if isinstance(n, Node) and self._mergeable(n):
                    groups.setdefault(str(self.footprints[n].kind), []).append((sign, n))
            if str(NONE) in groups and len(groups) > 1:
                none = groups.pop(str(NONE))
                groups[next(iter(groups))] += none
            merged = [group for group in groups.values() if len(group) > 1]
            if not merged:
                continue
            in_a_table = {id(n) for group in merged for _, n in group}
            kept = [(sign, n) for sign, n in terms if id(n) not in in_a_table]
            with self.graph.inserting_before(root):
                reads = [(1, self._read(group)) for group in merged]
                total = self._sum(kept + reads, root)
            root.replace_all_uses_with(total)
        # The terms that are now in a table must not be hoisted a second time.
        self.graph.eliminate_dead_code()

    def hoist_rest(self) -> None:
        """Turn every maximal hoistable expression that is not a plain read into a table."""
        maximal = [
            n for n in self.graph.nodes if self._worth_hoisting(n) and not all(self._worth_hoisting(u) for u in n.users)
        ]
        # Users come first, because an expression in them may also be hoisted for another user. If there is none, it is gone.
        for node in reversed(maximal):
            if not node.users:
                continue
            with self.graph.inserting_before(node):
                read = self._read([(1, node)])
            node.replace_all_uses_with(read)
            self.graph.eliminate_dead_code()

    # ------------------------------------------------ predicates

    def _hoistable(self, node: Node) -> bool:
        """Return whether a table can hold the node: a float that depends on less than a pair and not on the score."""
        footprint = self.footprints.get(node)
        value = fake_tensor(node)
        return (
            node.op in ("call_function", "call_method")
            and footprint is not None
            and not footprint.unknown
            and not footprint.score
            and (footprint.kind.small or self._small(footprint) or self._sums_vectors(node) or self._looks_up(node))
            and value is not None
            and value.dim() == 0
            and value.is_floating_point()
        )

    def _mergeable(self, node: Node) -> bool:
        """Return whether a term of a sum may share a table. A plain pair is not merged, because a direct read is better."""
        if not self._hoistable(node) or not self._reads_tables(node):
            return False
        return self.footprints[node].kind.small or self._worth_hoisting(node)

    def _sums_vectors(self, node: Node) -> bool:
        """Return whether a number is computed from whole rows of captured tensors. No kernel can do that for every score."""
        return any(_is_vector(n) for n in cone(node))

    def _looks_up(self, node: Node) -> bool:
        """Return whether a number is computed from lookups in rows, and all pairs of these are not too many."""
        elements = self.tables.elements(self.footprints[node])
        return (
            elements is not None and elements <= LARGEST_TABLE and not self.tables.row_lookups.keys().isdisjoint(cone(node))
        )

    def _small(self, footprint: Footprint) -> bool:
        """Return whether a table of pairs is small enough."""
        elements = self.tables.elements(footprint)
        return elements is not None and elements <= LARGEST_PAIR_TABLE

    def _worth_hoisting(self, node: Node) -> bool:
        if not self._hoistable(node) or not self._reads_tables(node) or self._plain_read(node) or node in self.reads:
            return False
        if not self.footprints[node].kind.expensive or self._sums_vectors(node):
            return True
        # What depends on less is hoisted by itself, but not as a table of pairs. A table and its index have no footprint of
        # their own: that of the read is known.
        kind = self.footprints[node].kind
        known = {n: self.footprints[n] for n in cone(node) if n in self.footprints}
        wide = [n for n, x in known.items() if x.kind is kind or (not x.kind.small and self._small(x))]
        return any((self._is_read(n) and not self._plain_read(n)) or name_of(n) in _EXPENSIVE for n in wide)

    def _plain_read(self, node: Node) -> bool:
        """Return whether a node is already ``table[positions and constants]``."""
        positions = ScoreMod.of(self.graph).positions
        if not self._is_read(node) or node.args[0].op != "placeholder":
            return False
        return all(isinstance(i, int) or i in positions for i in indices_of(node))

    def _is_read(self, node: Node) -> bool:
        return node.target is operator.getitem

    def _reads_tables(self, node: Node) -> bool:
        return any(self._is_read(n) for n in cone(node))

    def _inside_a_sum(self, node: Node) -> bool:
        return len(node.users) == 1 and adds_numbers(next(iter(node.users)))

    # ------------------------------------------------ pieces

    def _terms(self, node: Any, sign: int = 1) -> list[tuple[int, Any]]:
        """Return a sum as signed terms. A node that is not a sum, or that is also used elsewhere, is one term."""
        if not adds_numbers(node):
            return [(sign, node)]
        if node in self.footprints and self._hoistable(node):
            return [(sign, node)]
        first, second = node.args
        inner = sign * SUMS[node.target]
        left = self._terms(first, sign) if is_only_operand(first) else [(sign, first)]
        right = self._terms(second, inner) if is_only_operand(second) else [(inner, second)]
        return left + right

    def _sum(self, terms: list[tuple[int, Any]], like: Node) -> Node:
        """Insert the sum of signed terms. A positive term comes first."""
        terms = sorted(terms, key=lambda t: -t[0])
        sign, total = terms[0]
        if sign < 0:
            total = self._new(operator.neg, (total,), total)
        for sign, term in terms[1:]:
            total = self._new(operator.add if sign > 0 else operator.sub, (total, term), like)
        return total

    def _new(self, target: Any, args: tuple[Any, ...], like: Any) -> Node:
        node = self.graph.call_function(target, args)
        node.meta = dict(like.meta) if isinstance(like, Node) else {}
        self.footprints[node] = join_all(self.footprints[n] for n in node.all_input_nodes)
        return node

    def _read(self, group: list[tuple[int, Node]]) -> Node:
        """Replace a signed sum of nodes by a read of its table."""
        footprint = join_all((self.footprints[n] for _, n in group))
        read, note = self.tables.read(group, footprint)
        read.meta = dict(group[0][1].meta)
        # Keep the marks of the user's terms that the table contains, if pictures.py has set any.
        read.meta["terms"] = {t for _, n in group for m in cone(n) for t in m.meta.get("terms", ())}
        self.reads.add(read)
        self.footprints[read] = footprint
        text = " ".join(("+ " if sign > 0 else "- ") + expression(n) for sign, n in group).removeprefix("+ ")
        self.done.append(("table", f"{text} has the footprint {footprint}; its table is {note}"))
        return read
