"""Whether an attention that reads nothing learned is cheaper as flex_attention, because stock would store its mask.

A frozen bias of T5 and ALiBi have a number for each head and pair of a query and a key. Stock writes and reads them all,
where a score_mod computes them from a table, or from the positions alone. A mask that all heads share, as for padding, costs
stock's kernels little. The measurements are in docs/notes/attention.md.
"""

from __future__ import annotations

import math

from torch.fx import Node

from ...core.fx import HALF, dtype_of, fake_tensor
from ...core.target import Target
from ...torch_api.sizes import size_hint
from ..kinds import K, Q
from .attentions import Attention
from .elements import Element, Position, Read, Score, depends_on_scores
from .indices import H

#: The fewest pairs of a query and a key for which this was measured to pay, by the type of the device and its
#: family. Where it was not measured, on other devices and in full precision, such an attention stays with stock.
FEWEST_PAIRS = {("cuda", "hopper"): 2**18}
LARGEST_ITEM = 2
#: What is small has this many times fewer elements than there are pairs.
FEWER = 8


def saves_a_mask(attention: Attention) -> bool:
    """Return whether the score depends on head and pair, and is computed from much less than a number for each pair."""
    device = fake_tensor(attention.last).device
    fewest = FEWEST_PAIRS.get((device.type, Target.of(device).family))
    if fewest is None or _pairs(attention) < fewest:
        return False
    if dtype_of(attention.last).itemsize > LARGEST_ITEM or not {H, Q, K} <= attention.score.positions():
        return False
    elements = list(attention.score.walk())
    if any(_is_rounded_offset(e) for e in elements):
        return False
    return is_small(*{e.node for e in elements if isinstance(e, Read)}, attention=attention)


def is_small(*tensors: Node, attention: Attention) -> bool:
    """Return whether all tensors together have much fewer elements than a mask of the attention has for one head."""
    elements = [size_hint(fake_tensor(n).numel()) for n in tensors]
    return None not in elements and FEWER * sum(elements) <= _pairs(attention)


def _pairs(attention: Attention) -> int:
    """Return the number of pairs of a query and a key, or 0 if it is not known."""
    lengths = [size_hint(attention.lift.ranges.extents[p]) for p in (Q, K)]
    return 0 if None in lengths else math.prod(lengths)


def _is_rounded_offset(element: Element) -> bool:
    """Whether an element is a number in half precision for each head, and each key or each query.

    BLOOM's is a slope times the position of the key. Near the thousandth key, bf16 rounds it to a multiple of four. Its
    model was trained with that, and a score_mod would not round it. The distance of a pair is small where a probability is
    large.
    """
    dtype = dtype_of(element.node) if isinstance(element, Read) else getattr(element, "dtype", None)
    if dtype not in HALF or isinstance(element, (Score, Position)) or depends_on_scores(element):
        return False
    positions = element.positions()
    return H in positions and len({Q, K} & positions) == 1
