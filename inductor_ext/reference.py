"""Run a Dynamo graph eagerly, as it was written, in a wider dtype. ``verify`` compares with the results.

Every floating-point result is widened to float64, so casts to half precision do not round. flex_attention is computed as
dense math, one head at a time, and associative_scan by the textbook recursion. Ordinary autograd differentiates both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.utils.checkpoint import checkpoint

from .core.fx import working_dtype
from .core.purity import is_random
from .torch_api.frontend import scalar_indexing
from .torch_api.graph import HigherOrderOperator, pytree
from .torch_api.higher_order import associative_scan_hop, flex_attention_hop


class Reference(Interpreter):
    """Runs a Dynamo graph and the graphs in it.

    dtype: the dtype to which floating-point results are widened. If it is None, they are not widened.
    """

    def __init__(self, module: GraphModule, dtype: torch.dtype | None) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.dtype = dtype

    def run_node(self, node: torch.fx.Node) -> Any:
        """Run one node and widen its result."""
        return pytree.tree_map(self._widened, super().run_node(node))

    def _widened(self, value: Any) -> Any:
        narrow = isinstance(value, Tensor) and value.is_floating_point() and self.dtype is not None
        return value.to(self.dtype) if narrow and value.dtype != self.dtype else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call. The graphs that are arguments of an op run in a ``Reference`` too."""
        if target is flex_attention_hop:
            return _attention(*args, **kwargs)
        if target is associative_scan_hop:
            return _scan(*args, **kwargs)
        if getattr(target, "__name__", "") in ("_enter_autocast", "_exit_autocast") and self.dtype is not None:
            return None
        bodies = [a for a in args if isinstance(a, GraphModule)]
        if isinstance(target, HigherOrderOperator) and len(bodies) == 1 and called_once(target):
            inputs = args[args.index(bodies[0]) + 1 :]
            inputs = inputs[1:] if inputs and isinstance(inputs[0], str) else inputs
            return Reference(bodies[0], self.dtype).run(*inputs)
        return super().call_function(target, args, kwargs)


def called_once(target: Any) -> bool:
    """Return whether an op only calls its graph, once, on the operands that follow it (a checkpoint, a region)."""
    return target.name() in (
        "tag_activation_checkpoint",
        "wrap_activation_checkpoint",
        "wrap",
        "invoke_subgraph",
        "checkpoint",
    )


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: dict[str, Any],
    score_captured: Sequence[Any] = (),
    mask_captured: Sequence[Any] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``flex_attention`` as dense math: the output, and the logsumexp and the maximum in base 2."""
    work = working_dtype(query.dtype)
    mask_mod, group = block_mask[-1], query.shape[1] // key.shape[1]
    rows, columns = (torch.arange(x.shape[2], device=query.device, dtype=torch.int32) for x in (query, key))

    def over_pairs(function: Callable[..., Tensor], scores: Tensor | None, b: Tensor, h: Tensor, captured: Any) -> Tensor:
        first = () if scores is None else (0,)
        along = (*first, None, None), (*[None] * len(captured),)
        inner = torch.vmap(function, in_dims=(*along[0], None, 0, *along[1]))
        both = torch.vmap(inner, in_dims=(*along[0], 0, None, *along[1]))
        with scalar_indexing():
            return both(*(() if scores is None else (scores,)), b, h, rows, columns, *captured)

    def head(q: Tensor, k: Tensor, v: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raw = (q @ k.mT).to(work) * scale
        scores = over_pairs(score_mod, raw, b, h, score_captured).expand(raw.shape).to(work)
        shown = over_pairs(mask_mod, None, b, h, mask_captured).expand(raw.shape)
        scores = torch.where(shown, scores, -math.inf)
        some = shown.any(-1, keepdim=True)
        probs = torch.where(some, torch.softmax(torch.where(some, scores, 0.0), -1), 0.0)
        return (probs.to(q.dtype) @ v, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2))

    outs = []
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            kb, kh = b % key.shape[0], h // group
            index = [torch.tensor(i, dtype=torch.int32, device=query.device) for i in (b, h)]
            outs.append(checkpoint(head, query[b, h], key[kb, kh], value[kb, kh], *index, use_reentrant=False))
    shape = query.shape[:2]
    out, logsumexp, top = (torch.stack(x).unflatten(0, shape) for x in zip(*outs, strict=True))
    return out, logsumexp, top


def _scan(combine: Callable[..., Any], xs: Sequence[Tensor], additional: Sequence[Any] = ()) -> Sequence[Tensor]:
    """Compute ``associative_scan`` along dim 0: y[t] = combine(y[t - d], y[t]) for d = 1, 2, 4..."""
    ys, distance = list(xs), 1
    while distance < xs[0].shape[0]:
        later = torch.vmap(lambda *pair: tuple(pytree.tree_leaves(combine(*pair, *additional))))(
            *(y[:-distance] for y in ys), *(y[distance:] for y in ys)
        )
        ys = [torch.cat([y[:distance], new.to(y.dtype)]) for y, new in zip(ys, later, strict=True)]
        distance *= 2
    return ys


def draws_random_numbers(gm: GraphModule) -> bool:
    """Return whether a graph, or a graph in it, draws random numbers."""
    return any(is_random(node) for module in gm.modules() if isinstance(module, GraphModule) for node in module.graph.nodes)


def readable(name: str) -> str:
    """Return the user's name of an input of Dynamo's graph.

    For example, ``L_self_modules_attn_parameters_bias_`` is ``self.attn.bias``.
    """
    text = name.removeprefix("l_").removeprefix("L_").rstrip("_")
    for word in ("_modules_", "_parameters_", "_buffers_"):
        text = text.replace(word, ".")
    return text
