"""Higher-order ops in graphs, and the operands of flex_attention."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._inductor.virtualized import V

__all__ = ["scan_op", "while_loop_op"]


associative_scan_hop = torch.ops.higher_order.associative_scan

flex_attention_hop = torch.ops.higher_order.flex_attention

flex_attention_backward_hop = torch.ops.higher_order.flex_attention_backward

zeros_and_scatter = torch.ops.flex_lib.zeros_and_scatter.default


class FlexBlockMask(NamedTuple):
    """The block_mask operand of the flex_attention ops; torch 2.13 put four entries before the block sizes."""

    query_length: Any
    key_length: Any
    kv_num_blocks: Any
    kv_indices: Any
    full_kv_num_blocks: Any
    full_kv_indices: Any
    q_num_blocks: Any
    q_indices: Any
    full_q_num_blocks: Any
    full_q_indices: Any
    query_block_size: Any
    key_block_size: Any
    mask_mod: Any

    @classmethod
    def of(cls, operand: Sequence[Any]) -> FlexBlockMask:
        """Read the operand of any supported torch: the first ten entries and the last three."""
        return cls(*operand[:10], *operand[-3:])


def inherited_block_options(device: torch.device, dtype: torch.dtype, head_dim: int, query_length: Any) -> Any:
    """Return stock's tuned tile sizes, ``(forward configs, backward configs)``: one of each without max-autotune."""
    choices = V.choices
    forward = choices.get_flex_attention_fwd_configs
    args: tuple[Any, ...] = (head_dim, dtype, device.type)
    if "seq_len" in inspect.signature(forward).parameters:
        args = (head_dim, query_length, dtype, device.type)
    return forward(*args), choices.get_flex_attention_bwd_configs(head_dim, dtype, device.type)
