"""Inductor lowerings: FX node to Inductor IR, by way of a template.

To add one: a file here with a function ``lower(own)`` that returns the replacement, a line in ``table``, a template, a
test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import compat
from ..options import Options
from . import (
    associative_scan,
    flex_attention,
    flex_attention_backward,
    gather_sum,
    linear_scan,
    mlstm,
    place_rows,
    scan_backward,
    scan_forward,
    segment_sum,
)
from .templates import TEMPLATE_DIR

__all__ = ["TEMPLATE_DIR", "table"]


def table(own: Options) -> dict[Any, Callable[..., Any]]:
    """The entries of Inductor's table of lowerings that a gradfuse graph replaces, as ``own`` enables them."""
    entries = {
        "scans": (compat.associative_scan_hop, associative_scan.lower),
        "flex_attention": (compat.flex_attention_hop, flex_attention.lower),
        "flex_attention_backward": (compat.flex_attention_backward_hop, flex_attention_backward.lower),
    }
    ours = {op: lower(own, compat.lowerings[op]) for name, (op, lower) in entries.items() if own.enabled(name)}
    made_by_rewrites = {
        torch.ops.gradfuse.depend.default: lambda x, tensors: x,
        torch.ops.gradfuse.gather_sum.default: gather_sum.lower,
        torch.ops.gradfuse.linear_scan.default: linear_scan.lower,
        torch.ops.gradfuse.place_rows.default: place_rows.lower,
        torch.ops.gradfuse.scan_backward.default: scan_backward.lower,
        torch.ops.gradfuse.scan_forward.default: scan_forward.lower,
        torch.ops.gradfuse.segment_sum.default: segment_sum.lower,
        torch.ops.gradfuse.stored.default: compat.stored,
    }
    if own.enabled("mlstm"):
        ours[torch.ops.gradfuse.mlstm_tiles.default] = mlstm.lower_forward
        ours[torch.ops.gradfuse.mlstm_tiles_backward.default] = mlstm.lower_backward
    return {**ours, **made_by_rewrites}
