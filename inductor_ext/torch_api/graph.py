"""The contents of nodes: operators with their schemas, and nested tuples, lists and dicts of values."""

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

__all__ = ["HigherOrderOperator", "OpOverload", "pytree", "stable_topological_sort", "storage_of"]


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share memory, fake tensors included."""
    return tensor.untyped_storage()._cdata
