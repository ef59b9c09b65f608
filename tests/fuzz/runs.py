"""Run one program in float64, eagerly, and compiled by gradfuse or by stock."""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import inductor_ext  # noqa: F401  (registers the backend)
from inductor_ext.attention import hoisting
from inductor_ext.attention.recognition import grouped, rewrite, skipping
from inductor_ext.torch_api.config import compile_fx as stock_compile_fx
from inductor_ext.torch_api.config import without_caches
from tests.support.eager_graphs import eager_graphs, without_views
from tests.support.interpreter import triton_on_cpu

from . import references
from .program import Program, unload

HALF = (torch.bfloat16, torch.float16)


@dataclass
class Run:
    """The results of a run: outputs, gradients (None for inputs that have none), and the inputs after the call."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    inputs: list[Tensor]
    aliases: list[tuple[int, int]]
    names: list[str] = field(default_factory=list)
    #: The error of a probability that is caused by rounding the largest score to single precision.
    rounding: float = 0.0

    def tensors(self) -> list[tuple[str, Tensor | None]]:
        pairs = [(f"output {i}", x) for i, x in enumerate(self.outputs)]
        return pairs + [(f"gradient of {n}", x) for n, x in zip(self.names, self.gradients, strict=True)]


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def draw_inputs(module: types.ModuleType, device: str, draw: int, widen: torch.dtype | None = None) -> list[Any]:
    """New arguments. With ``widen``, floats are leaves of that dtype."""
    made = module.make(torch.Generator().manual_seed(draw), device)
    if widen is None:
        return made
    return [x.detach().to(widen).requires_grad_(x.requires_grad) if _floating(x) else x for x in made]


def execute(
    function: Callable[..., Any], inputs: list[Any], names: list[str], emulated: bool = False, overwrites: int = -1
) -> Run:
    """Run forward and backward. If ``emulated``, half-precision leaves become fp32, and their gradients are rounded once.

    overwrites: as in a program.
    """
    torch.manual_seed(0)
    leaves = [x for x in inputs if _floating(x) and x.requires_grad]
    arguments = [x.float() if emulated and _floating(x) and x.dtype in HALF else x for x in inputs]
    outputs = [x for x in tree_leaves(function(*arguments)) if isinstance(x, Tensor)]
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    tensors += [x for m in inputs if isinstance(m, torch.nn.Module) for x in m.buffers()]
    outside = [x for x in (*outputs, *tensors) if x.is_floating_point()]
    if overwrites >= 0 and outside:
        with torch.no_grad():
            outside[overwrites % len(outside)].mul_(3)
    gradients: list[Tensor | None] = [None] * len(leaves)
    generator = torch.Generator().manual_seed(1)
    # For every output, since compiled outputs may have a gradient where those of eager mode have none.
    weighted = [
        (x, (torch.randint(-8, 9, x.shape, generator=generator) / 4).to(x)) for x in outputs if x.is_floating_point()
    ]
    differentiable = [x for x, _ in weighted if x.requires_grad]
    if differentiable and leaves:
        weights = [weight for x, weight in weighted if x.requires_grad]
        gradients = list(torch.autograd.grad(differentiable, leaves, weights, allow_unused=True))
    addresses = [x.untyped_storage().data_ptr() for x in (*outputs, *tensors) if x.numel()]
    everything = [x for x in (*outputs, *tensors) if x.numel()]
    aliases = [
        (i, j)
        for i in range(len(everything))
        for j in range(i)
        if addresses[i] == addresses[j] and (i < len(outputs) or j < len(outputs))
    ]
    return Run([x.detach() for x in outputs], gradients, tensors, aliases, names)


def leaf_names(module: types.ModuleType, inputs: list[Any]) -> list[str]:
    arguments = module.program.__code__.co_varnames[: module.program.__code__.co_argcount]
    return [n for n, x in zip(arguments, inputs, strict=True) if _floating(x) and x.requires_grad]


@contextlib.contextmanager
def loaded(program: Program, **replaced: Any) -> Iterator[types.ModuleType]:
    module = program.load(**replaced)
    try:
        yield module
    finally:
        unload(module)


def reference(program: Program, device: str, draw: int) -> Run:
    """The program in float64."""
    with loaded(program, **references.replacements(torch.float64)) as module:
        inputs = draw_inputs(module, device, draw, torch.float64)
        references.largest_score.clear()
        with references.RecordLogits() if program.family == "attentions" else contextlib.nullcontext():
            run = execute(module.program, inputs, leaf_names(module, inputs), overwrites=program.overwrites)
        # Scaled to base 2 and rounded, forward and backward each.
        run.rounding = 2 * 2.0**-24 * math.log2(math.e) * max(references.largest_score, default=0.0)
        return run


def eager(program: Program, device: str, draw: int) -> Run:
    """Run the program in its own dtype, in half precision with sums in fp32 that each operation rounds once."""
    half = program.dtype in ("bfloat16", "float16")
    dtype = getattr(torch, program.dtype)
    with loaded(program, **references.replacements(dtype)) as module:
        inputs = draw_inputs(module, device, draw)
        names = leaf_names(module, inputs)
        if program.family == "score_mods":
            return execute(module.program, inputs, names, True, program.overwrites)
        with references.SumsInFloat32() if half else contextlib.nullcontext():
            return execute(module.program, inputs, names, overwrites=program.overwrites)


def _as_it_is(gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Callable[..., Any]:
    def run(arguments: list[Any]) -> Any:
        inputs = list(arguments)
        arguments.clear()
        return without_views(gm(*inputs))

    run._boxed_call = True
    return run


@contextlib.contextmanager
def _settings(mode: str, as_if_large: bool) -> Iterator[None]:
    """Settings for compiling and running.

    as_if_large: decide for the programs, which are small, as for large ones. The lookups of a score_mod stay in it and are
    not made into a table, blocks of scores that masks hide are skipped, and heads of keys are not repeated for heads of
    queries. A kernel needs blocks that its tiles divide.
    """
    machine = {"graphs": eager_graphs, "interpreted": triton_on_cpu, "compiled": contextlib.nullcontext}[mode]
    largest = 0 if as_if_large else hoisting.LARGEST_PAIR_TABLE
    fewest = 1 if as_if_large else skipping.FEWEST_BLOCKS
    keys = 1 if as_if_large else grouped.FEWEST_KEYS
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        without_caches(),
        machine(),
        mock.patch.object(hoisting, "LARGEST_PAIR_TABLE", largest),
        mock.patch.object(rewrite, "FEWEST_ON_CPU", 0),
        mock.patch.object(skipping, "FEWEST_BLOCKS", fewest),
        mock.patch.object(grouped, "FEWEST_KEYS", keys),
        mock.patch.object(skipping, "BLOCK", 8 if mode == "graphs" else skipping.BLOCK),
    ):
        yield


def _stock(mode: str) -> Any:
    """Return stock's backend, which runs the graphs op by op in that mode."""
    return functools.partial(stock_compile_fx, inner_compile=_as_it_is) if mode == "graphs" else "inductor"


def compiled(
    program: Program, device: str, mode: str, stock: bool, draws: list[int], options: dict[str, Any] | None = None
) -> list[Run]:
    """Compile once and run every draw."""
    torch._dynamo.reset()
    backend = _stock(mode) if stock else "gradfuse"
    kwargs: dict[str, Any] = {"options": options} if options else {}
    with _settings(mode, program.seed % 2 == 1), loaded(program, **references.compiled_replacements(device)) as module:
        function = torch.compile(module.program, backend=backend, fullgraph=True, dynamic=program.dynamic, **kwargs)
        runs = []
        for draw in draws:
            inputs = draw_inputs(module, device, draw)
            _spoil_free_memory(device)
            runs.append(execute(function, inputs, leaf_names(module, inputs), overwrites=program.overwrites))
        return runs


def forward_of_stock(program: Program, device: str, mode: str) -> None:
    """Compile and run the program by stock without gradients."""
    torch._dynamo.reset()
    replaced = references.compiled_replacements(device)
    with _settings(mode, False), loaded(program, **replaced) as module, torch.no_grad():
        function = torch.compile(module.program, backend=_stock(mode), fullgraph=True, dynamic=program.dynamic)
        function(*draw_inputs(module, device, 0))


def _spoil_free_memory(device: str) -> None:
    """Fill free memory of a GPU with NaN. What no kernel writes is then wrong in every run, with gradfuse and with stock."""
    if device == "cuda":
        sizes = [2**n for n in range(5, 19)] * 8
        spoilt = [torch.full((n,), math.nan, device=device) for n in sizes]
        del spoilt
