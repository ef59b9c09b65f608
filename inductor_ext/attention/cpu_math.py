"""The blocked dense math of flex_attention. It is written as torch ops that are traced and never run eagerly.

    forward   for each block of queries, for each segment of keys it sees:  scores -> online softmax -> out, logsumexp
    backward  the same loops:  scores -> probs; dQ of the block; dK, dV and captured gradients are accumulated

Everything is computed in fp32 (in fp64 for fp64 inputs) and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..core.cpu_loops import KeySegments, QueryBlocks, scan
from ..core.fx import working_dtype
from .cpu_tiles import JointFunction, over_grid
from .kernel_dropout import Dropout, kept, scale

aten = torch.ops.aten


class _Setup(NamedTuple):
    """The values that both directions need. ``others`` are operands of the loops, ``visits`` the segments of each block."""

    work: torch.dtype
    blocks: QueryBlocks
    keys: KeySegments
    visits: list[Tensor]
    captured: list[Any]
    others: list[Any]


@dataclass(frozen=True)
class DenseAttention:
    """One flex_attention: its scalar graphs and the blocks of its mask. The methods are traced and never run eagerly."""

    score: GraphModule
    mask: GraphModule
    joint: JointFunction | None
    has_full_blocks: bool
    scale: float
    num_captured: int
    dropout: Dropout | None = None
    query_block: Any = None
    key_block: Any = None

    def with_blocks(self, query_block: Any, key_block: Any) -> DenseAttention:
        """Return the same with the lengths of the mask's blocks. These are operands of the op, like its tensors."""
        return replace(self, query_block=query_block, key_block=key_block)

    # -- pieces shared by both directions

    def _setup(self, query: Tensor, key: Tensor, value: Tensor, rest: Sequence[Any]) -> _Setup:
        """Make blocks, segments and loop operands from the operands after q, k, v (block lists, then captured tensors)."""
        count = 4 if self.has_full_blocks else 2
        tables = [_listed(*rest[i : i + 2]) for i in range(0, count, 2)]
        captured = list(rest[count:])
        work = working_dtype(query.dtype)
        blocks = QueryBlocks(query.shape[2], query.device)
        keys = KeySegments(key.shape[2], self.query_block, self.key_block, query.device)
        ranges = (key.shape[2], *query.shape[:2])
        k, b, h = (torch.arange(n, device=query.device, dtype=torch.int32) for n in ranges)
        # The body of a loop takes a symbolic length as a tensor.
        sizes = [torch.full((), n, device=query.device) for n in self._block_lengths() if not isinstance(n, int)]
        others = [key.to(work), value.to(work), k, b, h, *sizes, *tables, *captured]
        return _Setup(work, blocks, keys, keys.visits(tables, blocks.positions()), captured[: self.num_captured], others)

    def _captured(self, rest: Sequence[Any]) -> list[Any]:
        """Return what the score_mod captures of the operands after q, k, v."""
        count = 4 if self.has_full_blocks else 2
        return list(rest[count : count + self.num_captured])

    def _named(self, rest: Sequence[Any]) -> tuple[list[Tensor], list[Any], list[Any]]:
        """Split the operands after b and h: lengths and tables of listed blocks, score_mod captures, mask_mod captures."""
        operands = list(rest)
        lengths = [n if isinstance(n, int) else operands.pop(0) for n in self._block_lengths()]
        tables, captured = operands[: 1 + self.has_full_blocks], operands[1 + self.has_full_blocks :]
        # A captured size may be symbolic, and some ops of a traced score_mod take only tensors and numbers.
        captured = [torch.scalar_tensor(x, dtype=torch.int64) if isinstance(x, torch.SymInt) else x for x in captured]
        return [*lengths, *tables], captured[: self.num_captured], captured[self.num_captured :]

    def _block_lengths(self) -> tuple[Any, Any]:
        return self.query_block, self.key_block

    def _tile(
        self,
        q: Tensor,
        key: Tensor,
        indices: tuple[Tensor, Tensor, Tensor, Tensor],
        row_ok: Tensor,
        real: Tensor | None,
        tables: Sequence[Tensor],
        captured: Sequence[Any],
        mask_captured: Sequence[Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute a tile [B, H, Q, K]: raw scores, visibility, and modified scores, which are -inf where not visible."""
        raw = _group_matmul(q, key.transpose(-2, -1)) * self.scale
        visible = self._visible(tables, mask_captured, *indices, row_ok)
        if real is not None:
            visible = visible & real
        scores = torch.where(visible, self._scores(raw, visible, captured, *indices), -math.inf)
        return raw, visible, scores.to(q.dtype)

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
        """Compute which elements of the tile [B, H, Q, K] are visible: full blocks, and partial ones under the mask_mod."""

        def listed(table: Tensor) -> Tensor:
            batch, heads = b % table.shape[0], h % table.shape[1]
            rows, cols = q // query_block, k // key_block
            return table[batch[:, None, None, None], heads[:, None, None], rows[:, None], cols]

        def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            (shown,) = _as_tuple(self.mask(b, h, q, k, *mask_captured, torch.ones_like(b, dtype=torch.bool)))
            return shown

        query_block, key_block, *tables = tables
        # vmap returns the whole tile even if a mask_mod does not use all of its indices.
        shown = listed(tables[0]) & over_grid(mask, (), b, h, q, k)
        if self.has_full_blocks:
            shown = shown | listed(tables[1])
        return shown & row_ok[:, None]

    def _scores(self, raw: Tensor, visible: Tensor, captured: Sequence[Any], *position: Tensor) -> Tensor:
        def score(s: Tensor, seen: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            (out,) = _as_tuple(self.score(s, b, h, q, k, *captured, seen))
            return out

        return over_grid(score, (raw, visible), *position)

    def _kept(self, values: Tensor, captured: Sequence[Any], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the values of a tile [B, H, Q, K] whose probabilities dropout keeps, scaled, and 0 elsewhere."""
        if self.dropout is None:
            return values
        of_slice = b[:, None, None, None] * h.shape[0] + h[:, None, None]
        keep = kept(captured[self.dropout.seed], self.dropout.p, of_slice, q[:, None], k)
        return torch.where(keep, values * scale(self.dropout.p), 0.0)

    # -- forward

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(out, logsumexp, max_scores)``. The op defines the last two in base 2 and fp32."""
        if _empty(query, key):
            nothing = query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)
            return query.new_zeros([*query.shape[:3], value.shape[3]]), nothing, nothing.clone()
        out, lse, top = self._rows(query, key, value, *rest)
        lse, top = ((x / math.log(2)).to(torch.float32) for x in (lse, top))
        return out.to(query.dtype), lse, top

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and the logsumexp and maximum of each row, without rounding."""
        setup = self._setup(query, key, value, rest)

        def segment(
            state: list[Tensor], keyed: list[Tensor], k: Tensor, real: Tensor | None, others: list[Any]
        ) -> list[Tensor]:
            top, total, acc = state
            key, value = keyed
            q, position, row_ok, b, h, *rest = others
            tables, captured, mask_captured = self._named(rest)
            indices = b, h, position, k
            _, _, scores = self._tile(q, key, indices, row_ok, real, tables, captured, mask_captured)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            shift = torch.where(new_top == -math.inf, 0.0, new_top)
            rescale = torch.exp(top - shift)
            weights = torch.exp(scores - shift)
            total = total * rescale + weights.sum(-1, keepdim=True)
            return [new_top, total, acc * rescale + _group_matmul(self._kept(weights, captured, *indices), value)]

        def block(_: list[Tensor], xs: list[Tensor], others: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
            q, position, row_ok, *visits = xs
            key, value, every, b, h, *rest = others
            rows = q.new_zeros([*q.shape[:3], 1])
            start = [rows - math.inf, rows.clone(), q.new_zeros([*q.shape[:3], value.shape[3]])]
            top, total, acc = setup.keys.fold(
                segment, start, visits, [key, value], every, [q, position, row_ok, b, h, *rest]
            )
            seen = total > 0
            safe = torch.where(seen, total, 1.0)
            lse = torch.where(seen, top + torch.log(safe), -math.inf)
            return [], [acc / safe, lse[..., 0], top[..., 0]]

        blocks = setup.blocks
        xs = [blocks.split(query.to(setup.work)), blocks.positions(), blocks.valid(), *setup.visits]
        _, (out, lse, top) = scan(block, [], xs, setup.others, blocks.length)
        return blocks.join(out), blocks.join(lse), blocks.join(top)

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
        """Return the gradients of query, key, value and of each captured tensor (None if it needs no gradient)."""
        joint = self.joint
        if _empty(query, key):
            learned = zip(self._captured(rest), joint.wanted, strict=True)
            captured = tuple(torch.zeros_like(c) if want else None for c, want in learned)
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), captured
        setup = self._setup(query, key, value, rest)
        work, keys = setup.work, setup.keys
        # The op returns the logsumexp in fp32, which is not exact enough for float64.
        exact = work is torch.float64
        logsumexp = self._rows(query, key, value, *rest)[1] if exact else logsumexp * math.log(2)
        grad = torch.zeros_like(out, dtype=work) if grad_out is None else grad_out.to(work)
        delta = (out.to(work) * grad).sum(-1)
        if grad_logsumexp is not None:
            delta = delta - grad_logsumexp.to(work) / math.log(2)
        wanted = [c for c, want in zip(setup.captured, joint.wanted, strict=True) if want]
        slot = {i: s for s, i in enumerate(i for i, want in enumerate(joint.wanted) if want)}

        def segment(
            state: list[Tensor], keyed: list[Tensor], k: Tensor, real: Tensor | None, others: list[Any]
        ) -> list[Tensor]:
            dq, dk, dv, *sums = state
            key, value = keyed
            q, do, lse, delta, position, row_ok, b, h, *rest = others
            tables, captured, mask_captured = self._named(rest)
            indices_of_tile = b, h, position, k
            raw, visible, scores = self._tile(q, key, indices_of_tile, row_ok, real, tables, captured, mask_captured)
            lse = torch.where(lse == -math.inf, 0.0, lse)
            probs = torch.exp(scores - lse[..., None])
            dprobs = self._kept(_group_matmul(do, value.transpose(-2, -1)), captured, *indices_of_tile)
            dmod = probs * (dprobs - delta[..., None])
            dscores, contributions = self._gradients(raw, dmod, visible, captured, *indices_of_tile)
            dscores = torch.where(visible, dscores, 0.0).to(work) * self.scale
            for owner, indices, addend in contributions:
                sums[slot[owner]] = _accumulate(sums[slot[owner]], indices, addend)
            dk = keys.add(dk, _group_matmul_transposed(dscores, q, key), k)
            kept_probs = self._kept(probs, captured, *indices_of_tile)
            dv = keys.add(dv, _group_matmul_transposed(kept_probs, do, value), k)
            return [dq + _group_matmul(dscores, key), dk, dv, *sums]

        def block(carry: list[Tensor], xs: list[Tensor], others: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
            (*rows, position, row_ok), visits = xs[:6], xs[6:]
            key, value, every, b, h, *rest = others
            start = [torch.zeros_like(rows[0]), *carry]
            dq, *sums = keys.fold(segment, start, visits, [key, value], every, [*rows, position, row_ok, b, h, *rest])
            return sums, [dq]

        blocks = setup.blocks
        init = [torch.zeros(x.shape, dtype=work, device=x.device) for x in (key, value)]
        init += [torch.zeros(c.shape, dtype=work if c.dtype != torch.float64 else c.dtype, device=c.device) for c in wanted]
        xs = [blocks.split(x) for x in (query.to(work), grad, logsumexp, delta)]
        xs += [blocks.positions(), blocks.valid(), *setup.visits]
        (dk, dv, *sums), (dq,) = scan(block, init, xs, setup.others, blocks.length)
        grads = iter(sums)
        return (
            blocks.join(dq).to(query.dtype),
            dk.to(key.dtype),
            dv.to(value.dtype),
            tuple(next(grads).to(c.dtype) if want else None for c, want in zip(setup.captured, joint.wanted, strict=True)),
        )

    def _gradients(
        self, raw: Tensor, dmod: Tensor, visible: Tensor, captured: Sequence[Any], *position: Tensor
    ) -> tuple[Tensor, list[tuple[int, list[Tensor], Tensor]]]:
        """Return the gradient of the raw scores and, for each contribution, ``(captured tensor, indices, addend)``."""
        joint = self.joint

        def evaluate(s: Tensor, g: Tensor, seen: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> tuple[Any, ...]:
            results = _as_tuple(joint.module(s, b, h, q, k, g, *captured, seen))
            return tuple(torch.zeros_like(s) if r is None else _tensor_like(r, s) for r in results)

        dscores, *flat = over_grid(evaluate, (raw, dmod, visible), *position)
        contributions = []
        for owner, rank, reduced, trusted in zip(joint.owners, joint.ranks, joint.reduced, joint.trusted, strict=True):
            addend, indices, flat = flat[0], flat[1 : 1 + rank], flat[1 + rank :]
            addend = torch.where(visible, addend, 0.0)
            safe = [i if ok else torch.where(visible, i, 0) for i, ok in zip(indices, trusted, strict=True)]
            if reduced and all(trusted):
                addend = addend.sum(reduced, keepdim=True)
                keep = tuple(slice(0, 1) if axis in reduced else slice(None) for axis in range(4))
                safe = [i[keep] for i in safe]
            contributions.append((owner, [i.to(torch.int64) for i in safe], addend))
        return dscores, contributions


def _accumulate(table: Tensor, indices: list[Tensor], addend: Tensor) -> Tensor:
    """Return ``table`` after ``table[indices] += addend``.

    The index tensors have the shape [B, H, Q, K]; a dim that is already summed has size 1.
    """
    addend = addend.to(table.dtype)
    if addend.numel() != 1:
        # index_put(table, ...) would be wrong here: Inductor would do it in place, return the input of the loop as its
        # output, and then reuse that buffer as if nobody read it any more.
        return table + aten.index_put(torch.zeros_like(table), indices, addend, True)
    # A single element is added as a one-hot tensor, because Inductor's C++ backend cannot vectorise a scatter to a
    # constant index.
    one_hot = addend.reshape(())
    for dim, index in enumerate(indices):
        hit = torch.arange(table.shape[dim], device=table.device) == index.reshape(())
        one_hot = torch.where(hit.reshape([-1 if d == dim else 1 for d in range(table.dim())]), one_hot, 0.0)
    return table + one_hot


def _empty(query: Tensor, key: Tensor) -> bool:
    """Return whether there are no scores, of which there would be no largest one."""
    return any(isinstance(n, int) and n == 0 for n in (*query.shape[:3], key.shape[2]))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _tensor_like(value: Any, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full_like(like, value, dtype=torch.int64)


def _listed(num_blocks: Tensor, blocks: Tensor) -> Tensor:
    """Return a table [B, H, query blocks, key blocks] that is True for the blocks in the lists."""
    columns = blocks.shape[-1]
    order = torch.arange(columns, device=blocks.device)
    real = order < num_blocks[..., None]
    one_hot = (blocks[..., None] == order) & real[..., None]
    return one_hot.any(-2)


def _group_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Compute ``x @ y`` for x [B, H, Q, N] and y [B or 1, KV heads, N, M]; query heads share kv heads."""
    batch, heads, rows, inner = x.shape
    kv_heads = y.shape[1]
    grouped = x.reshape(batch, kv_heads, heads // kv_heads * rows, inner)
    return (grouped @ y.expand(batch, *y.shape[1:])).reshape(batch, heads, rows, y.shape[3])


def _group_matmul_transposed(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """Compute ``xᵀ @ y`` for x [B, H, Q, K] and y [B, H, Q, D], summed over the heads (and batch) that share ``like``."""
    batch, heads, rows, cols = x.shape
    kv_heads = like.shape[1]
    grouped = x.reshape(batch, kv_heads, heads // kv_heads * rows, cols)
    result = grouped.transpose(-2, -1) @ y.reshape(batch, kv_heads, heads // kv_heads * rows, y.shape[3])
    return result if like.shape[0] == batch else result.sum(0, keepdim=True)
