"""Lowering of ``gradfuse::scan_backward`` onto ``scan_backward.py.jinja`` or ``scan_backward_apart.py.jinja``.

Where the op is not lowered to the template, its own loop runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.kernel_op import KernelOp
from ..core.subgraphs import of_source
from ..core.templates import bits, load, run
from ..torch_api.ir import node_layout, realize
from ..torch_api.lowering import empty_strided
from ..torch_api.template import Template
from .lower_linear import CHANNELS_INNERMOST, grid
from .scan_backward import scan_backward

#: The loads of UNROLL times are issued together, and at most STAGES such groups are in flight (benchmarks/NOTES.md).
UNROLL, STAGES = 4, 4
#: The channels and the warps of a program, by the size of an element in bytes. A thread copies 4 bytes ahead, or none.
CHANNELS = {4: (64, 2), 2: (64, 1)}
#: The groups in flight may take this many bytes of shared memory.
AHEAD = 2**16
#: The same for the tiles of leaves that do not interact: two programs for each multiprocessor.
TILES_AHEAD = 100 * 2**10


def _tile(itemsize: int, loads: int) -> dict[str, Any]:
    channels, num_warps = CHANNELS[itemsize]
    group = loads * UNROLL * channels * 4
    stages = max(1, min(STAGES, AHEAD // group))
    return {"BLOCK_L": channels, "UNROLL": UNROLL, "STAGES": stages, "num_warps": num_warps, "num_stages": 1}


def _tile_of_times(itemsize: int, loads: int) -> dict[str, Any]:
    """The tile of leaves that do not interact, as for a linear recurrence, with as many stages as there is room for."""
    tile = CHANNELS_INNERMOST[itemsize]
    group = loads * tile["BLOCK_T"] * tile["BLOCK_L"] * itemsize
    return {**tile, "STAGES": max(1, min(tile["STAGES"], TILES_AHEAD // group))}


_template = Template("gradfuse_scan_backward", grid, load("scan/scan_backward", "scan/lanes"))
_apart_template = Template("gradfuse_scan_backward_apart", grid, load("scan/scan_backward_apart", "scan/lanes"))


def lower(
    ys: Sequence[Any],
    xs: Sequence[Any],
    grads: Sequence[Any],
    given: Sequence[int],
    source: str,
    reached: Sequence[int],
    carried: Sequence[int],
    driven: Sequence[int],
    apart: bool,
    reverse: bool,
) -> Any:
    """Lower the op to a kernel. The operands and results are those of ``scan.scan_backward.scan_backward``."""
    device = xs[0].get_device()
    inputs = realize([*ys, *xs, *grads])
    layouts = [node_layout(i) for i in range(len(xs))]
    stored = [empty_strided(x.size, x.stride, dtype=x.dtype, device=device) for x in layouts[:-1]]
    slices, _, channels = xs[0].get_size()
    names = [*(f"Y_{i}" for i in range(len(ys))), *(f"X_{i}" for i in range(len(xs))), *(f"lambda_{i}" for i in reached)]
    itemsize = min(x.dtype.itemsize for x in layouts)
    tile = _tile_of_times(itemsize, len(inputs)) if apart else _tile(itemsize, len(inputs))
    last = run(
        _apart_template if apart else _template,
        [tile],
        [*inputs, *stored],
        stored,
        layouts[-1],
        [slices, channels],
        subgraphs=of_source(source, dict.fromkeys(names, torch.float32), device),
        REVERSE=reverse,
        NUM_READ=len(ys),
        NUM_LEAVES=len(xs),
        GIVEN=bits(given),
        REACHED=bits(reached),
        CARRIED=bits(carried),
        DRIVEN=bits(driven),
    )
    return [*stored, last]


KERNEL = KernelOp(
    "scan_backward", "gradients of scans whose leaves interact or whose coefficients are computed", scan_backward, lower
)
