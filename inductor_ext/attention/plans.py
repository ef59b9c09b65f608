"""The plan of one contribution to the gradient of a captured tensor, and what the backward template sees of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import GraphModule

from ..core.subgraphs import expression
from ..torch_api.sizes import known_at_most
from .blocks import Block
from .captured_grads import Contribution
from .inlining import MOST_ENTRIES
from .kinds import PAIR, Reduction, TiledKind
from .tile_tables import TileTable
from .writers import Writers

#: In a table with more entries than this for each batch and head, a kernel does not look for few entries in a tile. Of
#: 127 x 127 distances in an image, 127 belong to a tile, and looking for fewer took a tenth of the backward.
MOST_SHARED = 2**13


@dataclass(frozen=True)
class Plan:
    """How one contribution goes to memory.

    owner: the number of the captured tensor to which it belongs. writers: which scores are added to one element. block: the
    matrices that the elements are, if their keys are in descending order. everywhere: it writes every element of the
    gradient, if no score is hidden. checked: the index may be out of bounds. table: the table that the tensor is, if tiles
    are read of it and added to its gradient. wide: the tensor has at least four bytes for each element. address: the graph
    that computes the offset, with which a workspace is scattered afterwards, or None if nothing is. inside: elements whose
    index is strictly between the bounds of its clamps are stored, because nothing else is added to them. dim_of_heads: the
    dim that is indexed by the head, if a workspace can be added by entry for all heads at once (pair_entries.py).
    """

    owner: int
    contribution: Contribution
    writers: Writers
    block: Block | None
    reduction: Reduction
    everywhere: bool
    checked: bool
    table: TileTable | None
    wide: bool
    address: GraphModule | None = None
    inside: bool = False
    dim_of_heads: int | None = None

    @property
    def axes(self) -> tuple[bool, ...]:
        """The axes of b, h, q, k on which its index depends."""
        return self.contribution.axes

    @property
    def as_vector(self) -> bool:
        """Whether the tensor is a table of which each tile reads one vector."""
        return self.table is not None and self.table.kind.as_vector

    def seen_by_template(self, number: int, copies: int) -> TemplateContribution:
        """Return the contribution as the template sees it; ``number`` is its number in the kernel."""
        adds = self.reduction.name.lower()
        if self.moved_by_tma:
            adds = Reduction.BLOCK.name.lower()
        elif self.as_vector and self.reduction is Reduction.PARTIAL:
            adds = Reduction.DIAGONAL.name.lower()
        return TemplateContribution(
            number,
            adds,
            self.table.kind if self.table else None,
            *self.axes,
            checked=self.checked,
            one_writer=self.reduction is Reduction.STORE,
            partial=self.reduction is Reduction.PARTIAL,
            rank=len(self.contribution.shape),
            varying_rank=max((i for i, varies in enumerate(self.contribution.varying, 1) if varies), default=0),
            distinct_queries=self.writers.determined[2],
            distinct_keys=self.writers.determined[3],
            query_cycle=self.writers.query_cycle,
            key_cycle=self.writers.key_cycle,
            keys_repeat=self.keys_repeat,
            may_share=self.may_share,
            block=self.block,
            query_dim=self.contribution.query_dim if self.reduction is Reduction.BY_ENTRY else None,
            entries=self.entries,
            copies=copies,
            inside=self.inside,
            adds_where=self.adds_where,
        )

    @property
    def adds_where(self) -> bool | None:
        """Whether the condition of blocks must hold for something to be added, or None if there is none that counts."""
        condition = self.contribution.condition
        return condition[1] if condition and self.reduction in (Reduction.SCATTER, Reduction.STRIP) else None

    @property
    def crowded(self) -> bool:
        """Whether there is one add for each score, and those of different batch elements may go to one address."""
        return self.reduction is Reduction.SCATTER and not self.writers.determined[0]

    @property
    def entries(self) -> int:
        """The number of sums for each key. tl.dot takes no fewer than 16, if there is one for each entry of the queries."""
        contribution = self.contribution
        if self.reduction is not Reduction.BY_ENTRY:
            return 1
        return 16 if known_at_most(expression(contribution.shape[contribution.query_dim]), 16) else MOST_ENTRIES

    @property
    def keys_repeat(self) -> bool:
        """Whether a query program sums whole tiles, of which there is one for all keys."""
        return self.reduction is Reduction.SCATTER and self.writers.keys_repeat

    @property
    def may_share(self) -> bool:
        """Whether the scores of a tile may belong to few entries: not if there are very many for each batch and head."""
        contribution = self.contribution
        sizes = [n for n, varies in zip(contribution.shape, contribution.varying, strict=True) if varies]
        return not all(isinstance(n, int) for n in sizes) or math.prod(sizes) <= MOST_SHARED

    @property
    def shares_row(self) -> bool:
        """Whether it may be one value for each query or each key of a tile."""
        by_query, by_key = self.writers.determined[2:]
        return self.reduction is Reduction.SCATTER and by_query != by_key

    @property
    def moved_by_tma(self) -> bool:
        """Whether whole tiles go to the gradient of a table of pairs."""
        by_tile = self.reduction in (Reduction.BLOCK, Reduction.STORE)
        return by_tile and self.table is not None and self.table.kind is PAIR


@dataclass(frozen=True)
class TemplateContribution:
    """A contribution as the backward template sees it.

    adds: the reduction whose macro adds a tile of it. kind: the kind of its table, or None if it has no table. by_batch,
    by_head, by_query, by_key: whether its offset depends on each of these. checked: the offset may be out of bounds.
    one_writer: it is stored and not added. partial: it is stored into a workspace. rank: the number of dims of the tensor.
    varying_rank: the number of dims up to the last whose index depends on the query or the key. distinct_queries,
    distinct_keys: scores of different queries (keys) are added to different elements. query_cycle, key_cycle: the same holds
    within a tile whose length divides this number, which is 0 if there is none. keys_repeat: the offset is the same in every
    tile of keys whose length is a multiple of key_cycle, so that a program sums its tiles before it adds them. may_share: a
    tile may have few entries. block: as in a plan. query_dim: the dim with few entries for queries, if key programs sum by
    entry, otherwise None. entries: the number of sums for each key. copies: the number of copies of the gradient.
    inside, adds_where: as in a plan.
    """

    number: int
    adds: str
    kind: TiledKind | None
    by_batch: bool
    by_head: bool
    by_query: bool
    by_key: bool
    checked: bool
    one_writer: bool
    partial: bool
    rank: int
    varying_rank: int
    distinct_queries: bool
    distinct_keys: bool
    query_cycle: int
    key_cycle: int
    keys_repeat: bool
    may_share: bool
    block: Block | None
    query_dim: int | None
    entries: int
    copies: int
    inside: bool
    adds_where: bool | None

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its subgraphs, in order."""
        entry = () if self.query_dim is None else ("entry", "entry_in_bounds")
        condition = () if self.adds_where is None else ("condition",)
        return ("value", *entry, "offset", "in_bounds", *(("inside",) if self.inside else ()), *condition)

    @property
    def by_key_program(self) -> bool:
        """Whether key programs sum it over their queries."""
        return not self.by_query or self.query_dim is not None

    @property
    def name(self) -> str:
        """The name of its gradient in the kernel."""
        return f"grad_{self.number}"

    @property
    def pointer(self) -> str:
        """The name of the kernel's argument."""
        return self.name.upper()
