"""``depend(x, tensors)``: x itself, with a gradient of exactly zero for every one of ``tensors``.

What a score_mod adds without a key in it changes nothing that softmax returns. Its tensors leave the computation, but they
are still inputs of the user's function, and their gradient is zero and not missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("gradfuse::depend", mutates_args=())
def depend(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """``x`` (a copy in eager mode, ``x`` itself once compiled); its gradient is passed on, that of ``tensors`` is zero."""
    return x.clone()


@depend.register_fake
def _(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(x)


def _keep_shapes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shapes = [(t.shape, t.dtype, t.device, t.requires_grad) for t in inputs[1]]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    zeros = [torch.zeros(s, dtype=d, device=v) if needed else None for s, d, v, needed in ctx.shapes]
    return grad, zeros


depend.register_autograd(_backward, setup_context=_keep_shapes)
