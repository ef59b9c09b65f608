"""The table of our Inductor lowerings: FX node to Inductor IR, by way of a template.

To add a kernel: an op and a ``KernelOp`` in the feature's folder, a line in ``KERNELS``, a template, a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .attention import backward, forward
from .core import depend  # noqa: F401  (registers gradfuse::depend)
from .core.kernel_op import KernelOp
from .gathers import gather_sum, place_rows, segment_sum
from .mlstm import lowering as mlstm
from .options import Options
from .scan import lower_associative, lower_backward, lower_forward, lower_linear
from .torch_api.higher_order import associative_scan_hop, flex_attention_backward_hop, flex_attention_hop
from .torch_api.ir import stored
from .torch_api.lowering import lowerings


@dataclass(frozen=True)
class Replaced:
    """An op of PyTorch that we lower in our way; ``lower(options, stock)`` returns the lowering, which may call stock's."""

    name: str
    what: str
    op: Any
    lower: Callable[[Options, Callable[..., Any]], Callable[..., Any]]


REPLACED: tuple[Replaced, ...] = (
    Replaced(
        "flex_attention",
        "lowering of flex_attention's forward for training onto flex_forward.py.jinja",
        flex_attention_hop,
        forward.lower,
    ),
    Replaced(
        "flex_attention_backward",
        "lowering of flex_attention's backward onto flex_backward.py.jinja",
        flex_attention_backward_hop,
        backward.lower,
    ),
    Replaced(
        "scans",
        "what is left to stock's lowering of associative_scan: results in the memory order of its operands",
        associative_scan_hop,
        lower_associative.lower,
    ),
)

#: Ops that our passes put into graphs.
KERNELS: tuple[KernelOp, ...] = (
    mlstm.FORWARD,
    mlstm.BACKWARD,
    lower_linear.KERNEL,
    lower_forward.KERNEL,
    lower_backward.KERNEL,
    gather_sum.KERNEL,
    segment_sum.KERNEL,
    place_rows.KERNEL,
)


def table(options: Options) -> dict[Any, Callable[..., Any]]:
    """The entries of Inductor's table of lowerings that a gradfuse graph replaces, as ``options`` enable them."""
    return {
        **{each.op: each.lower(options, lowerings[each.op]) for each in REPLACED if options.enabled(each.name)},
        **{each.overload: each.lowering(options) for each in KERNELS},
        torch.ops.gradfuse.depend.default: lambda x, tensors: x,
        torch.ops.gradfuse.stored.default: stored,
    }
