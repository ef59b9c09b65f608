"""A score that is multiplied with, or divided by, one number for a row or a column: ``s * t[h]``, ``s / t[h, q] + bias``.

The forward kernel scales the products of queries and keys before the score_mod. If the factor takes the scale instead, that
is one multiplication for a row and not for each score, and a quotient becomes a product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..core.fx import cone, dtype_of
from .bounds import call
from .score_mod import ScoreMod, output_nodes, returning

aten = torch.ops.aten


def with_scale(module: GraphModule, scale: float) -> GraphModule | None:
    """Return a copy of a score_mod that takes products which are not scaled yet, or None if the score has no such factor."""
    copy = returning(module, output_nodes(module.graph))
    inputs = ScoreMod.of(copy.graph)
    product = _product(inputs)
    if product is None:
        return None
    with copy.graph.inserting_before(product):
        product.args = (inputs.score, _times(scale, product, inputs.score))
    product.target = aten.mul.Tensor
    copy.recompile()
    return copy


def _product(inputs: ScoreMod) -> Node | None:
    """The product or quotient that is the only user of the score, if the other operand is not one for each pair."""
    user, *others = inputs.score.users or (None,)
    if others or user is None or user.target not in (aten.mul.Tensor, aten.div.Tensor) or user.kwargs:
        return None
    if user.target is aten.div.Tensor and user.args[0] is not inputs.score:
        return None
    factor = _other(user, inputs.score)
    if not isinstance(factor, Node):
        return user
    # A product with a float64 factor is in float64, whose range is larger.
    for_pairs = {inputs.q, inputs.k} <= set(cone(factor))
    return None if for_pairs or inputs.score in cone(factor) or dtype_of(factor) is torch.float64 else user


def _other(product: Node, score: Node) -> Any:
    first, second = product.args
    return second if first is score else first


def _times(number: float, product: Node, score: Node) -> Any:
    """Insert the factor of the score, times a number. It is computed in fp32, like the product."""
    factor, divides = _other(product, score), product.target is aten.div.Tensor
    if not isinstance(factor, Node):
        return number / factor if divides else number * factor
    convert = torch.ops.prims.convert_element_type.default
    factor = call(product.graph, convert, factor, torch.float32, like=factor, dtype=torch.float32)
    if divides:
        factor = call(product.graph, aten.reciprocal.default, factor, like=factor)
    return call(product.graph, aten.mul.Tensor, factor, number, like=factor)
