"""The block mask of a recognised attention: blocks of scores that masks hide as a whole are not computed.

A causal mask, a sliding window or documents hide about half of the scores or more. In the score_mod a hidden score is one
that is further below the largest number of its row, of those that masks add, than a sum of a bias and a product is taken to
reach, so that its probability is exactly zero. A nan in what is skipped does not reach the result. The score_mod stays as it
is: blocks that are not skipped need it. A row that is masked as a whole has no hidden scores, because none of them is far
below the others.

The blocks are found with torch ops on Dynamo's graph. Layers with the same mask share them, because AOTAutograd merges equal
nodes.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ...core.dynamo_graph import Inserter
from ...core.fx import shape_of, value_of
from ...torch_api.higher_order import block_mask
from ..kinds import K, Q
from .attentions import Attention
from .elements import Apply, Element, Position, Read, Score, depends_on_scores
from .indices import H
from .lifting import NotAttention
from .magnitudes import Magnitudes
from .masks import Masks
from .rows import evaluate, far_largest

#: The queries and keys of a block.
BLOCK = 128
#: With fewer blocks of queries or keys than this, finding them costs more than it saves.
FEWEST_BLOCKS = 4
#: A score this far below others has the probability zero, whatever is added to both.
HIDDEN = 1e6
#: The product of query and key is taken to be less than a hundredth of that, so that no more than this factor may follow it.
MOST_GAIN = 100.0
#: Ops that compare a number of the query with one of the key. Others, such as a product, combine two padding masks.
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "sub"}


def skipped_blocks(outer: Inserter, attention: Attention, query: Node, mask_mod: Node) -> Any:
    """Return the block_mask operand for an attention; None if no blocks are known to be hidden.

    query: a node on the device. mask_mod: the node of one that hides nothing.
    """
    score, ranges, writes = attention.score, attention.lift.ranges, attention.lift.writes
    lengths = [ranges.extents[p] for p in (Q, K)]
    if not all(isinstance(n, int) and -(-n // BLOCK) >= FEWEST_BLOCKS for n in lengths):
        return None
    try:
        masks = Masks(ranges, writes, minus_infinity=True).far(score)
    except NotAttention:
        return None
    if masks is None or H in masks.positions() or not _relates(masks):
        return None
    magnitudes = Magnitudes(ranges, writes, minus_infinity=True)
    if magnitudes.of(masks) <= HIDDEN or _Gains(magnitudes).of(score) > MOST_GAIN:
        return None
    by_query, by_key = visible_blocks(outer, evaluate(outer, masks, ranges, value_of(query).device))
    return block_mask(lengths, by_query, by_key, BLOCK, mask_mod)


class _Gains:
    """Bounds of the factor by which elements change if the product of query and key does; inf where none is known.

    Every element is looked at once, because a sum may use the element before it twice.
    """

    def __init__(self, magnitudes: Magnitudes) -> None:
        self._magnitudes = magnitudes
        self._known: dict[Element, float] = {}

    def of(self, x: Any) -> float:
        """Return the bound of an element, or 0 for a number."""
        if not isinstance(x, Element):
            return 0.0
        if x not in self._known:
            self._known[x] = self._bound(x)
        return self._known[x]

    def _bound(self, x: Element) -> float:
        if isinstance(x, Score) or not depends_on_scores(x):
            return float(isinstance(x, Score))
        gains = [self.of(part) for part in x.parts()]
        if x.name in ("where", "masked_fill", "neg", "to"):
            return max(gains)
        if x.name in ("add", "sub"):
            return sum(gains)
        others = [a for a in x.args if not depends_on_scores(a)]
        if x.name == "mul" and len(x.args) == 2 and len(others) == 1:
            return max(gains) * self._magnitudes.of(others[0])
        if x.name == "div" and len(x.args) == 2 and not depends_on_scores(x.args[1]):
            reciprocal = Apply("call_function", operator.truediv, (1.0, x.args[1]), {}, x.dtype)
            return max(gains) * self._magnitudes.of(reciprocal)
        # A soft cap is bounded by itself.
        return 1.0 if self._magnitudes.of(x) <= 1.0 else math.inf


def visible_blocks(outer: Inserter, masks: Node) -> tuple[tuple[Node, Node], tuple[Node, Node]]:
    """Return the blocks that ``masks`` [b, 1, q, k] do not hide: for each row of blocks, and for each column of blocks.

    Both are the number of blocks, int32 [b, 1, rows], and which ones these are, int32 [b, 1, rows, columns], with zeros
    behind them.
    """
    blocks = _blocks(outer, _visible(outer, masks))
    return _listed(outer, blocks), _listed(outer, outer.method("transpose", blocks, -2, -1))


def _relates(masks: Element) -> bool:
    """Return whether a mask compares the query and the key, or is a tensor with a number for each pair of them.

    What hides keys in all rows alike, as padding does, hides few whole blocks.
    """
    for element in masks.walk():
        if isinstance(element, (Position, Read)) and {Q, K} <= element.own_positions():
            return True
        if isinstance(element, Apply) and element.name in _COMPARISONS:
            parts = [part.positions() & {Q, K} for part in element.parts()]
            if {Q} in parts and {K} in parts:
                return True
    return False


def _visible(outer: Inserter, masks: Node) -> Node:
    """Return where ``masks`` [b, 1, q, k] do not hide a score."""
    below = outer.function(operator.sub, masks, far_largest(outer, masks))
    return outer.function(torch.logical_not, outer.function(operator.le, below, -HIDDEN))


def _blocks(outer: Inserter, visible: Node) -> Node:
    """Return which blocks of ``visible`` [b, 1, q, k] have a visible score, as [b, 1, blocks of q, blocks of k]."""
    batch, _, *lengths = shape_of(visible)
    numbers = [-(-n // BLOCK) for n in lengths]
    missing = [BLOCK * blocks - n for blocks, n in zip(numbers, lengths, strict=True)]
    whole = outer.function(F.pad, visible, (0, missing[1], 0, missing[0])) if any(missing) else visible
    split = outer.method("reshape", whole, batch, 1, numbers[0], BLOCK, numbers[1], BLOCK)
    return outer.method("any", outer.method("any", split, 5), 3)


def _listed(outer: Inserter, blocks: Node) -> tuple[Node, Node]:
    """Return the number of blocks in each row, and which ones these are.

    Nothing is sorted, because Inductor's kernel that sorts 300 numbers is wrong in torch 2.11.
    """
    columns = shape_of(blocks)[-1]
    along = outer.function(torch.arange, columns, device=value_of(blocks).device)
    place = outer.function(operator.sub, outer.method("cumsum", blocks, -1), 1)
    here = outer.function(operator.eq, outer.method("unsqueeze", place, -1), along)
    here = outer.function(operator.and_, here, outer.method("unsqueeze", blocks, -1))
    chosen = outer.function(operator.mul, here, outer.method("unsqueeze", along, -1))
    number = outer.method("sum", blocks, -1, dtype=torch.int32)
    return number, outer.method("sum", chosen, -2, dtype=torch.int32)
