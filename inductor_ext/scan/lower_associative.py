"""Stock's lowering of associative_scan, changed so that the results have the memory order of the operands.

The op scans dim 0 of any view that it is given. Stock lays the results out with dim 0 outermost. A scan along the last dim
of the user's tensors would therefore store each result twice, one time transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..options import Options
from ..torch_api.ir import in_order_of, node_layout


def lower(options: Options, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering that replaces ``stock``, the lowering in Inductor's table."""

    def lowered(combine_fn: Any, xs: Any, additional_inputs: Any) -> Any:
        results = stock(combine_fn, xs, additional_inputs)
        return [in_order_of(result, node_layout(i).stride) for i, result in enumerate(results)]

    return lowered
