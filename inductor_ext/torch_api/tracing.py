"""Trace functions to graphs, and write to the structured trace that tlparse reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._logging._internal import trace_log, trace_structured
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.traceback import get_current_meta

__all__ = ["detect_fake_mode"]


def is_traced() -> bool:
    """Return whether the artifacts of a structured trace are collected (TORCH_TRACE)."""
    return bool(trace_log.handlers)


def traced_meta() -> dict[str, Any] | None:
    """Return the metadata of the node that AOTAutograd traces now, or None if nothing is being traced to a graph."""
    return get_current_meta() if get_proxy_mode() is not None else None


def trace_artifact(name: str, text: str) -> None:
    """Put a text into the structured trace, where tlparse finds it."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def trace(fn: Callable[..., Any], args: Sequence[Any]) -> torch.fx.GraphModule:
    """Trace ``fn`` over fake tensors to the ATen ops that Inductor lowers, in the fake mode that the tensors carry."""
    from torch._dispatch.python import enable_python_dispatcher

    with torch.no_grad(), enable_python_dispatcher(), _compiling():
        return make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="real")(*args)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Mark the process as compiling.

    A backward graph may be compiled at any time. Until torch 2.15 a tracer marks the whole process as tracing, and a
    compiled function that another thread calls meanwhile refuses to run, unless something is being compiled.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Compute with real tensors, whatever is being traced outside."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def trace_apart(fn: Callable[..., Any], dtypes: Sequence[torch.dtype]) -> torch.fx.GraphModule:
    """Trace ``fn`` over real 0-d tensors of ``dtypes`` to ATen ops. An outer trace has no influence on it.

    The gradients of some ops, as ``maximum``, write in place to what they have computed. The second trace has no such
    writes.
    """
    with real_tensors():
        examples = [torch.ones((), dtype=dtype) for dtype in dtypes]
        traced = make_fx(functionalize(make_fx(fn)(*examples)))(*examples)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced
