"""``options={"verify": True}`` checks the first call of every compiled graph against the graph that Dynamo traced.

The graph runs three times on copies of the inputs, forward and backward: compiled, eagerly in float64, and eagerly as it is
written. The error of the last run says how much rounding is to be expected. If a compiled result is further off than that,
it is wrong. Then the passes are disabled one after another, to find the pass that is to blame.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .core.report import record
from .core.table import progress
from .options import Options
from .reference import Reference, draws_random_numbers, readable
from .registry import NAMES

#: The error that is always allowed, relative to the norm of the reference. The error of a wrong gradient is far larger.
FLOOR = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
#: An error of this many times the error of the eager graph is allowed.
FACTOR = 4
#: An error below this share of the largest root mean square of any tensor is taken for the rounding of terms that cancel.
NOISE = 1e-4

#: A function that compiles a Dynamo graph for some inputs with the given options.
Compile = Callable[[GraphModule, Sequence[Any], Options], Callable[..., Any]]


class VerificationError(AssertionError):
    """A compiled graph computes other results than the graph that Dynamo traced.

    The message names the output or gradient that is furthest off, the errors, and the pass that is to blame.
    """


@dataclass(frozen=True)
class _Wrong:
    """A tensor that differs, with its relative error and the relative error of the eager graph."""

    name: str
    error: float
    eager: float

    def __str__(self) -> str:
        return f"{self.name} has a relative error of {self.error:.1e} (that of the eager graph is {self.eager:.1e})"


def checked(original: GraphModule, compiled: Callable[..., Any], compile_: Compile, options: Options) -> Callable[..., Any]:
    """Wrap ``compiled`` so that its first call is compared with ``original``; that call may raise VerificationError."""
    pending = [True]

    @functools.wraps(compiled)
    def run(*inputs: Any) -> Any:
        if pending:
            pending.clear()
            torch.compiler.disable(_check)(original, compiled, compile_, options, inputs)
        return compiled(*inputs)

    return run


def _check(original: GraphModule, compiled: Callable[..., Any], compile_: Compile, options: Options, inputs: Any) -> None:
    names = [readable(str(node.target)) for node in original.graph.find_nodes(op="placeholder")]
    with progress("gradfuse: verifying a graph", "run", total=3) as bar:

        def step(function: Callable[..., Any], dtype: torch.dtype | None = None) -> dict[str, Tensor | None]:
            found = _step(function, inputs, names, dtype)
            bar.update()
            return found

        eager = step(Reference(original, None).run)
        # In float64 the same seed gives other random numbers, so the eager run is the reference of a graph that draws some.
        exact = eager if draws_random_numbers(original) else step(Reference(original, torch.float64).run, torch.float64)
        wrong = _compared(step(compiled), exact, eager)
    if wrong is None:
        record("verify", "graph", "checked", f"all {len(exact)} outputs, gradients and changed inputs agree with eager mode")
        return
    guilty = []
    for name in progress("gradfuse: finding the pass", "pass", of=list(filter(options.enabled, NAMES))):
        without = replace(options, disable=options.disable | {name}, verify=False)
        # If the graph cannot be compiled without a pass, nothing is known about that pass.
        with contextlib.suppress(Exception):
            again = _step(compile_(original, inputs, without), inputs, names)
            if _compared(again, exact, eager) is None:
                guilty.append(name)
    blame = (
        f"The result is right without {' or without '.join(map(repr, guilty))}" if guilty else "No single pass is to blame"
    )
    advice = f". Use options={{'disable': {guilty[:1]!r}}} to disable that pass" if guilty else ""
    raise VerificationError(
        f"gradfuse computed other results than your model: {wrong}. {blame}{advice}. Please report this."
    )


def _copies(inputs: Sequence[Any], dtype: torch.dtype | None) -> list[Any]:
    """Copy the inputs, so that the copies have separate gradients. A tensor that is passed twice is copied once."""
    made: dict[int, Any] = {}
    for x in inputs:
        if isinstance(x, Tensor) and id(x) not in made:
            new = x.detach().clone()
            new = new.to(dtype) if dtype is not None and new.is_floating_point() else new
            made[id(x)] = new.requires_grad_(x.requires_grad)
    return [made.get(id(x), x) for x in inputs]


def _step(
    function: Callable[..., Any], inputs: Sequence[Any], names: Sequence[str], dtype: torch.dtype | None = None
) -> dict[str, Tensor | None]:
    """Return the outputs, changed inputs and gradients of a call, by name. The inputs themselves do not change."""
    copies, gradients = _copies(inputs, dtype), torch.is_grad_enabled()
    devices = {x.device for x in inputs if isinstance(x, Tensor) and x.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        try:
            result = function(*(x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in copies))
        finally:
            torch.set_grad_enabled(gradients)
        outs = [x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, Tensor)]
        tensors = {name: x for name, x in zip(names, copies, strict=True) if isinstance(x, Tensor)}
        found: dict[str, Tensor | None] = {f"output {i}": x.detach() for i, x in enumerate(outs)}
        found |= {f"{name} after the call": x.detach() for name, x in tensors.items() if x._version > 0}
        ends = [x for x in outs if x.requires_grad]
        leaves = {name: x for name, x in tensors.items() if x.requires_grad}
        if ends and leaves:
            generator = torch.Generator().manual_seed(0)
            tangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in ends]
            grads = torch.autograd.grad(ends, list(leaves.values()), tangents, allow_unused=True)
            found |= {f"the gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}
    return found


def _compared(
    got: dict[str, Tensor | None], exact: dict[str, Tensor | None], eager: dict[str, Tensor | None]
) -> _Wrong | None:
    """Return the tensor that is furthest off, or None if all agree."""
    sizes = [float(x.double().square().mean().sqrt()) for x in exact.values() if x is not None and x.numel()]
    worst: _Wrong | None = None
    for name in exact.keys() | got.keys():
        found = [tensors.get(name) for tensors in (got, exact, eager)]
        like = next((x for x in found if x is not None), None)
        if like is None:
            continue
        given, want, usual = (torch.zeros_like(like) if x is None else x for x in found)
        dtype = usual.dtype if usual.is_floating_point() else torch.float32
        error, usual_error, norm = _distance(given, want), _distance(usual, want), float(want.double().norm())
        noise = NOISE * max(sizes) * want.numel() ** 0.5 * (dtype is not torch.float64)
        if not error <= max(FLOOR.get(dtype, 1e-2) * norm, FACTOR * usual_error, noise):
            wrong = _Wrong(name, error / max(norm, 1e-30), usual_error / max(norm, 1e-30))
            worst = wrong if worst is None or not wrong.error <= worst.error else worst
    return worst


def _distance(x: Tensor, y: Tensor) -> float:
    """Return the norm of the difference. Equal infinities, and two NaN, count as equal."""
    x, y = x.double(), y.double()
    return float(torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, x - y).norm())
