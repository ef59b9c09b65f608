"""The contents of nodes: operators with their schemas, and nested tuples, lists and dicts of values."""

from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

__all__ = ["HigherOrderOperator", "OpOverload", "pytree"]
