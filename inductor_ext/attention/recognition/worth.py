"""Whether an attention that reads nothing learned is cheaper as flex_attention, because stock would store its mask.

A frozen bias of T5 and ALiBi have a number for each head and pair of a query and a key. Stock writes and reads them all,
where a score_mod computes them from a table, or from the positions alone. A mask that all heads share, as for padding, costs
stock's kernels little. The measurements are in docs/notes/attention.md.
"""

from __future__ import annotations

import math

from ...core.fx import dtype_of, fake_tensor
from ...torch_api.sizes import size_hint
from ..kinds import K, Q
from .attentions import Attention
from .elements import Read
from .indices import H

#: The fewest pairs of a query and a key for which this was measured to pay, by the type of the device. Where it was not
#: measured, on other devices and in full precision, such an attention stays with stock.
FEWEST_PAIRS = {"cuda": 2**18}
LARGEST_ITEM = 2
#: What the score_mod reads has this many times fewer elements than there are pairs.
FEWER = 8


def saves_a_mask(attention: Attention) -> bool:
    """Return whether the score depends on head and pair, and is computed from much less than a number for each pair."""
    extents = attention.lift.ranges.extents
    lengths = [size_hint(extents[p]) for p in (Q, K)]
    fewest = FEWEST_PAIRS.get(fake_tensor(attention.last).device.type)
    if fewest is None or None in lengths or math.prod(lengths) < fewest:
        return False
    if dtype_of(attention.last).itemsize > LARGEST_ITEM or not {H, Q, K} <= attention.score.positions():
        return False
    read = {e.node for e in attention.score.walk() if isinstance(e, Read)}
    elements = [size_hint(fake_tensor(n).numel()) for n in read]
    return None not in elements and FEWER * sum(elements) <= math.prod(lengths)
