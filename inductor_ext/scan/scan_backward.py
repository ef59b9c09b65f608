"""The gradient of a scan as one op, in which the vector-Jacobian product of the combine_fn is computed where it is used.

The reverse scan over k x k Jacobians of ``scan.py`` reads and multiplies matrices. Here each channel carries the k numbers
lambda:

    lambda_t = g_t + carry,          (carry, dx_t) = (dc/dy, dc/dx)^T lambda_t  at (y_{t-1}, x_t),          dx_0 = lambda_0

Leaves that interact are computed time after time. Where no leaf interacts with another, the carry of each is lambda times a
coefficient, so that a tile of times is scanned at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..core import channels
from ..core.sources import function_of, source_of
from ..torch_api.graph import pytree
from ..torch_api.tracing import trace_apart

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: A tile of times of more leaves has no room in registers.
MOST_APART = 4


@dataclass(frozen=True)
class Product:
    """The vector-Jacobian product of a combine_fn of k leaves, as an operand of an op: the source of a function.

    The function takes y of the leaves ``read``, all k leaves x, and lambda of the leaves ``reached``. It returns the next
    carry of the leaves ``carried``, and then dx of the leaves ``driven``. The other carries and gradients are zero. apart:
    whether no leaf interacts with another.
    """

    source: str
    read: tuple[int, ...]
    reached: tuple[int, ...]
    carried: tuple[int, ...]
    driven: tuple[int, ...]
    apart: bool


def product(combine: Callable[..., Any], count: int, reached: Sequence[int], apart: bool) -> Product | None:
    """The vector-Jacobian product of ``combine`` on ``count`` fp32 leaves; ``reached`` are the leaves that have a lambda.

    apart: whether no leaf interacts with another. It is None if the graph of ``combine`` contains tensors of its own, or if
    leaves are apart and their coefficients are operands, as in a gated recurrence.
    """
    found: list[tuple[int, ...]] = []

    def gradients(*flat: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in flat[: 2 * count]]
            after = pytree.tree_leaves(combine(*leaves))
            weighted = zip(reached, flat[2 * count :], strict=True)
            outputs, weights = zip(*((after[i], weight) for i, weight in weighted if after[i].requires_grad), strict=True)
            parts = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
        halves = parts[:count], parts[count:]
        found[:] = [tuple(i for i, part in enumerate(half) if part is not None) for half in halves]
        return [part for part in parts if part is not None]

    module = trace_apart(gradients, [torch.float32] * (2 * count + len(reached)))
    if module.graph.find_nodes(op="get_attr") or (apart and _reads_coefficients(module, len(found[0]))):
        return None
    befores = module.graph.find_nodes(op="placeholder")[:count]
    read = tuple(i for i, node in enumerate(befores) if node.users)
    for node in befores:
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return Product(source_of(module), read, tuple(reached), *found, apart)


def _reads_coefficients(module: GraphModule, carried: int) -> bool:
    """Whether the first ``carried`` results of the graph are the product of two operands, or an operand."""

    def operand(node: Node) -> bool:
        while node.target in (aten.detach.default, aten.alias.default):
            node = node.args[0]
        return node.op == "placeholder"

    (results,) = module.graph.output_node().args
    return all(operand(x) or (x.target is aten.mul.Tensor and all(map(operand, x.args))) for x in results[:carried])


@torch.library.custom_op("gradfuse::scan_backward", mutates_args=())
def scan_backward(
    ys: list[Tensor],
    xs: list[Tensor],
    grads: list[Tensor],
    given: list[int],
    source: str,
    reached: list[int],
    carried: list[int],
    driven: list[int],
    apart: bool,
    reverse: bool,
) -> list[Tensor]:
    """The gradients of the leaves ``xs`` of a scan, from ``grads``, the gradients of the leaves ``given`` of its result.

    xs, ys, grads: [P, T, L], of floating dtypes. ys: the leaves of the result that the function reads. source,
    reached, carried, driven, apart: see ``Product``. reverse: whether the scan ran from the end. The gradients are computed
    in fp32 and rounded to the dtypes of ``xs``; they have the memory order of ``xs``.
    """
    vjp = function_of(source, xs[0].device)
    out = [torch.zeros_like(x) for x in xs]
    carry: dict[int, Tensor] = {}
    times = range(xs[0].shape[1])
    order = list(times) if reverse else list(reversed(times))
    for t, before in itertools.zip_longest(order, order[1:]):
        now = {i: g[:, t].float() for i, g in zip(given, grads, strict=True)}
        weights = {i: now.get(i, 0) + carry.get(i, torch.zeros_like(xs[i][:, t], dtype=torch.float32)) for i in reached}
        if before is None:
            for i, weight in weights.items():
                out[i][:, t] = weight
            break
        results = vjp(*(y[:, before].float() for y in ys), *(x[:, t].float() for x in xs), *weights.values())
        carry = dict(zip(carried, results, strict=False))
        for i, result in zip(driven, results[len(carried) :], strict=True):
            out[i][:, t] = result
    return out


@scan_backward.register_fake
def _(ys: list[Tensor], xs: list[Tensor], *_rest: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


def supported(xs: Sequence[Tensor]) -> bool:
    """Whether the op's kernels should differentiate a scan of ``xs`` [T, ...] along dim 0.

    They should not for a scan along the innermost dim: there one thread would read neighbours in memory one after the other.
    """
    return channels.runs_kernels(xs[0]) and all(x.dtype in DTYPES for x in xs) and channels.enough_channels(xs)


def gradients(
    found: Product, ys: Sequence[Tensor], xs: Sequence[Tensor], grads: Sequence[Tensor | None], reverse: bool
) -> list[Tensor]:
    """The gradients of ``xs`` [T, ...], computed by the op from ``grads``, the gradients of ``ys``.

    ys: the scan of ``xs``, which ran from the end if ``reverse``. A gradient in ``grads`` is None if there is none.
    """
    split = channels.innermost(xs)
    given = [i for i, g in enumerate(grads) if g is not None]
    operands = ([ys[i] for i in found.read], xs, [grads[i] for i in given])
    flat = ([channels.slices(x, split) for x in tensors] for tensors in operands)
    leaves = (list(which) for which in (found.reached, found.carried, found.driven))
    results = scan_backward(*flat, given, found.source, *leaves, found.apart, reverse)
    return [result.transpose(0, 1).reshape(x.shape) for result, x in zip(results, xs, strict=True)]
