"""``depend(x, tensors)`` returns x, and the gradient of each of ``tensors`` is exactly zero.

If a term of a score_mod does not depend on the key, it does not change the result of softmax. Its tensors are removed from
the computation, but they are still inputs of the user's function, so their gradient must be zero, not missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("gradfuse::depend", mutates_args=())
def depend(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return ``x``: a copy in eager mode, and ``x`` itself in compiled code.

    x and tensors may have any shape and dtype. The gradient of the result is the gradient of ``x``; the gradients of
    ``tensors`` are zero.
    """
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
