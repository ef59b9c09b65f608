"""The table of our Inductor lowerings: FX node to Inductor IR, by way of a template.

To add one: a function ``lower`` in the feature's folder with the op's operands, a line in ``table``, a template, a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .attention import backward, forward
from .core.templates import TEMPLATE_DIR
from .gathers import gather_sum, place_rows, segment_sum
from .mlstm import lowering as mlstm
from .options import Options
from .scan import lower_associative, lower_backward, lower_forward, lower_linear
from .torch_api.higher_order import associative_scan_hop, flex_attention_backward_hop, flex_attention_hop
from .torch_api.ir import stored
from .torch_api.lowering import lowerings

__all__ = ["TEMPLATE_DIR", "table"]


def table(own: Options) -> dict[Any, Callable[..., Any]]:
    """The entries of Inductor's table of lowerings that a gradfuse graph replaces, as ``own`` enables them."""
    entries = {
        "scans": (associative_scan_hop, lower_associative.lower),
        "flex_attention": (flex_attention_hop, forward.lower),
        "flex_attention_backward": (flex_attention_backward_hop, backward.lower),
    }
    ours = {op: lower(own, lowerings[op]) for name, (op, lower) in entries.items() if own.enabled(name)}
    made_by_rewrites = {
        torch.ops.gradfuse.depend.default: lambda x, tensors: x,
        torch.ops.gradfuse.gather_sum.default: gather_sum.lower,
        torch.ops.gradfuse.linear_scan.default: lower_linear.lower,
        torch.ops.gradfuse.place_rows.default: place_rows.lower,
        torch.ops.gradfuse.scan_backward.default: lower_backward.lower,
        torch.ops.gradfuse.scan_forward.default: lower_forward.lower,
        torch.ops.gradfuse.segment_sum.default: segment_sum.lower,
        torch.ops.gradfuse.stored.default: stored,
    }
    if own.enabled("mlstm"):
        ours[torch.ops.gradfuse.mlstm_tiles.default] = mlstm.lower_forward
        ours[torch.ops.gradfuse.mlstm_tiles_backward.default] = mlstm.lower_backward
    return {**ours, **made_by_rewrites}
