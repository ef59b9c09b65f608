"""Lowering of ``gradfuse::linear_scan`` onto ``linear_scan.py.jinja``.

Where the op is not lowered to the template, its own loop runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.kernel_op import KernelOp
from ..core.linear_scan import accumulator, linear_scan
from ..core.templates import load, run
from ..torch_api.ir import node_layout, realize
from ..torch_api.sizes import hint
from ..torch_api.template import SymbolicGridFn, Template


@SymbolicGridFn
def grid(slices: Any, channels: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    """The grid of the kernels over channels: one program for each ``BLOCK_L`` channels of a slice."""
    return slices * cdiv(channels, meta["BLOCK_L"]), 1, 1


_template = Template("gradfuse_linear_scan", grid, load("scan/linear_scan", "scan/lanes"))


def _tile(block_t: int, block_l: int, num_warps: int, stages: int) -> dict[str, Any]:
    return {"BLOCK_T": block_t, "BLOCK_L": block_l, "STAGES": stages, "num_warps": num_warps, "num_stages": 1}


#: The tiles where channels are innermost, by the size of an element in bytes. Measurements are in benchmarks/NOTES.md.
CHANNELS_INNERMOST = {2: _tile(128, 16, 4, 3), 4: _tile(64, 16, 4, 3), 8: _tile(64, 16, 4, 3)}
#: The tile where all channels of a slice have the same coefficients, for at most FEW_TIMES, as in the states of mLSTM.
#: A tile of many times would be mostly empty.
FEW_TIMES, ONE_COEFFICIENT = 1024, _tile(1, 128, 4, 5)
#: The tiles where time is innermost. A warp scans a row; if there are fewer rows than MANY_ROWS, four warps do.
MANY_ROWS = 2048
TIME_INNERMOST, TIME_INNERMOST_OF_FEW = _tile(256, 1, 1, 1), _tile(1024, 1, 4, 1)


def _choose(sizes: Sequence[Any], itemsize: int, coefficient_stride: Any) -> dict[str, Any]:
    """The tile for [P, T, L]. coefficient_stride: that along L, or None without coefficients."""
    slices, times, channels = sizes
    if channels != 1 and coefficient_stride == 0 and hint(times) <= FEW_TIMES:
        return ONE_COEFFICIENT
    if channels != 1:
        return CHANNELS_INNERMOST[itemsize]
    return TIME_INNERMOST if hint(slices) >= MANY_ROWS else TIME_INNERMOST_OF_FEW


def lower(coefficients: Any, inputs: Any, shape: Sequence[Any], dim: int, reverse: bool, dtype: torch.dtype) -> Any:
    """Lower the op to its kernel. The operands and the result are those of ``core.linear_scan.linear_scan``."""
    operands = [x for x in realize([coefficients, inputs]) if x is not None]
    sizes = inputs.get_size()
    template_options = {
        "GATED": coefficients is not None,
        "REVERSE": reverse,
        "TIME_INNERMOST": sizes[2] == 1,
        "TIME_DIM": dim,
        "RANK": len(shape),
        "ACC_DTYPE": "tl.float64" if accumulator(coefficients, inputs) is torch.float64 else "tl.float32",
    }
    coefficient_stride = None if coefficients is None else operands[0].get_stride()[-1]
    tile = _choose(sizes, max(x.get_dtype().itemsize for x in operands), coefficient_stride)
    return run(_template, [tile], operands, [], node_layout(), [sizes[0], sizes[2]], **template_options)


KERNEL = KernelOp("linear_scan", "gated recurrences and the gradients of scans, one kernel each way", linear_scan, lower)
