"""Captured tensors that are a matrix of queries and keys in memory, although they are not indexed like one.

The relative shift ``r[b, h, q, q - k + K - 1]`` of Transformer-XL and Conformer reads one element for each pair, and its
address is ``(L + 1) q - k`` with rows of L elements: a matrix whose rows are L + 1 elements apart, and whose keys are in
descending order. TMA moves blocks of it if the keys of a tile are in descending order too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.target import TMA_ALIGNMENT
from .affine import address
from .score_mod import ScoreMod


@dataclass(frozen=True)
class Block:
    """The matrices [B?, H?, Q, K], whose keys are consecutive in memory, in descending order.

    strides: those of b, h and q in elements. A stride of b or h is 0 if there is one matrix for all. offset: that of the
    last key of the first query.
    """

    strides: tuple[int, int, int]
    offset: int

    def aligned(self, itemsize: int) -> bool:
        """Return whether TMA can move blocks of elements of ``itemsize`` bytes."""
        return all(n * itemsize % TMA_ALIGNMENT == 0 for n in (*self.strides, self.offset))


def block(
    indices: Sequence[Any], shape: Sequence[Any], strides: Sequence[Any], inputs: ScoreMod, lengths: Sequence[Any]
) -> Block | None:
    """Return the matrices that the elements ``tensor[indices]`` are, or None if they are none with descending keys."""
    found = address(indices, shape, strides, inputs, lengths)
    if found is None:
        return None
    *outer, query, key = found.factors
    if key != -1 or query <= 0 or min(outer) < 0:
        return None
    return Block((*outer, query), found.constant - (lengths[3] - 1))
