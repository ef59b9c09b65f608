"""Attention sinks: a logit in each row that is no key's. It takes a part of the probability and adds nothing to the result.

``softmax(cat([scores, sink], -1))[..., :-1] @ v``, as gpt-oss spells it, is the attention over the scores alone, times the
part of the probability that the sink leaves them: ``sigmoid(logsumexp(scores) - sink)``. So is
``softmax(cat([sink, scores], -1))[..., 1:] @ v``, as x-transformers spells it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.nn.functional import logsigmoid

from ...core.dynamo_graph import Inserter
from ...core.fx import dtype_of, shape_of, working_dtype
from ...core.terms import arg, binary, is_along_last, is_one, maximum_of, op
from ...torch_api.sizes import statically_known_true
from .elements import Element, Read
from .indices import Ranges
from .rows import evaluate


@dataclass(frozen=True)
class Logits:
    """The operand of a softmax. sink: a further logit of each row, or None. inside: the nodes before the softmax."""

    scores: Node
    sink: Node | None = None
    inside: tuple[Node, ...] = ()


def logits(softmax: Node, keys: Any, first: bool) -> Logits | None:
    """Return the logits of a softmax over the last dim, if these are the scores of ``keys`` keys, with or without a sink.

    first: whether the sink stands in front of the scores.
    """
    operand = arg(softmax, 0, "input")
    if statically_known_true(shape_of(operand)[-1] == keys):
        return Logits(operand)
    shifted = _before_shift(operand)
    inside, operand = ((operand, *shifted[1]), shifted[0]) if shifted else ((), operand)
    if op(operand) != "cat" or arg(operand, 1, "dim") not in (-1, len(shape_of(operand)) - 1):
        return None
    parts = arg(operand, 0, "tensors")
    if len(parts) != 2:
        return None
    scores, sink = reversed(parts) if first else parts
    if not is_one(shape_of(sink)[-1]) or not statically_known_true(shape_of(scores)[-1] == keys):
        return None
    return Logits(scores, sink, (*inside, operand))


def _before_shift(node: Any) -> tuple[Node, tuple[Node, ...]] | None:
    """Return x of ``x - x.max(-1, keepdim=True).values``, which has the same softmax, and the nodes of the maximum."""
    if not binary(node, "sub"):
        return None
    x, largest = node.args
    found = maximum_of(largest)
    if found is None:
        return None
    reduction, inside = found
    kept = is_along_last(reduction) and arg(reduction, 2, "keepdim", False) is True
    return (x, tuple(inside)) if kept and arg(reduction, 0, "input") is x else None


def shared(outer: Inserter, out: Node, logsumexp: Node, sink: Element, row: Read | None, ranges: Ranges) -> Node:
    """Return ``out [b, h, q, d]`` of an attention without a sink times the part that the sink leaves it.

    logsumexp: that of the kernel ``[b, h, q]``, in base 2. row: what was subtracted from the scores of each query, or None.
    """
    device = out.meta["example_value"].device
    dtype = working_dtype(dtype_of(out))
    known = outer.method("unsqueeze", outer.function(operator.mul, logsumexp, math.log(2)), -1)
    moved = evaluate(outer, sink, ranges, device)
    if row is not None:
        # The row may be far from zero. If the sink is too, the difference is exact, and the sum with the logsumexp is not.
        moved = outer.function(operator.sub, moved, evaluate(outer, row, ranges, device))
    over_sink = outer.function(operator.sub, known, moved)
    # The gradient of sigmoid itself, s * (1 - s), has no precision where the sink gets a small part.
    part = outer.method("to", outer.function(torch.exp, outer.function(logsigmoid, over_sink)), dtype)
    return outer.method("to", outer.function(operator.mul, out, part), dtype_of(out))
