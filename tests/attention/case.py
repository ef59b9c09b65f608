"""One attention with captured tensors: inputs, the user's score_mod, the same as dense math, and the comparison.

``Case.check`` compiles with gradfuse, runs forward and backward, and compares the output and every gradient with float64
autograd of the dense formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

#: Relative Frobenius error against float64 in fp32 and fp64; half precision is held to the eager formula's error.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
#: How much worse than the eager formula, accumulated in fp32 and rounded once, half precision may be.
SLACK = 1.2


def relative_error(got: Tensor, want: Tensor) -> float:
    """The relative Frobenius error. It fails if that is not a number, because ``max([0.0, nan]) < 1e-5`` is true."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    scale = want.norm()
    error = float((got - want).norm() / scale) if scale > 1e-12 else float((got - want).norm())
    assert not math.isnan(error), "the error is not a number"
    return error


@dataclass
class Case:
    """One attention. ``tables`` are the captured tensors (name -> shape, or a function of the generator's device).

    score_mod(tables) returns the user's function; dense(tables) returns ``f(scores, b, h, q, k)`` on broadcast index
    tensors. ``frozen`` tables need no gradient; ``zero`` tables have a gradient that is zero by theory.
    """

    name: str
    tables: dict[str, tuple[int, ...]]
    score_mod: Callable[[dict[str, Tensor]], Callable[..., Tensor]]
    dense: Callable[[dict[str, Tensor]], Callable[..., Tensor]]
    frozen: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    mask: Callable[..., Tensor] | None = None
    batch: int = 2
    heads: int = 2
    kv_heads: int | None = None
    kv_batch: int | None = None
    length: int = 80
    kv_length: int | None = None
    dim: int = 16
    v_dim: int | None = None
    dtype: torch.dtype = torch.float32
    block_size: int = 128
    inputs_need_grad: bool = True
    layout: str = "contiguous"

    def make(self, device: str, seed: int = 0) -> tuple[list[Tensor], dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        kv_heads, kv_batch = self.kv_heads or self.heads, self.kv_batch or self.batch
        kv_length, v_dim = self.kv_length or self.length, self.v_dim or self.dim
        shapes = [
            (self.batch, self.heads, self.length, self.dim),
            (kv_batch, kv_heads, kv_length, self.dim),
            (kv_batch, kv_heads, kv_length, v_dim),
        ]
        if self.layout == "transposed":
            inputs = [draw(b, s, h, d).transpose(1, 2) for b, h, s, d in shapes]
        elif self.layout == "expanded":
            inputs = [draw(b, 1, s, d).expand(b, h, s, d) for b, h, s, d in shapes]
        else:
            inputs = [draw(*s) for s in shapes]
        inputs = [x.detach().requires_grad_(self.inputs_need_grad) for x in inputs]
        tables = {}
        for name, shape in self.tables.items():
            table = draw(*shape, dtype=self.dtypes.get(name, self.dtype))
            tables[name] = table.requires_grad_(name not in self.frozen)
        return inputs, tables

    def block_mask(self, device: str) -> Any:
        if self.mask is None:
            return None
        return create_block_mask(
            self.mask,
            self.batch if self.kv_batch else None,
            None,
            self.length,
            self.kv_length or self.length,
            device=device,
            BLOCK_SIZE=self.block_size,
        )

    def exact(self, inputs: list[Tensor], tables: dict[str, Tensor], grad: Tensor | None) -> list[Tensor]:
        """Output and gradients in float64: q, k, v (if they need one), then every table that needs one."""
        device = inputs[0].device
        exact_inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
        exact_tables = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in tables.items()}
        q, k, v = exact_inputs
        b, h, i, j = (
            torch.arange(n, device=device).reshape([-1 if axis == d else 1 for d in range(4)])
            for axis, n in enumerate((q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
        )
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1).expand(q.shape[0], -1, -1, -1) for x in (k, v))
        scores = self.dense(exact_tables)(q @ k.mT / math.sqrt(q.shape[-1]), b, h, i, j)
        scores = scores.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask(b, h, i, j), -math.inf)
        out = torch.softmax(scores, -1).nan_to_num(0.0) @ v
        if grad is None:
            return [out]
        leaves = [x for x in (*exact_inputs, *exact_tables.values()) if x.requires_grad]
        grads = torch.autograd.grad(out, leaves, grad.double(), allow_unused=True)
        return [out, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]

    def rounded_once(self, inputs: list[Tensor], tables: dict[str, Tensor], grad: Tensor) -> list[Tensor]:
        """The formula in fp32, matmul operands in the inputs' dtype, every result rounded once: as ``exact`` returns them."""
        dtype, device = inputs[0].dtype, inputs[0].device
        work = torch.float64 if dtype == torch.float64 else torch.float32

        def operand(x: Tensor) -> Tensor:
            return x.to(dtype).to(work)

        q, k, v = (x.detach().to(work) for x in inputs)
        group, kv_heads, kv_batch = q.shape[1] // k.shape[1], k.shape[1], k.shape[0]
        k, v = (x.repeat_interleave(group, 1).expand(q.shape[0], -1, -1, -1) for x in (k, v))
        b, h, i, j = (
            torch.arange(n, device=device).reshape([-1 if axis == d else 1 for d in range(4)])
            for axis, n in enumerate((*q.shape[:3], k.shape[2]))
        )
        scale, do = 1 / math.sqrt(q.shape[-1]), grad.to(work)
        raw = (q @ k.mT * scale).requires_grad_()
        leaves = {n: t.detach().to(work).requires_grad_(t.requires_grad) for n, t in tables.items()}
        scores = self.dense(leaves)(raw, b, h, i, j).expand(raw.shape)
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask(b, h, i, j), -math.inf)
        probs = torch.softmax(scores.detach(), -1).nan_to_num(0.0)
        out = (operand(probs) @ v).to(dtype)
        dscores = probs * (do @ v.mT - (out.to(work) * do).sum(-1, keepdim=True))
        learned = [n for n in leaves if leaves[n].requires_grad]
        draw, *dtables = (
            torch.autograd.grad(
                scores, [raw, *(leaves[n] for n in learned)], dscores, allow_unused=True, materialize_grads=True
            )
            if scores.requires_grad
            else [torch.zeros_like(raw), *(torch.zeros_like(leaves[n]) for n in learned)]
        )

        def shared(x: Tensor) -> Tensor:
            x = x.unflatten(1, (kv_heads, group)).sum(2)
            return x if kv_batch == x.shape[0] else x.sum(0, keepdim=True)

        draw = operand(draw * scale)
        grads = [draw @ k, shared(draw.mT @ q), shared(operand(probs).mT @ do)]
        grads = [g.to(dtype) for g, x in zip(grads, inputs, strict=True) if x.requires_grad]
        return [out, *grads, *(g.to(tables[n].dtype) for n, g in zip(learned, dtables, strict=True))]

    def function(self, tables: dict[str, Tensor], device: str, **kwargs: Any) -> Callable[..., Tensor]:
        score_mod, mask = self.score_mod(tables), self.block_mask(device)
        gqa = self.kv_heads is not None

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return flex_attention(query, key, value, score_mod=score_mod, block_mask=mask, enable_gqa=gqa, **kwargs)

        return attention

    def check(
        self, device: str, options: dict[str, Any] | None = None, dynamic: bool | None = None, seeds: int = 1, **kwargs: Any
    ) -> None:
        """Compare with float64. ``seeds``: over how many draws errors are averaged, for gradients of a few elements."""
        inputs, tables = self.make(device)
        function = self.function(tables, device, **kwargs)
        compiled = torch.compile(function, backend="gradfuse", options=options, dynamic=dynamic, fullgraph=True)
        errors: dict[str, list[tuple[float, float]]] = {}
        for seed in range(seeds):
            with torch.no_grad():
                fresh_inputs, fresh_tables = self.make(device, seed)
                for x, fresh in zip((*inputs, *tables.values()), (*fresh_inputs, *fresh_tables.values()), strict=True):
                    # An expanded input keeps its values: its elements share memory.
                    if x.is_contiguous():
                        x.copy_(fresh)
            for name, pair in self._errors(compiled, inputs, tables).items():
                errors.setdefault(name, []).append(pair)
        for name, pairs in errors.items():
            got, reference = (math.sqrt(sum(e[i] ** 2 for e in pairs) / seeds) for i in (0, 1))
            # A gradient that is zero by theory is the rounding of sums over a row of terms of order one: few draws of noise.
            tolerance, slack = (
                (100 * TOLERANCE[torch.float32], 2) if name in self.zero else (TOLERANCE.get(self.dtype, 0.0), SLACK)
            )
            allowed = max(tolerance, slack * reference)
            assert got <= allowed, (name, got, allowed)

    def _errors(
        self, compiled: Callable[..., Tensor], inputs: list[Tensor], tables: dict[str, Tensor]
    ) -> dict[str, tuple[float, float]]:
        """For the output and each gradient the error of gradfuse and that of the eager formula, against float64."""
        out = compiled(*inputs)
        # Partly along the output, so that the gradient of a temperature is a sum of terms of one sign and well conditioned.
        grad = out.detach() + 0.5 * torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        leaves = {n: x for n, x in (*zip("qkv", inputs, strict=True), *tables.items()) if x.requires_grad}
        grads = torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True)
        exact = self.exact(inputs, tables, grad)
        eager = self.rounded_once(inputs, tables, grad)
        errors = {}
        for name, got, want, reference in zip(["out", *leaves], [out, *grads], exact, eager, strict=True):
            dtype = leaves[name].dtype if name in leaves else self.dtype
            got = torch.zeros(want.shape, dtype=dtype) if got is None else got
            assert got.dtype == dtype, (name, got.dtype)
            errors[name] = relative_error(got, want), relative_error(reference, want)
        return errors
