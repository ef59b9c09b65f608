"""The loops of the blocked dense math.

The outer loop goes over blocks of queries, and the inner loop over those segments of keys that the mask lists. Both loops
are control-flow ops of the graph (``scan`` and ``while_loop``). They are written to be traced, and never run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..torch_api.higher_order import scan_op, while_loop_op
from ..torch_api.sizes import size_hint

#: A block has QUERY_BLOCK queries and a segment KEY_SEGMENT keys. The scores of one block and one segment take
#: [B, H, QUERY_BLOCK, KEY_SEGMENT] in memory.
QUERY_BLOCK = 256
KEY_SEGMENT = 512


@dataclass(frozen=True)
class QueryBlocks:
    """The queries, cut into blocks. The last block is padded, and its extra rows are marked as invalid."""

    length: Any
    device: torch.device

    @property
    def size(self) -> int:
        """The number of rows in a block.

        If a symbolic length was traced as a multiple of the block, Inductor would take the padding for none at all.
        """
        if isinstance(self.length, int):
            return min(self.length, QUERY_BLOCK)
        traced = size_hint(self.length) or 1
        return QUERY_BLOCK if traced % QUERY_BLOCK else QUERY_BLOCK - 8

    @property
    def count(self) -> Any:
        """The number of blocks."""
        return (self.length + self.size - 1) // self.size

    def split(self, x: Tensor) -> Tensor:
        """Cut ``x`` [B, H, Q, ...] into blocks: [blocks, B, H, size, ...]."""
        missing = self.count * self.size - self.length
        padded = torch.nn.functional.pad(x, [0, 0] * (x.dim() - 3) + [0, missing])
        cut = padded.reshape(x.shape[0], x.shape[1], self.count, self.size, *x.shape[3:])
        return cut.movedim(2, 0).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """Join the blocks ``x`` [blocks, B, H, size, ...] to [B, H, Q, ...]."""
        whole = x.movedim(0, 2)
        return whole.reshape(*whole.shape[:2], self.count * self.size, *whole.shape[4:])[:, :, : self.length]

    def _all(self) -> Tensor:
        return torch.arange(self.count * self.size, device=self.device, dtype=torch.int32).reshape(self.count, self.size)

    def positions(self) -> Tensor:
        """The query index of each row, int32 [blocks, size]. The rows of the padding get the index of the last query."""
        return torch.clamp(self._all(), max=self.length - 1)

    def valid(self) -> Tensor:
        """Whether each row is a query and not padding, bool [blocks, size]."""
        return self._all() < self.length


def scan(
    block: Callable[..., tuple[list[Tensor], list[Tensor]]],
    init: list[Tensor],
    xs: list[Tensor],
    others: list[Any],
    length: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run ``block(carry, xs of one block, others)`` over dim 0 of ``xs``. Returns the last carry, and the stacked results.

    ``length``: that of the sequence of which the blocks are cut.

    A single block is also run as a loop. In the body of the loop the index vectors are inputs and not known ranges, and this
    is needed: Inductor's C++ backend cannot vectorise an accumulating ``index_put`` if it has simplified the index to a loop
    variable.
    """
    # The op requires at least one carried tensor.
    count = max(len(init), 1)
    start = init or [torch.zeros((), device=xs[0].device)]

    def step(*arguments: Any) -> list[Tensor]:
        carry, x, rest = arguments[:count], arguments[count : count + len(xs)], arguments[count + len(xs) :]
        new, ys = block(list(carry) if init else [], list(x), list(rest[: len(others)]))
        return [*(new or [carry[0].clone()]), *ys]

    result = scan_op(step, start, xs, (*others, *_symbolic_sizes([*xs, *others], length)))
    return list(result[: len(init)]), list(result[count:])


def _symbolic_sizes(operands: Sequence[Any], *lengths: Any) -> list[torch.SymInt]:
    """The symbolic sizes in the shapes of ``operands`` and among ``lengths``, each once.

    They must be operands of a loop, because Inductor looks them up there when it allocates the results of the loop.
    """
    shapes = [*lengths, *(n for x in operands if isinstance(x, Tensor) for n in x.shape)]
    return list({str(n): n for n in shapes if isinstance(n, torch.SymInt)}.values())


@dataclass(frozen=True)
class KeySegments:
    """The keys, cut into segments, so that a block of queries visits only the segments that its block mask lists.

    There is one segment that holds all keys, and no loop, in three cases: without a block mask (one sparse block covers all
    keys), with few keys, and with a symbolic number of keys.
    """

    length: Any
    query_block: Any
    key_block: Any
    device: torch.device

    @property
    def size(self) -> Any:
        """The number of keys in a segment."""
        whole = not isinstance(self.length, int) or not isinstance(self.key_block, int)
        return self.length if whole or self.key_block >= self.length else min(self.length, KEY_SEGMENT)

    @property
    def looped(self) -> bool:
        """Whether there is more than one segment."""
        return isinstance(self.size, int) and self.size < self.length

    def visits(self, tables: Sequence[Tensor], positions: Tensor) -> list[Tensor]:
        """The segments that each block of queries visits, [blocks, segments], and how many it visits, [blocks].

        positions: the query index of each row, [blocks, size]. tables: [B, H, query blocks, key blocks], which say which
        sparse blocks the mask lists. The result is empty where there is no loop.
        """
        if not self.looped:
            return []
        listed = torch.stack([t.any(0).any(0) for t in tables]).any(0)
        rows = listed[positions // self.query_block].any(1)
        count = (self.length + self.size - 1) // self.size
        keys = torch.arange(count * self.size, device=self.device).clamp(max=self.length - 1)
        touched = rows[:, keys // self.key_block].reshape(-1, count, self.size).any(-1)
        order = torch.argsort(touched.to(torch.int8), dim=-1, descending=True)
        return [order, touched.sum(-1)]

    def fold(
        self,
        step: Callable[..., list[Tensor]],
        state: list[Tensor],
        visits: Sequence[Tensor],
        keyed: Sequence[Tensor],
        positions: Tensor,
        others: Sequence[Any],
    ) -> list[Tensor]:
        """The last state of ``state = step(state, keyed, positions, real, others)``, run for each visited segment.

        keyed: tensors [B, H, K, D]; ``step`` gets the rows of the segment along dim 2. positions: the key index of each key,
        int32 [K]. It is an operand, because a loop could otherwise take it for a range that it may split. ``real`` says
        which keys of the segment exist; it is None if there is no loop.
        """
        if not self.looped:
            return step(state, list(keyed), positions, None, list(others))
        state_, keyed_, others_ = list(state), list(keyed), list(others)

        def more(visited: Tensor, *rest: Any) -> Tensor:
            return visited < rest[len(state_) + 1]

        def body(visited: Tensor, *rest: Any) -> tuple[Tensor, ...]:
            state, order, operands = rest[: len(state_)], rest[len(state_)], list(rest[len(state_) + 2 :])
            keyed, others = operands[: len(keyed_)], operands[len(keyed_) : len(keyed_) + len(others_)]
            every = order.index_select(0, visited.reshape(1)) * self.size + torch.arange(self.size, device=self.device)
            positions = every.clamp(max=self.length - 1)
            cut = [x.index_select(2, positions) for x in keyed]
            new = step(list(state), cut, positions.to(torch.int32), every < self.length, others)
            return visited + 1, *new

        start = (torch.zeros((), dtype=torch.int64, device=self.device), *state_)
        operands = [*visits, *keyed_, *others_]
        return list(while_loop_op(more, body, start, (*operands, *_symbolic_sizes([*state_, *operands]))))[1:]

    def add(self, whole: Tensor, part: Tensor, positions: Tensor) -> Tensor:
        """``whole`` [B, H, K, D] plus ``part``, the rows of the segment at ``positions``.

        The rows of ``part`` that are not real must be zero.
        """
        if not self.looped:
            return whole + part
        offset = torch.arange(self.length, device=self.device) - positions[0]
        inside = (offset >= 0) & (offset < self.size)
        rows = part.index_select(2, offset.clamp(0, self.size - 1))
        return whole + torch.where(inside[:, None], rows, 0.0)
