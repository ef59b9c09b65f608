"""Lowering of ``gradfuse::scan_forward`` onto ``scan_forward.py.jinja``.

Where the op is not lowered to the template, its own loop runs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..core.fx import working_dtype
from ..core.kernel_op import KernelOp
from ..core.subgraphs import of_source
from ..core.templates import bits, load, run
from ..torch_api.ir import node_layout, realize
from ..torch_api.lowering import V, empty_strided
from ..torch_api.template import Template
from .lower_linear import grid
from .scan_forward import scan_forward

_template = Template("gradfuse_scan_forward", grid, load("scan/scan_forward", "scan/lanes"))


def _tile(leaves: int) -> dict[str, Any]:
    """The tile for a scan of this many leaves. Measurements are in benchmarks/NOTES.md.

    A thread holds two spans of every leaf, so the spans are shorter if there are more leaves.
    """
    span = 16 if leaves <= 2 else 8 if leaves <= 4 else 4
    return {"SPANS": 16, "SPAN": span, "BLOCK_L": 16, "num_warps": 8, "num_stages": 1}


def lower(xs: Sequence[Any], source: str, shape: Sequence[Any], dim: int, reverse: bool) -> Any:
    """Lower the op to its kernel. The operands and results are those of ``scan.scan_forward.scan_forward``.

    A result that no op uses is not stored, and is None here. Inductor may fuse the ops that use the last of the used
    results into the kernel.
    """
    device = xs[0].get_device()
    inputs = realize(xs)
    layouts = [node_layout(i) for i in range(len(xs))]
    *others, last = sorted({user.args[1] for user in V.graph.current_node.users if user.target is operator.getitem})
    results = {i: empty_strided(layouts[i].size, layouts[i].stride, dtype=layouts[i].dtype, device=device) for i in others}
    kinds = [working_dtype(x.get_dtype()) for x in xs]
    slices, _, channels = xs[0].get_size()
    results[last] = run(
        _template,
        [_tile(len(xs))],
        [*inputs, *results.values()],
        list(results.values()),
        layouts[last],
        [slices, channels],
        subgraphs=of_source(
            source, {f"{name}_{i}": kind for name in ("left", "right") for i, kind in enumerate(kinds)}, device
        ),
        NUM_LEAVES=len(xs),
        STORED=bits(others),
        LAST=last,
        BOOLEAN=bits(i for i, kind in enumerate(kinds) if kind is torch.bool),
        REVERSE=reverse,
        TIME_DIM=dim,
        RANK=len(shape),
        **{f"DTYPE_{i}": _tile_dtype(kind) for i, kind in enumerate(kinds)},
    )
    return [results.get(i) for i in range(len(xs))]


def _tile_dtype(kind: torch.dtype) -> str:
    """The Triton dtype in which leaves of dtype ``kind`` are scanned. Conditions are scanned as numbers."""
    return "tl.int32" if kind is torch.bool else str(kind).replace("torch", "tl")


KERNEL = KernelOp("scan_forward", "scans of any combine_fn over many channels", scan_forward, lower)
