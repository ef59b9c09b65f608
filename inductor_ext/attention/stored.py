"""``stored(x)``: x itself, as its dtype holds it.

Inductor computes what is made of positions by sympy, in the integers, through every cast: to it ``(k - q).to(torch.uint8)``
is ``k - q``. In the kernel of a score_mod it does not, so an expression that leaves the kernel takes this op with it.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("gradfuse::stored", mutates_args=())
def stored(x: Tensor) -> Tensor:
    """``x`` (a copy in eager mode); for values that have no gradient, such as an integer's cast to a narrower type."""
    return x.clone()


@stored.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
