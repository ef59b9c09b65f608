"""Recognise whether a matmul is the last one of an mLSTM in its plain form (mlstm/op.py has the formulas).

``find`` walks backwards from ``C @ v`` over Dynamo's graph. Every step recognises one line of the formula. It accepts
different spellings: method or function, views, the order of factors, and where the scale and the division stand. Once there
is a product of scores and a stabilised exponential, the code may be meant as an mLSTM. From there on, a part that does not
fit raises ``NotMLSTM`` with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..core.fx import requires_grad, shape_of, value_of
from ..core.outside import Outside
from ..core.terms import (
    Term,
    arg,
    binary,
    is_along_last,
    is_one,
    is_tensor,
    maximum_of,
    number,
    op,
    terms,
    view_of,
    views_of,
    whole,
)
from ..torch_api.config import asserts_in_kernels
from ..torch_api.graph import buffer_value


class NotMLSTM(Exception):
    """Code that looks like an mLSTM is not one. The text says which part does not fit."""


@dataclass(frozen=True)
class Gate:
    """A gate: its tensor, and ``order``, the dims of that for batch, head and position, and then those of size one.

    A Linear layer gives [B, S, N], whose order is (0, 2, 1).
    """

    tensor: Node
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes of the tensor in this order."""
        sizes = shape_of(self.tensor)
        return tuple(sizes[d] for d in self.order)


@dataclass(frozen=True)
class Mask:
    """A buffer of a module that is a causal mask now. negated: whether it is True where s > t, and not where s <= t."""

    buffer: Node
    negated: bool


@dataclass
class Cell:
    """The operands of the op, and ``inside``, the nodes of the plain form that hold S x S numbers or one number per row.

    masks: what must still be a causal mask whenever the cell runs.
    """

    query: Node
    key: Node
    value: Node
    input_gate: Gate
    forget_gate: Gate
    scale: float
    eps: float
    inside: set[Node] = field(default_factory=set)
    masks: tuple[Mask, ...] = ()


def find(product: Node) -> Cell | None:
    """The cell whose h is computed by ``product`` (a matmul, or its quotient). It is None if this is no mLSTM.

    Raises NotMLSTM if it looks like an mLSTM but is not one.
    """
    inside: set[Node] = set()
    combined, value, normaliser = _parts(product, inside)
    if combined is None:
        return None
    scores, weights = _factors(combined)
    if weights is None:
        return None
    inside |= {combined, scores, weights}
    log_weights, row_max = _stabilised(_operand(weights), inside)
    if log_weights is None:
        return None
    masks: list[Mask] = []
    input_gate, forget_gate = _gates(log_weights, inside, masks)
    eps = _normaliser(normaliser, combined, row_max, inside)
    query, key, scale = _scores(scores, inside)
    return Cell(query, key, value, input_gate, forget_gate, scale, eps, inside, tuple(masks))


def _uncast(node: Any, inside: set[Node]) -> Any:
    while (
        op(node) in ("to", "type", "type_as", "float", "bfloat16", "half")
        and is_tensor(node.args[0])
        and value_of(node).is_floating_point()
    ):
        inside.add(node)
        node = node.args[0]
    return node


def _parts(product: Node, inside: set[Node]) -> tuple[Node | None, Any, Any]:
    """C, v and the normaliser of ``(C / n) @ v`` or ``(C @ v) / n``."""
    if binary(product, "matmul") and binary(quotient := _uncast(product.args[0], inside), "div"):
        inside.add(quotient)
        return quotient.args[0], product.args[1], quotient.args[1]
    if binary(product, "div") and binary(product.args[0], "matmul") and is_tensor(product.args[1]):
        inside.add(product.args[0])
        return _uncast(product.args[0].args[0], inside), product.args[0].args[1], product.args[1]
    return None, None, None


def _factors(combined: Any) -> tuple[Any, Any]:
    """The scores and the exponential of ``C = scores * exp(...)``."""
    if not binary(combined, "mul"):
        return None, None
    exponential = [a for a in combined.args if op(a) == "exp"]
    if len(exponential) != 1:
        return None, None
    (scores,) = (a for a in combined.args if a is not exponential[0])
    return scores, exponential[0]


def _stabilised(difference: Node, inside: set[Node]) -> tuple[Any, Any]:
    """D, and the node of its row maximum, in ``D - max(D, -1, keepdim=True)``."""
    if not binary(difference, "sub"):
        return None, None
    log_weights, row_max = difference.args
    found = maximum_of(view_of(row_max).base) if is_tensor(row_max) else None
    if found is None or arg(found[0], 0, "input") is not log_weights:
        return None, None
    if not is_along_last(found[0]) or not _is_column(row_max, log_weights):
        raise NotMLSTM("the maximum is not taken over the keys")
    inside |= {difference, log_weights, row_max, *found[1]}
    return log_weights, row_max


def _gates(log_weights: Node, inside: set[Node], masks: list[Mask]) -> tuple[Gate, Gate]:
    """i and f in ``D_ts = F_t - F_s + i_s``, which is masked where s > t. Adds the buffers that mask it to ``masks``."""
    rank = len(shape_of(log_weights))
    masked = []

    def visit(node: Node) -> list[Term] | None:
        if len(shape_of(node)) == rank and not any(is_one(size) for size in shape_of(node)[-2:]):
            inside.add(node)
        kept = _masked_sum(node, masks)
        if kept is None:
            return None
        masked.append(node)
        # The mask is a term too, so that it is known whether it is moved after it was applied.
        return [*terms(kept, visit), whole(node)]

    found = terms(log_weights, visit)
    for term in found:
        if term.base in masked and (term.dims[-2:] != whole(term.base).dims[-2:] or any(term.starts) or term.sign != 1):
            raise NotMLSTM("the mask of the exponent is moved after it was applied")
    parts = [term for term in found if term.base not in masked]
    decays = [t for t in parts if op(t.base) == "cumsum"]
    rest = [t for t in parts if t not in decays]
    if not decays:
        raise NotMLSTM("there is no cumulative sum of the forget gates in the exponent")
    if not masked:
        raise NotMLSTM("the exponent is not masked by a causal mask")
    if len(decays) != 2 or len(rest) != 1 or decays[0].base is not decays[1].base:
        raise NotMLSTM(f"the exponent has {len(parts)} terms that are not F_t - F_s + i_s")
    along = {_direction(t): t for t in decays}
    signs = {direction: t.sign for direction, t in along.items()}
    if signs != {"row": 1, "column": -1} or _direction(rest[0]) != "column" or rest[0].sign != 1:
        raise NotMLSTM("the terms of the exponent are not F_t - F_s + i_s")
    orders = [_order(along["row"], -2), _order(along["column"], -1)]
    if orders[0] != orders[1]:
        raise NotMLSTM("the two cumulative sums of the exponent are not of the same forget gates")
    return Gate(rest[0].base, _order(rest[0], -1)), Gate(_forget_gate(along["row"]), orders[0])


def _is_column(node: Node, matrix: Node) -> bool:
    """Whether ``node`` holds one number for every row of ``matrix``: [..., S, 1] of the same rank."""
    return len(shape_of(node)) == len(shape_of(matrix)) and is_one(shape_of(node)[-1])


def _direction(term: Term) -> str:
    """Whether a term lies along the rows or the columns of the matrix: "row", "column" or "neither"."""
    if any(term.starts):
        raise NotMLSTM("a gate's positions are shifted")
    row, column = (d is not None for d in term.dims[-2:])
    return {(True, False): "row", (False, True): "column"}.get((row, column), "neither")


def _order(term: Term, position: int) -> tuple[int, ...]:
    """The dims of a term's base for batch, head and position (that dim of the matrix), and then those of size one."""
    named = [d for d in (*term.dims[:-2], term.dims[position]) if d is not None]
    rest = [d for d in range(len(shape_of(term.base))) if d not in named]
    if len(set(named)) < len(named) or not all(is_one(shape_of(term.base)[d]) for d in rest):
        raise NotMLSTM("a gate has dims that are not those of the scores")
    return (*named, *rest)


def _masked_sum(node: Node, masks: list[Mask]) -> Node | None:
    """The tensor that ``node`` contains where s <= t, if ``node`` is -inf elsewhere; None if ``node`` is not masked."""
    if op(node) == "where":
        (condition, kept, filler), negated = _operands(node, "condition", "input", "other"), False
    elif op(node) == "masked_fill":
        (kept, condition, filler), negated = _operands(node, "input", "mask", "value"), True
    else:
        return None
    if not is_tensor(kept) or not _is_minus_infinity(filler):
        return None
    if not _is_causal(condition, negated, masks):
        raise NotMLSTM("the mask of the exponent is not the lower triangle, or is neither built here nor a module's buffer")
    return kept


def _operand(node: Node) -> Any:
    """The first operand of an op, also if it is passed by its name."""
    return arg(node, 0, "input")


def _operands(node: Node, *names: str) -> tuple[Any, ...]:
    return tuple(arg(node, i, name) for i, name in enumerate(names))


def _is_minus_infinity(x: Any) -> bool:
    if isinstance(x, (int, float)):
        return x == -math.inf
    if op(x) in ("tensor", "full", "new_full"):
        return _is_minus_infinity(arg(x, 0, "data") if op(x) == "tensor" else x.args[-1])
    return op(x) == "neg" and _operand(x) == math.inf


def _is_causal(condition: Any, negated: bool, masks: list[Mask]) -> bool:
    """Whether ``condition`` (or its negation) is true exactly where s <= t. A buffer of which that is true goes to masks."""
    if not is_tensor(condition):
        return False
    view = view_of(condition)
    node, rank = view.base, len(shape_of(condition))
    last = len(shape_of(node)) - 1
    if view.dims[-2:] != (last - 1, last) or any(d is not None for d in view.dims[:-2]) or any(view.starts):
        return False
    if op(node) == "not" and value_of(node).dtype is torch.bool:
        return _is_causal(_operand(node), not negated, masks)
    if op(node) in ("bool", "to", "type"):
        return _is_causal(_operand(node), negated, masks)
    held = buffer_value(node)
    if held is not None and asserts_in_kernels() and _holds_causal_mask(held, negated):
        masks.append(Mask(node, negated))
        return True
    if any(is_one(size) for size in shape_of(node)[-2:]) and op(node) in ("tril", "triu"):
        return False
    if op(node) in ("tril", "triu"):
        diagonal = arg(node, 1, "diagonal", 0)
        ones = op(_operand(node)) in ("ones", "ones_like", "new_ones")
        return ones and ((op(node), diagonal) == ("triu", 1) if negated else (op(node), diagonal) == ("tril", 0))
    return rank >= 2 and _compares_positions(node, negated)


def _holds_causal_mask(held: torch.Tensor, negated: bool) -> bool:
    square = held.dim() >= 2 and held.shape[-1] == held.shape[-2]
    return square and held.dtype is torch.bool and torch.equal(held, causal(held, negated))


def causal(like: torch.Tensor, negated: bool) -> torch.Tensor:
    """The causal mask with the shape of ``like`` [..., S, S]: True where s <= t, or where s > t if it is negated."""
    ones = torch.ones_like(like)
    return ones.triu(1) if negated else ones.tril()


def _compares_positions(node: Node, negated: bool) -> bool:
    if op(node) not in ("ge", "le", "gt", "lt") or not all(is_tensor(a) for a in node.args):
        return False
    views = [view_of(a) for a in node.args]
    if any(op(v.base) != "arange" or any(v.starts) or not _counts_from_zero(v.base) for v in views):
        return False
    rank = len(shape_of(node))
    lies = ["row" if len(v.dims) == rank and v.dims[-2] is not None else "column" for v in views]
    kept = {("ge", "row", "column"), ("le", "column", "row")}
    dropped = {("lt", "row", "column"), ("gt", "column", "row")}
    return (op(node), *lies) in (dropped if negated else kept)


def _counts_from_zero(arange: Node) -> bool:
    return len(arange.args) == 1 and not {"start", "end", "step"} & set(arange.kwargs)


def _forget_gate(decay: Term) -> Node:
    """f in ``cumsum(logsigmoid(f))``, a sum over the positions, which are the rows of the matrix."""
    inner, dim = arg(decay.base, 0, "input"), arg(decay.base, 1, "dim")
    if dim % len(shape_of(decay.base)) != decay.dims[-2]:
        raise NotMLSTM("the cumulative sum is not taken over the positions")
    if not value_of(decay.base).is_floating_point():
        raise NotMLSTM("the cumulative sum is of integers")
    while op(inner) in ("float", "double", "to", "contiguous") and value_of(inner).is_floating_point():
        inner = _operand(inner)
    if op(inner) != "logsigmoid":
        raise NotMLSTM("the cumulative sum is not over logsigmoid of the forget gate")
    gate = _operand(inner)
    while op(gate) in ("float", "double") and value_of(_operand(gate)).is_floating_point():
        gate = _operand(gate)
    return gate


def _normaliser(node: Any, combined: Node, row_max: Node, inside: set[Node]) -> float:
    """eps in ``max(|sum C|, exp(-m)) + eps``."""
    eps = 0.0
    inside.add(node)
    if not is_tensor(node) or not _is_column(node, combined):
        raise NotMLSTM("the normaliser is not one number per row, [..., S, 1]")
    if binary(node, "add"):
        numbers = [number(a) for a in node.args if not is_tensor(a)]
        if len(numbers) != 1 or numbers[0] is None:
            raise NotMLSTM("the normaliser is not max(|sum C|, exp(-m)) + eps")
        eps = numbers[0]
        (node,) = (a for a in node.args if is_tensor(a))
        inside.add(node)
    if op(node) not in ("maximum", "max") or len(node.args) != 2 or not all(is_tensor(a) for a in node.args):
        raise NotMLSTM("the normaliser is not max(|sum C|, exp(-m)) + eps")
    bases = {op(view_of(a).base): view_of(a).base for a in node.args}
    if set(bases) != {"abs", "exp"}:
        raise NotMLSTM("the normaliser is not max(|sum C|, exp(-m)) + eps")
    total, negative = (_rows(_operand(bases[name])) for name in ("abs", "exp"))
    inside |= {*node.args, *bases.values(), _operand(bases["abs"]), total, negative}
    if (
        op(total) != "sum"
        or _operand(total) is not combined
        or arg(total, 1, "dim") not in (-1, [-1], (-1,), len(shape_of(combined)) - 1)
    ):
        raise NotMLSTM("the normaliser does not sum C over the keys")
    if op(negative) != "neg" or _rows(_operand(negative)) is not _rows(row_max):
        raise NotMLSTM("the normaliser's floor is not exp(-m)")
    return eps


def _rows(node: Node) -> Node:
    """The base of a view [B, N, S, 1] that has one number per row, and that moves no dim."""
    view = view_of(node)
    if any(d not in (None, at) for at, d in enumerate(view.dims)) or any(view.starts):
        raise NotMLSTM("the numbers of a row are moved before they are used")
    return view.base


def _scores(node: Any, inside: set[Node]) -> tuple[Node, Node, float]:
    """q, k and the scale in ``scale (q @ k^T)``. The scale may be applied to any of the factors."""
    product, scale = _unscaled(node, inside)
    if op(product) != "matmul":
        raise NotMLSTM("the scores are not a product of queries and keys")
    inside.add(product)
    outside = Outside(product.graph) if requires_grad(product) else None
    query, of_query = _unscaled(product.args[0], set(), outside)
    flipped, of_flipped = _unscaled(product.args[1], set(), outside)
    # The keys may be views themselves, as where heads are moved in front of time. Only the last transposition is of keys.
    keys = next((view.base for view in views_of(flipped) if _is_transposed(view)), None)
    if keys is None:
        raise NotMLSTM("the scores are not a product of queries and transposed keys")
    key, of_key = _unscaled(keys, set(), outside)
    return query, key, scale * of_query * of_flipped * of_key


def _is_transposed(view: Term) -> bool:
    """Whether a view is its base with the last two dims exchanged."""
    straight = whole(view.base).dims
    return view.dims == (*straight[:-2], straight[-1], straight[-2]) and not any(view.starts)


def _unscaled(node: Any, inside: set[Node], outside: Outside | None = None) -> tuple[Any, float]:
    """``node`` without its factors that are Python numbers, and the product of these factors.

    outside: memory that can be changed before the backward. What is scaled there is a copy, and remains one.
    """
    scale = 1.0
    while binary(node, "mul") or binary(node, "div"):
        factors = [a for a in node.args if is_tensor(a)]
        numbers = [number(a) for a in node.args if not is_tensor(a)]
        if len(factors) != 1 or numbers[0] is None or (op(node) == "div" and factors[0] is not node.args[0]):
            break
        if outside is not None and outside.has(factors[0]):
            break
        scale = scale * numbers[0] if op(node) == "mul" else scale / numbers[0]
        inside.add(node)
        node = factors[0]
    return node, scale
