"""The backend function: options, the scope of the overrides, and the call of stock ``compile_fx``.

    Dynamo graph -> rewrites -> compile_fx (AOTAutograd -> [rewrites -> our lowerings -> Inductor] per graph)

Our lowerings are in Inductor's table only while one of *our* graphs is lowered (forward, and the backward whenever it is
compiled), and our version, source and options are part of every cache key, so a model compiled with
``backend="inductor"`` in the same process or cache directory is untouched.
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

from . import compat, lowerings, passes, pictures, repro, verify
from .core.report import compiling, user_line
from .dump import Dump
from .gathers import gathers
from .mlstm import op as mlstm_op
from .mlstm import rewrite as mlstm
from .options import PASSES, Options, split
from .scan.scan import scan


class _CacheKey(compat.CustomGraphPass):
    """A pass that changes nothing and, by its uuid, keeps our code apart in the FX-graph and AOTAutograd caches.

    It runs the user's own pass of that slot, whose uuid joins the key (a pass without one makes the caches step aside,
    as it does under stock Inductor).
    """

    def __init__(self, own: Options, users: list[Any]) -> None:
        self.own = own
        self.users = users

    def __call__(self, graph: Graph) -> None:
        for user_pass in self.users:
            user_pass(graph)

    def uuid(self) -> Any:
        parts = ["gradfuse", compat.source_hash(str(Path(__file__).parent)), _templates_hash(), _option_key(self.own)]
        parts.append(f"donated {compat.donated_buffers()}")
        for user_pass in self.users:
            uuid = getattr(user_pass, "uuid", lambda: None)()
            if uuid is None:
                return None
            parts.append(repr(uuid))
        return "|".join(parts)


def _templates_hash() -> str:
    return compat.source_hash(str(lowerings.TEMPLATE_DIR))


def _option_key(own: Options) -> str:
    return f"{own.deterministic},{own.strict},{sorted(own.disable)}"


#: Functions of ours that passes put into Dynamo's graph: what they do is in the source, which is part of every key.
_FUNCTIONS = tuple(f"{f.__module__}.{f.__name__}" for f in (scan, mlstm.fused_cell))
_numbers = itertools.count()


class _OnJointGraph(_CacheKey):
    """Our passes on the joint graph (on the whole graph, in inference), before stock's, after the user's own pass."""

    def __init__(self, own: Options, users: list[Any], dump: Dump) -> None:
        super().__init__(own, users)
        self.dump = dump

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        passes.run("joint", graph.owning_module, self.own, self.dump)


def _with_passes(own: Options, patches: dict[str, Any], dump: Dump) -> dict[str, Any]:
    """Inductor's configuration for a compilation of ours."""
    patched = {**patches, **compat.cacheable(dict.fromkeys(_FUNCTIONS, ""), patches)}
    for slot, ours in (
        ("post_grad_custom_pre_pass", _CacheKey),
        ("joint_custom_pre_pass", partial(_OnJointGraph, dump=dump)),
    ):
        users = compat.custom_passes(patches.get(slot, getattr(compat.inductor_config, slot)))
        patched[slot] = ours(own, users)
    if own.dump is not None:
        patched["fx_graph_cache"] = False
    if own.verify:
        # So that the compiled graph and the eager one draw the same random numbers.
        patched["fallback_random"] = True
    return patched


def _inner_compile(own: Options, dump: Dump) -> Callable[..., Any]:
    """Inductor's inner compile of one graph (forward or backward) with our post-AOT passes and lowerings in force."""

    @functools.wraps(compat.compile_fx_inner)
    def inner(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        direction = "backward" if kwargs.get("is_backward") else "forward"
        with contextlib.ExitStack() as scope:
            scope.enter_context(compiling(dump.number))
            passes.run("post_aot", gm, own, dump)
            scope.enter_context(compat.scans_allowed(gm))
            scope.enter_context(compat.deterministic_lowerings(own.deterministic))
            scope.enter_context(compat.override_lowerings(lowerings.table(own)))
            scope.enter_context(compat.masks_in_registers())
            if gathers.needs_tuning(gm):
                scope.enter_context(compat.inductor_config.patch(max_autotune_pointwise=True))
            compiled = compat.compile_fx_inner(gm, example_inputs, **kwargs)
        dump.code(compiled, direction)
        return compiled

    return inner


def _checked(
    mode: str | None = None, options: dict[str, Any] | None = None, dynamic: bool | None = None
) -> tuple[Options, dict[str, Any]]:
    """Our options and Inductor's configuration. Raises a RuntimeError for what neither of us knows."""
    own, inductor_options = split(options)
    return own, compat.inductor_patches(mode, inductor_options, dynamic)


def _compile(
    gm: GraphModule, inputs: Sequence[Any], own: Options, patches: dict[str, Any], number: int
) -> Callable[..., Any]:
    """Compile a Dynamo graph, which is changed, with the passes and lowerings that ``own`` enables."""
    dump = Dump(own.dump, number)
    first = next(filter(None, map(user_line, gm.graph.nodes)), "")
    with compiling(number, first), compat.without_caches() if own.dump is not None else contextlib.nullcontext():
        draw = pictures.watch(gm, own, number)
        passes.run("dynamo", gm, own, dump)
        compiled = compat.compile_fx(
            gm, inputs, inner_compile=_inner_compile(own, dump), config_patches=_with_passes(own, patches, dump)
        )
        return draw(compat.serializable(compiled))


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
    own, patches = _checked(mode, options, dynamic)
    number = next(_numbers)
    if number >= int(os.environ.get("GRADFUSE_GRAPHS", sys.maxsize)):
        # ``gradfuse bisect`` leaves the later graphs to stock; the last of the others is the one to show.
        return _compile(gm, example_inputs, replace(own, disable=frozenset(PASSES)), patches, number)
    target = os.environ.get("GRADFUSE_REPRO")
    if not own.verify and target is None:
        return _compile(gm, example_inputs, own, patches, number)
    original = copy.deepcopy(gm)
    compiled = _compile(gm, example_inputs, own, patches, number)
    if target is not None:
        return repro.saving(original, compiled, Path(target))

    def again(graph: GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
        return _compile(copy.deepcopy(graph), inputs, options, patches, next(_numbers))

    return verify.checked(original, compiled, again, own)


gradfuse.reset = compat.reset_cudagraphs
compat.register("gradfuse", gradfuse)
compat.check_options_at_once(gradfuse, _checked)
compat.relax_front_end_checks(gradfuse)
compat.relax_captured_scans(gradfuse)
compat.register_decomposition(torch.ops.gradfuse.mlstm.default, mlstm_op.decomposed)
