"""Higher-order ops in graphs, and the operands of flex_attention."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._higher_order_ops.while_loop import while_loop_op
from torch._inductor.virtualized import V
from torch.nn.attention.flex_attention import _create_empty_block_mask
from torch.utils._python_dispatch import _disable_current_modes

from .config import inductor_config

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


def inherited_block_options(
    device: torch.device, dtype: torch.dtype, head_dim: int, query_length: Any
) -> tuple[tuple[Any, list[Any]], tuple[Any, list[Any]]]:
    """Return stock's tuned tile sizes for the forward and for the backward.

    Each is the config that stock takes without max-autotune, and a list of those that compete under max-autotune, among them
    that one. Without max-autotune the list is empty.
    """
    with inductor_config.patch(max_autotune=False):
        default = _block_options(device, dtype, head_dim, query_length)
    competing = _block_options(device, dtype, head_dim, query_length) if inductor_config.max_autotune else ([], [])
    forward, backward = ((own[0], [*own, *more] if more else []) for own, more in zip(default, competing, strict=True))
    return forward, backward


def _block_options(
    device: torch.device, dtype: torch.dtype, head_dim: int, query_length: Any
) -> tuple[list[Any], list[Any]]:
    choices = V.choices
    forward = choices.get_flex_attention_fwd_configs
    args: tuple[Any, ...] = (head_dim, dtype, device.type)
    if "seq_len" in inspect.signature(forward).parameters:
        args = (head_dim, query_length, dtype, device.type)
    return forward(*args), choices.get_flex_attention_bwd_configs(head_dim, dtype, device.type)


def is_kernel_that_writes(target: Any) -> bool:
    """Return whether a node calls a Triton kernel of the user's, which may write to its operands."""
    return target is triton_kernel_wrapper_mutation


def no_block_mask(ones: Any, zeros: Any, mask_mod: Any) -> tuple[Any, ...]:
    """Return the block_mask operand of an attention without a block mask: one block of all queries and all keys.

    ones, zeros: its number of blocks, int32 [1, 1, 1], and the number of its block, int32 [1, 1, 1, 1].
    """
    *parts, _ = _empty_block_mask()
    named = FlexBlockMask.of((*parts, mask_mod))
    given = {"kv_num_blocks": ones, "q_num_blocks": ones, "kv_indices": zeros, "q_indices": zeros}
    wrong = [n for n, x in named._asdict().items() if n != "mask_mod" and isinstance(x, torch.Tensor) != (n in given)]
    if wrong:
        raise RuntimeError(f"torch {torch.__version__} has another empty block_mask than gradfuse knows, in {wrong}")
    first = tuple(given.get(name, x) for name, x in list(named._asdict().items())[:10])
    return (*first, *parts[10:], mask_mod)


def block_mask(lengths: Sequence[Any], by_query: Any, by_key: Any, block: int, mask_mod: Any) -> tuple[Any, ...]:
    """Return a block_mask operand all of whose blocks call ``mask_mod``.

    lengths: the numbers of queries and keys. by_query: the number of blocks that are computed in each row of blocks, int32
    [b, h, rows], and their places, int32 [b, h, rows, columns]. by_key: the same for columns. block: the size of a block.
    """
    further = _empty_block_mask()[10:-3]
    if any(x is not None for x in further):
        raise RuntimeError(f"torch {torch.__version__} has other parts of a block_mask than gradfuse knows")
    return (*lengths, *by_query, None, None, *by_key, None, None, *further, block, block, mask_mod)


@functools.cache
def _empty_block_mask() -> tuple[Any, ...]:
    with _disable_current_modes():
        tiny = torch.empty(1, 1, 1, 1)
        return _create_empty_block_mask(tiny, tiny).as_tuple()
