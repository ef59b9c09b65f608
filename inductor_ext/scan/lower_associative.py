"""Stock's lowering of associative_scan, with results in the memory order of its operands.

The op scans dim 0 of whatever view it is given. Stock lays the results out with dim 0 outermost, so that a scan along the
last dim of the user's tensors stores each result twice, once transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..options import Options
from ..torch_api.ir import in_order_of, node_layout


def lower(options: Options, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of ``stock``."""

    def lowered(combine_fn: Any, xs: Any, additional_inputs: Any) -> Any:
        results = stock(combine_fn, xs, additional_inputs)
        return [in_order_of(result, node_layout(i).stride) for i, result in enumerate(results)]

    return lowered
