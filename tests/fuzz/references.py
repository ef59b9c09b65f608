"""Replacements for flex_attention and associative_scan in the reference, and for sums in half precision."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)


#: The largest absolute score of each attention that the references computed since the list was cleared.
largest_score: list[float] = []


class _Attend(torch.autograd.Function):
    """softmax(scores) @ value and the logsumexp, with the roundings of a flash kernel: see ``Case.rounded_once``.

    The backward is that of PyTorch's flex_attention in eager mode too: the probabilities from the logsumexp, and the sum
    over keys from the output. Where contributions cancel, it rounds worse than the backward of softmax does.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, hidden: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(scores, -1).masked_fill(hidden, 0.0)
        out = (probabilities.to(dtype).to(value.dtype) @ value).to(dtype)
        logsumexp = torch.logsumexp(scores, -1)
        ctx.save_for_backward(scores, logsumexp, hidden, value, out)
        return out, logsumexp.masked_fill(hidden[..., 0], -math.inf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, logsumexp_grad: Tensor | None) -> tuple[Tensor, None, Tensor, None]:
        scores, logsumexp, hidden, value, out = ctx.saved_tensors
        probabilities = (scores - logsumexp[..., None]).exp().masked_fill(hidden, 0.0)
        work = value.dtype
        delta = (out.to(work) * grad.to(work)).sum(-1, keepdim=True)
        if logsumexp_grad is not None:
            delta = delta - logsumexp_grad[..., None]
        scores_grad = probabilities * (grad.to(work) @ value.mT - delta)
        return scores_grad, None, probabilities.to(out.dtype).to(work).mT @ grad.to(work), None


class _RoundBackward(torch.autograd.Function):
    """Return a value unchanged, and round its gradient to half precision, because a matmul of the backward reads it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype).to(grad.dtype), None


class _Mask:
    """The block_mask of the dense reference."""

    def __init__(self, mask_mod: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
        self.mask_mod = mask_mod


class _IndexByTensors(TorchFunctionMode):
    """``table[b, 3, k]`` of 0-d tensors as an index op, which vmap understands (getitem would ask for their values)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, operator.getitem):
            table, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in indices) and all(isinstance(i, (int, Tensor)) for i in indices):
                tensors = [i.long() if isinstance(i, Tensor) else torch.tensor(i, device=table.device) for i in indices]
                return aten.index.Tensor(table, tensors)
        return func(*args, **(kwargs or {}))


def _over_grid(function: Callable[..., Tensor], score: Tensor | None, sizes: tuple[int, ...], device: Any) -> Tensor:
    """A score_mod or mask_mod, written for scalars, at every (b, h, q, k)."""
    prefix = (0,) if score is not None else ()
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(*prefix, *axes))
    positions = [torch.arange(n, device=device, dtype=torch.int32) for n in sizes]
    with _IndexByTensors():
        return function(*([score] if score is not None else []), *positions)


def dense_attention(operand_dtype: torch.dtype) -> Callable[..., Any]:
    """flex_attention as dense math in float32 or float64. Operands of matmuls are rounded to ``operand_dtype``."""

    def flex_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        **_: Any,
    ) -> Any:
        half = operand_dtype in HALF
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1).expand(query.shape[0], -1, -1, -1) for x in (key, value))
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if half:
            scores = _RoundBackward.apply(scores, operand_dtype)
        sizes = tuple(scores.shape)
        if score_mod is not None:
            # A score_mod may change its score in place.
            scores = _over_grid(score_mod, scores.clone(), sizes, query.device)
        scores = scores.expand(sizes)
        largest_score.append(float(scores.detach().masked_fill(scores.isinf(), 0.0).abs().amax()) if scores.numel() else 0.0)
        if block_mask is not None:
            allowed = _over_grid(block_mask.mask_mod, None, sizes, query.device)
            scores = scores.masked_fill(~allowed, -math.inf)
        hidden = scores.isneginf().all(-1, keepdim=True)
        scores = scores.masked_fill(hidden, 0.0)
        if operand_dtype is not torch.float64:
            out, logsumexp = _Attend.apply(scores, hidden, value, operand_dtype)
            return (out, logsumexp) if return_lse else out
        logsumexp = torch.logsumexp(scores, -1).masked_fill(hidden[..., 0], -math.inf)
        probabilities = torch.softmax(scores, -1).masked_fill(hidden, 0.0)
        out = probabilities @ value
        return (out, logsumexp) if return_lse else out

    return flex_attention


def looped_scan(
    combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """associative_scan as a plain loop."""
    leaves, spec = tree_flatten(xs)
    rows = [[y.squeeze(dim) for y in x.split(1, dim)] for x in leaves]
    steps = [tree_unflatten([r[t] for r in rows], spec) for t in range(len(rows[0]))]
    steps = steps[::-1] if reverse else steps
    results = [steps[0]]
    for step in steps[1:]:
        results.append(combine_fn(results[-1], step))
    results = results[::-1] if reverse else results
    columns = [tree_flatten(r)[0] for r in results]
    return tree_unflatten([torch.stack(column, dim) for column in zip(*columns, strict=True)], spec)


def pointwise_on_cpu(
    combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """associative_scan. For CPU tensors, which it refuses in pointwise mode, the same steps are done here."""
    if combine_mode != "pointwise":
        return _associative_scan(combine_fn, xs, dim, reverse=reverse, combine_mode=combine_mode)
    leaves, spec = tree_flatten(xs)
    count = len(leaves)
    views = [x.movedim(dim, 0) for x in leaves]
    views = [x.flip(0) for x in views] if reverse else views

    def combine(*flat: Tensor) -> list[Tensor]:
        left, right = tree_unflatten(list(flat[:count]), spec), tree_unflatten(list(flat[count:]), spec)
        return tree_flatten(combine_fn(left, right))[0]

    ys = _scan_hop(combine, views, ())
    return tree_unflatten([(y.flip(0) if reverse else y).movedim(0, dim) for y in ys], spec)


def _imports() -> tuple[Any, Any]:
    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan, torch.ops.higher_order.associative_scan


_associative_scan, _scan_hop = _imports()


def replacements(dtype: torch.dtype) -> dict[str, Any]:
    """The functions that replace the real ones in the reference and the emulation."""
    return {"flex_attention": dense_attention(dtype), "create_block_mask": _Mask, "associative_scan": looped_scan}


def compiled_replacements(device: str) -> dict[str, Any]:
    """The functions that a compiled program needs replaced: pointwise scans of CPU tensors."""
    return {"associative_scan": pointwise_on_cpu} if device == "cpu" else {}


class SumsInFloat32(TorchDispatchMode):
    """Every sum in half precision is accumulated in fp32 and rounded once, because it is one operation of the program."""

    SUMS = {
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten._unsafe_index_put.default,
        aten.index_add.default,
        aten.index_add_.default,
        aten.scatter_add.default,
        aten.scatter_add_.default,
        aten.scatter_reduce.two,
        aten.scatter_reduce_.two,
        aten.embedding_dense_backward.default,
        aten.sum.dim_IntList,
        aten.sum.default,
        aten.mean.dim,
        aten.cumsum.default,
        aten.mm.default,
        aten.bmm.default,
    }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.SUMS or not isinstance(args[0], Tensor) or args[0].dtype not in HALF:
            return func(*args, **kwargs)
        dtype = args[0].dtype
        wide = tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in HALF else x, (args, kwargs))
        result = func(*wide[0], **wide[1])
        if func._schema.is_mutable:
            return args[0].copy_(result)
        wanted = kwargs.get("dtype") or dtype
        return result.to(wanted)


class RecordLogits(TorchFunctionMode):
    """Record in ``largest_score`` how large the numbers are that a kernel rounds for the logits of a softmax.

    These are the logit and its product with log2(e), and the logsumexp in base 2 and, beside a sink, in base e. Masked
    logits do not count.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "softmax":
            self._record(args[0])
        elif name == "scaled_dot_product_attention":
            query, key = args[:2]
            scale = kwargs.get("scale") or query.shape[-1] ** -0.5
            self._record(query @ key.mT * scale + kwargs["attn_mask"])
        return function(*args, **kwargs)

    def _record(self, logits: Tensor) -> None:
        visible = logits.detach().masked_fill(logits.detach() < -1e3, -math.inf)
        sizes = (visible, visible.logsumexp(-1))
        largest_score.append(sum(2 * float(x.masked_fill(x.isinf(), 0.0).abs().amax()) for x in sizes))
