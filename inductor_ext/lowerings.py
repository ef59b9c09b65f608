"""The table of our Inductor lowerings, which turn FX nodes into Inductor IR, most of them with a template.

To add a kernel, write an op and a ``KernelOp`` in the folder of the feature, a line in ``KERNELS``, a template, and a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .attention import backward, batch_sums, forward, gluon_forward
from .casts import together
from .core import depend  # noqa: F401  (registers gradfuse::depend)
from .core.kernel_op import KernelOp
from .gathers import counted_order, entry_sums, gather_sum, place_rows, segment_sum
from .mlstm import lowering as mlstm
from .options import Options
from .scan import lower_associative, lower_backward, lower_forward, lower_linear, store_flipped
from .torch_api.higher_order import associative_scan_hop, flex_attention_backward_hop, flex_attention_hop
from .torch_api.ir import stored
from .torch_api.lowering import lowerings


@dataclass(frozen=True)
class Replaced:
    """An op of PyTorch whose lowering we replace. ``lower(options, stock)`` returns ours, which may call stock's."""

    name: str
    what: str
    op: Any
    lower: Callable[[Options, Callable[..., Any]], Callable[..., Any]]


REPLACED: tuple[Replaced, ...] = (
    Replaced(
        "flex_attention",
        "lowers the forward of flex_attention in training onto flex_forward.py.jinja",
        flex_attention_hop,
        forward.lower,
    ),
    Replaced(
        "flex_attention_backward",
        "lowers the backward of flex_attention onto flex_backward.py.jinja",
        flex_attention_backward_hop,
        backward.lower,
    ),
    Replaced(
        "scans",
        "gives the results of stock's lowering of associative_scan the memory order of its operands",
        associative_scan_hop,
        lower_associative.lower,
    ),
)

#: Names of kernels that a lowering may choose, with what they are. Without one of them it takes another kernel.
CHOICES: dict[str, str] = {
    gluon_forward.NAME: "computes the forward of attention on Hopper by a kernel in Gluon",
    batch_sums.NAME: "sums the gradient of a captured t[h, q, k] over the batch by a kernel of its own",
}

#: The ops that our passes put into graphs.
KERNELS: tuple[KernelOp, ...] = (
    mlstm.FORWARD,
    mlstm.BACKWARD,
    mlstm.CHUNK_SUMS,
    lower_linear.KERNEL,
    lower_forward.KERNEL,
    lower_backward.KERNEL,
    gather_sum.KERNEL,
    counted_order.KERNEL,
    segment_sum.KERNEL,
    entry_sums.KERNEL,
    entry_sums.BINS,
    place_rows.KERNEL,
    together.KERNEL,
)


def table(options: Options) -> dict[Any, Callable[..., Any]]:
    """Return the entries that replace those of Inductor's table of lowerings while a graph of ours is lowered.

    ``options`` say which of them are enabled.
    """
    return {
        **{each.op: each.lower(options, lowerings[each.op]) for each in REPLACED if options.enabled(each.name)},
        **{each.overload: each.lowering(options) for each in KERNELS},
        torch.ops.gradfuse.depend.default: lambda x, tensors: x,
        torch.ops.gradfuse.stored.default: stored,
        torch.ops.gradfuse.store_flipped.default: store_flipped.lower,
        torch.ops.gradfuse.copied.default: lambda x, contiguous=True: lowerings[torch.ops.aten.clone.default](x),
    }
