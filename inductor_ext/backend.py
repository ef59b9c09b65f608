"""The backend function. It reads the options, sets up the overrides, and calls stock ``compile_fx``.

    Dynamo graph -> rewrites -> compile_fx (AOTAutograd -> [rewrites -> our lowerings -> Inductor] per graph)

Our lowerings are in Inductor's table only while one of *our* graphs is lowered: the forward, and the backward at whatever
time it is compiled. Our version, source and options are part of every cache key. A model that is compiled with
``backend="inductor"`` in the same process, or with the same cache directory, is therefore not affected.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from . import lowerings, passes, repro, verify
from .cache_key import CacheKey
from .core.report import compiling, user_line
from .dump import Dump
from .explanations import pictures
from .gathers import gathers
from .mlstm import op as mlstm_op
from .mlstm import rewrite as mlstm
from .options import Options, split
from .registry import NAMES
from .scan.recurrence import recurrence
from .scan.scan import scan
from .torch_api import bisector, config
from .torch_api.config import (
    cacheable,
    custom_passes,
    deterministic_lowerings,
    inductor_config,
    inductor_patches,
    reset_cudagraphs,
    without_caches,
)
from .torch_api.frontend import check_options_at_once, register, relax_captured_scans, relax_front_end_checks, serializable
from .torch_api.graph import set_missing_values, stable_topological_sort
from .torch_api.lowering import (
    masks_in_registers,
    override_lowerings,
    register_decomposition,
    rows_kept,
    scans_allowed,
    tuned_kernels,
)

#: Functions of ours that passes put into Dynamo's graph. Their source is part of every cache key.
_FUNCTIONS = tuple(f"{f.__module__}.{f.__name__}" for f in (scan, recurrence, mlstm.fused_cell))
_numbers = itertools.count()


class _StageOfJointGraph(CacheKey):
    """Runs a stage of our passes on the joint graph, after the user's pass of the same slot.

    In inference there is no joint graph, and they run on the whole graph.
    """

    stage: str

    def __init__(self, options: Options, users: list[Any], dump: Dump) -> None:
        super().__init__(options, users)
        self.dump = dump

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        # Stock's passes, and the user's, may leave the order of the nodes to a sort that comes later.
        stable_topological_sort(graph)
        passes.run(self.stage, graph.owning_module, self.options, self.dump)


class _OnJointGraph(_StageOfJointGraph):
    """Runs before stock's passes."""

    stage = "joint"


class _BeforePartition(_StageOfJointGraph):
    """Runs after stock's passes."""

    stage = "partition"


def _with_passes(options: Options, patches: dict[str, Any], dump: Dump) -> dict[str, Any]:
    """Return Inductor's configuration for a compilation of ours."""
    patched = {**patches, **cacheable(dict.fromkeys(_FUNCTIONS, ""), patches)}
    for slot, ours in (
        ("post_grad_custom_pre_pass", CacheKey),
        ("joint_custom_pre_pass", partial(_OnJointGraph, dump=dump)),
        ("joint_custom_post_pass", partial(_BeforePartition, dump=dump)),
    ):
        users = custom_passes(patches.get(slot, getattr(inductor_config, slot)))
        patched[slot] = ours(options, users)
    if options.dump is not None:
        patched["fx_graph_cache"] = False
    if options.verify:
        # The compiled graph and the eager one must draw the same random numbers.
        patched["fallback_random"] = True
    return patched


def _inner_compile(options: Options, dump: Dump) -> Callable[..., Any]:
    """Return Inductor's inner compile function of one graph (forward or backward) with our post-AOT passes and lowerings."""

    @functools.wraps(config.compile_fx_inner)
    def inner(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        direction = "backward" if kwargs.get("is_backward") else "forward"
        with contextlib.ExitStack() as scope:
            scope.enter_context(compiling(dump.number))
            set_missing_values(gm.graph)
            passes.run("post_aot", gm, options, dump)
            scope.enter_context(scans_allowed(gm))
            scope.enter_context(deterministic_lowerings(options.deterministic))
            table = lowerings.table(options)
            scope.enter_context(override_lowerings(table))
            scope.enter_context(rows_kept(table))
            scope.enter_context(masks_in_registers())
            scope.enter_context(tuned_kernels(gathers.needs_tuning))
            compiled = config.compile_fx_inner(gm, example_inputs, **kwargs)
        dump.code(compiled, direction)
        return compiled

    return inner


def _checked(
    mode: str | None = None, options: dict[str, Any] | None = None, dynamic: bool | None = None
) -> tuple[Options, dict[str, Any]]:
    """Return our options and Inductor's configuration. Raises a RuntimeError for an option that neither knows."""
    parsed, inductor_options = split(options)
    return parsed, inductor_patches(mode, inductor_options, dynamic)


def _compile(
    gm: GraphModule, inputs: Sequence[Any], options: Options, patches: dict[str, Any], number: int
) -> Callable[..., Any]:
    """Compile a Dynamo graph with the passes and lowerings that ``options`` enable. The graph is changed."""
    config.choose_ptxas()
    dump = Dump(options.dump, number)
    first = next(filter(None, map(user_line, gm.graph.nodes)), "")
    with compiling(number, first), without_caches() if options.dump is not None else contextlib.nullcontext():
        draw = pictures.watch(gm, options, number)
        patched = _with_passes(options, patches, dump)
        with inductor_config.patch(patched):
            passes.run("dynamo", gm, options, dump)
        compiled = config.compile_fx(gm, inputs, inner_compile=_inner_compile(options, dump), config_patches=patched)
        return draw(serializable(compiled))


def gradfuse(
    gm: GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph; use it as ``torch.compile(model, backend="gradfuse", mode=..., options=...)``.

    ``mode`` and ``options`` are those of ``backend="inductor"``; ``inductor_ext.options.Options`` lists what gradfuse
    adds. Raises OptionError (a RuntimeError, as Inductor does) for an unknown option.
    """
    parsed, patches = _checked(mode, options, dynamic)
    number = next(_numbers)
    parsed = replace(parsed, disable=parsed.disable | bisector.turned_off("gradfuse", NAMES, f"graph {number}"))
    if number >= int(os.environ.get("GRADFUSE_GRAPHS", sys.maxsize)):
        # ``gradfuse bisect`` leaves the later graphs to stock, and writes out the last graph that is not left to stock.
        return _compile(gm, example_inputs, replace(parsed, disable=frozenset(NAMES)), patches, number)
    target = os.environ.get("GRADFUSE_REPRO")
    if not parsed.verify and target is None:
        return _compile(gm, example_inputs, parsed, patches, number)
    original = copy.deepcopy(gm)
    compiled = _compile(gm, example_inputs, parsed, patches, number)
    if target is not None:
        return repro.saving(original, compiled, Path(target))

    def again(graph: GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
        return _compile(copy.deepcopy(graph), inputs, options, patches, next(_numbers))

    return verify.checked(original, compiled, again, parsed)


gradfuse.reset = reset_cudagraphs
register("gradfuse", gradfuse)
bisector.offer("gradfuse", NAMES)
check_options_at_once(gradfuse, _checked)
relax_front_end_checks(gradfuse)
relax_captured_scans(gradfuse)
register_decomposition(torch.ops.gradfuse.mlstm.default, mlstm_op.decomposed)
