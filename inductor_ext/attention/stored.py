"""``stored(x)`` returns x with the values that its dtype represents.

Outside of a score_mod's kernel, Inductor computes values that are made from positions by sympy, in the integers, and ignores
every cast: for it, ``(k - q).to(torch.uint8)`` is ``k - q``. Inside the kernel it does not. So this op is added to an
expression that is moved out of the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("gradfuse::stored", mutates_args=())
def stored(x: Tensor) -> Tensor:
    """Return ``x``, in eager mode a copy. For values without a gradient, such as the cast of an integer to a narrow type."""
    return x.clone()


@stored.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
