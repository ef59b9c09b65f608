"""The blocked dense math of flex_attention, written as torch ops to be traced, never run eagerly.

    forward   for each block of queries:  scores -> softmax -> out, logsumexp
    backward  for each block of queries:  scores -> probs; dV, dK and captured gradients accumulate; dQ of the block

Everything is in fp32 (fp64 for fp64) and rounded once. A block's score_mod, mask_mod and joint graph are scalar graphs
evaluated over index grids by ``vmap``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import compat
from ..analysis.bounds import extents_of, in_range, safe_reads
from ..analysis.captured_grads import JOINT_INPUTS, JointGraph, axes_of, output_nodes, returning

aten = torch.ops.aten

#: Queries a block; a block's scores are [B, H, QUERY_BLOCK, K] in memory.
QUERY_BLOCK = 256


# ---------------------------------------------------------------- scalar graphs as functions of tiles


def without_narrowing(module: GraphModule) -> GraphModule:
    """``module`` without casts from fp32 to half precision: they were traced in the query's dtype, scores are fp32.

    Other casts become ``_to_copy``, since Inductor's own ``convert_element_type`` has no vmap rule.
    """
    module = returning(module, output_nodes(module.graph))
    for node in list(module.graph.nodes):
        if node.target is aten._to_copy.default:
            dtype = node.kwargs.get("dtype")
        elif node.target is torch.ops.prims.convert_element_type.default:
            dtype = node.args[1]
            node.target, node.args, node.kwargs = aten._to_copy.default, node.args[:1], {"dtype": dtype}
        else:
            continue
        if dtype in (torch.float16, torch.bfloat16) and node.args[0].meta["val"].is_floating_point():
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    return module


def _extents(node: Node) -> list[Any]:
    query, key = (node.args[i].meta["val"] for i in (0, 1))
    return [query.shape[0], query.shape[1], query.shape[2], key.shape[2]]


def _guard_reads(module: GraphModule, extents: dict[Node, Any]) -> None:
    """Add an input ``visible`` and read at index 0 where it is False, so that masked positions cannot be out of range."""
    placeholders = module.graph.find_nodes(op="placeholder")
    with module.graph.inserting_after(placeholders[-1]):
        visible = module.graph.placeholder("visible")
    safe_reads(module, extents, lambda index, _: module.graph.call_function(torch.where, (visible, index, 0)))


def scalar_graph(gm: GraphModule, graph: Node, node: Node, first: int) -> GraphModule:
    """A score_mod (``first`` = 1: after the score) or mask_mod (0) as a function ``(..., *captured, visible)``."""
    module = without_narrowing(getattr(gm, graph.target))
    _guard_reads(module, extents_of(module, _extents(node), first))
    return module


@dataclass(frozen=True)
class JointFunction:
    """The joint graph as one function: ``(gradient of the score, value and indices of each contribution)``.

    owners: the captured tensor of each contribution; ranks: its number of indices; reduced: the axes of (b, h, q, k) its
    indices do not depend on; trusted: for each index, whether it is in range by construction.
    """

    module: GraphModule
    owners: tuple[int, ...]
    ranks: tuple[int, ...]
    reduced: tuple[tuple[int, ...], ...]
    trusted: tuple[tuple[bool, ...], ...]
    wanted: tuple[bool, ...]

    @classmethod
    def of(cls, joint: JointGraph, node: Node) -> JointFunction:
        """Of the joint graph of one flex_attention_backward node."""
        ranges = extents_of(joint.module, _extents(node), first=1)
        shapes = [p.meta["val"] for p in joint.module.graph.find_nodes(op="placeholder")[JOINT_INPUTS:]]
        flat = [(i, c) for i, contributions in enumerate(joint.captured) for c in contributions or ()]
        outputs: list[Any] = [joint.grad_score]
        for _, contribution in flat:
            outputs += [contribution.value, *contribution.indices]
        module = returning(joint.module, outputs)
        _guard_reads(module, extents_of(module, _extents(node), first=1))
        return cls(
            module,
            owners=tuple(i for i, _ in flat),
            ranks=tuple(len(c.indices) for _, c in flat),
            reduced=tuple(tuple(axis for axis, used in enumerate(axes_of(joint.module, c)) if not used) for _, c in flat),
            trusted=tuple(
                tuple(in_range(x, s, ranges) for x, s in zip(c.indices, shapes[i].shape, strict=True)) for i, c in flat
            ),
            wanted=tuple(c is not None for c in joint.captured),
        )


def _over_grid(function: Callable[..., Any], tiles: Sequence[Tensor], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
    """Evaluate a scalar ``function(*tiles, b, h, q, k)`` on tiles [B, H, Q, K] and the four index vectors."""
    t = (0,) * len(tiles)
    for in_dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=t + in_dims)
    return function(*tiles, b, h, q, k)


# ---------------------------------------------------------------- the math


@dataclass(frozen=True)
class DenseAttention:
    """One flex_attention: its scalar graphs and its mask's blocks. The methods are traced, never run eagerly."""

    score: GraphModule
    mask: GraphModule
    joint: JointFunction | None
    query_block: Any
    key_block: Any
    has_full_blocks: bool
    scale: float
    num_captured: int

    # -- pieces shared by both directions

    def _split(self, rest: Sequence[Any]) -> tuple[list[Tensor], list[Any], list[Any]]:
        """The operands after q, k, v...: tables of listed blocks, score_mod captures, mask_mod captures."""
        count = 4 if self.has_full_blocks else 2
        lists, captured = rest[:count], list(rest[count:])
        tables = [_listed(*lists[i : i + 2]) for i in range(0, count, 2)]
        return tables, captured[: self.num_captured], captured[self.num_captured :]

    def _split_tables(self, rest: Sequence[Any]) -> tuple[list[Tensor], list[Any], list[Any]]:
        """As ``_split``, where the tables have been made already."""
        tables, captured = rest[: 1 + self.has_full_blocks], rest[1 + self.has_full_blocks :]
        return list(tables), list(captured[: self.num_captured]), list(captured[self.num_captured :])

    def _visible(
        self,
        tables: Sequence[Tensor],
        mask_captured: Sequence[Any],
        b: Tensor,
        h: Tensor,
        q: Tensor,
        k: Tensor,
        row_ok: Tensor,
    ) -> Tensor:
        """Which elements of the tile [B, H, Q, K] the mask shows: full blocks, and partial ones where mask_mod holds."""

        def listed(table: Tensor) -> Tensor:
            batch, heads = b % table.shape[0], h % table.shape[1]
            rows, cols = q // self.query_block, k // self.key_block
            return table[batch[:, None, None, None], heads[:, None, None], rows[:, None], cols]

        def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            (shown,) = _as_tuple(self.mask(b, h, q, k, *mask_captured, torch.ones_like(b, dtype=torch.bool)))
            return shown

        # A mask_mod may not use all of its indices; vmap still returns the whole tile.
        shown = listed(tables[0]) & _over_grid(mask, (), b, h, q, k)
        if self.has_full_blocks:
            shown = shown | listed(tables[1])
        return shown & row_ok[:, None]

    def _scores(self, raw: Tensor, visible: Tensor, captured: Sequence[Any], *position: Tensor) -> Tensor:
        def score(s: Tensor, seen: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            (out,) = _as_tuple(self.score(s, b, h, q, k, *captured, seen))
            return out

        return _over_grid(score, (raw, visible), *position)

    # -- forward

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        """``(out, logsumexp, max_scores)``, the last two in base 2 as the op defines them."""
        tables, captured, mask_captured = self._split(rest)
        work = _working_dtype(query)
        blocks = _QueryBlocks(query.shape[2], query.device)

        def block(_: list[Tensor], xs: list[Tensor], others: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
            q, position, row_ok = xs
            key, value, b, h, k = others[:5]
            tables, captured, mask_captured = split(others[5:])
            indices = b, h, position, k
            raw = _group_matmul(q, key.transpose(-2, -1)) * self.scale
            visible = self._visible(tables, mask_captured, *indices, row_ok)
            scores = torch.where(visible, self._scores(raw, visible, captured, *indices), -math.inf).to(work)
            top = scores.amax(-1, keepdim=True)
            shift = torch.where(top == -math.inf, 0.0, top)
            weights = torch.exp(scores - shift)
            total = weights.sum(-1, keepdim=True)
            seen = total > 0
            out = _group_matmul(weights / torch.where(seen, total, 1.0), value)
            lse = torch.where(seen, shift + torch.log(torch.where(seen, total, 1.0)), -math.inf)
            return [], [out, lse[..., 0] / math.log(2), top[..., 0] / math.log(2)]

        split = self._split_tables
        xs = [blocks.split(query.to(work)), blocks.positions(), blocks.valid()]
        others = [key.to(work), value.to(work), *_ranges(query, key), *tables, *captured, *mask_captured]
        _, (out, lse, top) = _scan(block, [], xs, others)
        out = blocks.join(out).to(query.dtype)
        return out, blocks.join(lse).to(torch.float32), blocks.join(top).to(torch.float32)

    # -- backward

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        grad_out: Tensor | None,
        grad_logsumexp: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
        """Gradients of query, key, value and of each captured tensor (None where none is needed)."""
        tables, captured, mask_captured = self._split(rest)
        joint = self.joint
        work = _working_dtype(query)
        blocks = _QueryBlocks(query.shape[2], query.device)
        grad = torch.zeros_like(out, dtype=work) if grad_out is None else grad_out.to(work)
        grad_lse = torch.zeros_like(logsumexp) if grad_logsumexp is None else grad_logsumexp
        wanted = [c for c, want in zip(captured, joint.wanted, strict=True) if want]
        slot = {i: s for s, i in enumerate(i for i, want in enumerate(joint.wanted) if want)}

        def block(carry: list[Tensor], xs: list[Tensor], others: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
            dk, dv, *sums = carry
            q, do, lse, grad_lse, position, row_ok = xs
            key, value, b, h, k = others[:5]
            tables, captured, mask_captured = split(others[5:])
            indices = b, h, position, k
            raw = _group_matmul(q, key.transpose(-2, -1)) * self.scale
            visible = self._visible(tables, mask_captured, *indices, row_ok)
            scores = torch.where(visible, self._scores(raw, visible, captured, *indices), -math.inf).to(work)
            lse = torch.where(lse == -math.inf, 0.0, lse.to(work) * math.log(2))
            probs = torch.exp(scores - lse[..., None])
            dprobs = _group_matmul(do, value.transpose(-2, -1))
            # All keys are here, so the row's mean is taken exactly; flash attention's rowsum(out * do) would leave the
            # rounding of `out` in every sum over a row, which is all there is of some captured gradients.
            delta = (probs * dprobs).sum(-1, keepdim=True) - grad_lse.to(work)[..., None] / math.log(2)
            dmod = probs * (dprobs - delta)
            dscores, contributions = self._gradients(raw, dmod, visible, captured, *indices)
            dscores = torch.where(visible, dscores, 0.0).to(work) * self.scale
            for owner, place, addend in contributions:
                sums[slot[owner]] = _accumulate(sums[slot[owner]], place, addend)
            dk = dk + _group_matmul_transposed(dscores, q, key)
            dv = dv + _group_matmul_transposed(probs, do, value)
            return [dk, dv, *sums], [_group_matmul(dscores, key)]

        split = self._split_tables
        init = [torch.zeros(x.shape, dtype=work, device=x.device) for x in (key, value)]
        init += [torch.zeros(c.shape, dtype=work if c.dtype != torch.float64 else c.dtype, device=c.device) for c in wanted]
        xs = [blocks.split(x) for x in (query.to(work), grad, logsumexp, grad_lse)] + [blocks.positions(), blocks.valid()]
        others = [key.to(work), value.to(work), *_ranges(query, key), *tables, *captured, *mask_captured]
        (dk, dv, *sums), (dq,) = _scan(block, init, xs, others)
        grads = iter(sums)
        return (
            blocks.join(dq).to(query.dtype),
            dk.to(key.dtype),
            dv.to(value.dtype),
            tuple(next(grads).to(c.dtype) if want else None for c, want in zip(captured, joint.wanted, strict=True)),
        )

    def _gradients(
        self, raw: Tensor, dmod: Tensor, visible: Tensor, captured: Sequence[Any], *position: Tensor
    ) -> tuple[Tensor, list[tuple[int, list[Tensor], Tensor]]]:
        """The gradient of the raw scores and, for each contribution, ``(captured tensor, indices, addend)``."""
        joint = self.joint

        def evaluate(s: Tensor, g: Tensor, seen: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> tuple[Any, ...]:
            results = _as_tuple(joint.module(s, b, h, q, k, g, *captured, seen))
            return tuple(torch.zeros_like(s) if r is None else _tensor_like(r, s) for r in results)

        dscores, *flat = _over_grid(evaluate, (raw, dmod, visible), *position)
        contributions = []
        for owner, rank, reduced, trusted in zip(joint.owners, joint.ranks, joint.reduced, joint.trusted, strict=True):
            addend, indices, flat = flat[0], flat[1 : 1 + rank], flat[1 + rank :]
            addend = torch.where(visible, addend, 0.0)
            safe = [i if ok else torch.where(visible, i, 0) for i, ok in zip(indices, trusted, strict=True)]
            if reduced and all(trusted):
                addend = addend.sum(reduced, keepdim=True)
                keep = tuple(slice(0, 1) if axis in reduced else slice(None) for axis in range(4))
                safe = [i[keep] for i in safe]
            place = [i.to(torch.int64) for i in safe]
            contributions.append((owner, place, addend))
        return dscores, contributions


def _accumulate(table: Tensor, place: list[Tensor], addend: Tensor) -> Tensor:
    """``table[place] += addend`` for index tensors [B, H, Q, K], any of these dims 1 where already summed."""
    if addend.numel() != 1:
        # Not index_put(table, ...): Inductor would do that in place, hand the loop its own input back, and then reuse that
        # buffer as if it were dead.
        return table + aten.index_put(torch.zeros_like(table), place, addend, True)
    # One element: Inductor's C++ backend cannot vectorise a scatter to a constant place, so add it as a one-hot.
    one_hot = addend.reshape(())
    for dim, index in enumerate(place):
        hit = torch.arange(table.shape[dim], device=table.device) == index.reshape(())
        one_hot = torch.where(hit.reshape([-1 if d == dim else 1 for d in range(table.dim())]), one_hot, 0.0)
    return table + one_hot


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _tensor_like(value: Any, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full_like(like, value, dtype=torch.int64)


def _working_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _listed(num_blocks: Tensor, blocks: Tensor) -> Tensor:
    """A table [B, H, query blocks, key blocks] of which blocks the lists name."""
    columns = blocks.shape[-1]
    order = torch.arange(columns, device=blocks.device)
    real = order < num_blocks[..., None]
    one_hot = (blocks[..., None] == order) & real[..., None]
    return one_hot.any(-2)


def _ranges(query: Tensor, key: Tensor) -> list[Tensor]:
    """The index vectors of b, h and k."""
    counts = query.shape[0], query.shape[1], key.shape[2]
    return [torch.arange(n, device=query.device, dtype=torch.int32) for n in counts]


def _group_matmul(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` for x [B, H, Q, N] and y [B or 1, KV heads, N, M], query heads sharing kv heads."""
    batch, heads, rows, inner = x.shape
    kv_heads = y.shape[1]
    grouped = x.reshape(batch, kv_heads, heads // kv_heads * rows, inner)
    return (grouped @ y.expand(batch, *y.shape[1:])).reshape(batch, heads, rows, y.shape[3])


def _group_matmul_transposed(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """``xᵀ @ y`` for x [B, H, Q, K] and y [B, H, Q, D], summed over the query heads (and batch) that share ``like``."""
    batch, heads, rows, cols = x.shape
    kv_heads = like.shape[1]
    grouped = x.reshape(batch, kv_heads, heads // kv_heads * rows, cols)
    result = grouped.transpose(-2, -1) @ y.reshape(batch, kv_heads, heads // kv_heads * rows, y.shape[3])
    return result if like.shape[0] == batch else result.sum(0, keepdim=True)


@dataclass(frozen=True)
class _QueryBlocks:
    """The queries cut into blocks; the last is padded, its extra rows are marked invalid."""

    length: Any
    device: torch.device

    @property
    def size(self) -> int:
        one = isinstance(self.length, int) and self.length <= QUERY_BLOCK
        return self.length if one else QUERY_BLOCK

    @property
    def count(self) -> Any:
        return (self.length + self.size - 1) // self.size

    def split(self, x: Tensor) -> Tensor:
        """[B, H, Q, ...] to [blocks, B, H, size, ...]."""
        missing = self.count * self.size - self.length
        padded = torch.nn.functional.pad(x, [0, 0] * (x.dim() - 3) + [0, missing])
        cut = padded.reshape(x.shape[0], x.shape[1], self.count, self.size, *x.shape[3:])
        return cut.movedim(2, 0).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """[blocks, B, H, size, ...] to [B, H, Q, ...]."""
        whole = x.movedim(0, 2)
        return whole.reshape(*whole.shape[:2], self.count * self.size, *whole.shape[4:])[:, :, : self.length]

    def _all(self) -> Tensor:
        return torch.arange(self.count * self.size, device=self.device, dtype=torch.int32).reshape(self.count, self.size)

    def positions(self) -> Tensor:
        """Query index of each row, [blocks, size], kept inside the queries."""
        return torch.clamp(self._all(), max=self.length - 1)

    def valid(self) -> Tensor:
        """Whether each row is a real one."""
        return self._all() < self.length


def _scan(
    block: Callable[..., tuple[list[Tensor], list[Tensor]]],
    init: list[Tensor],
    xs: list[Tensor],
    others: list[Any],
) -> tuple[list[Tensor], list[Tensor]]:
    """Run ``block(carry, xs of one block, others)`` over dim 0 of ``xs``.

    A single block takes the loop too: in its body the index vectors are inputs and not known ranges, and Inductor's C++
    backend cannot vectorise an accumulating ``index_put`` whose index it has simplified to a loop variable.
    """
    # The op wants at least one carried tensor.
    count = max(len(init), 1)
    start = init or [torch.zeros((), device=xs[0].device)]

    def step(*arguments: Any) -> list[Tensor]:
        carry, x, rest = arguments[:count], arguments[count : count + len(xs)], arguments[count + len(xs) :]
        new, ys = block(list(carry) if init else [], list(x), list(rest[: len(others)]))
        return [*(new or [carry[0].clone()]), *ys]

    # Symbolic sizes must be operands: that is where Inductor looks them up when it allocates the stacked results.
    shapes = [n for x in (*xs, *others) if isinstance(x, Tensor) for n in x.shape]
    sizes = {str(n): n for n in shapes if isinstance(n, torch.SymInt)}
    result = compat.scan_op(step, start, xs, (*others, *sizes.values()))
    return list(result[: len(init)]), list(result[count:])
