"""The front end: Dynamo's registry of backends, and its checks, which can refuse a program before a backend sees it."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import torch
import torch._dynamo.utils as dynamo_utils
import torch.nn.attention.flex_attention as _flex_module
from torch._dynamo import eval_frame, register_backend
from torch._dynamo.backends.registry import _COMPILER_FNS
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch._subclasses.fake_tensor import FakeTensor

# The package shadows this module with the op of the same name.
_flex_ops = importlib.import_module("torch._higher_order_ops.flex_attention")


def register(name: str, backend: Callable[..., Any]) -> None:
    """Make ``backend`` known to ``torch.compile(backend=name)``, if no installed entry point does so.

    If Dynamo loads an entry point, this package is imported, and Dynamo registers the backend afterwards. It refuses a name
    that it already has.
    """
    if not entry_points(group="torch_dynamo_backends", name=name) and _COMPILER_FNS.get(name) is not backend:
        register_backend(compiler_fn=backend, name=name)


def _compiling_backend() -> Any:
    """Return the ``compiler_fn`` of the frame that Dynamo traces now, without wrappers, or None outside a trace."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        compiler_fn: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None
    seen: set[int] = set()
    while id(compiler_fn) not in seen:
        seen.add(id(compiler_fn))
        compiler_fn = _unwrapped(compiler_fn)
    return compiler_fn


#: The attributes in which wrappers keep a backend: Dynamo's wrappers, partial functions, decorators.
_WRAPPED = ("compiler_fn", "_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "func", "__wrapped__")


def _unwrapped(compiler_fn: Any) -> Any:
    """Return the backend inside one wrapper. A backend that is not wrapped is returned unchanged."""
    # Under DistributedDataParallel the compiler is a bound method of Dynamo's optimizer, which holds the backend.
    owner = getattr(compiler_fn, "__self__", None)
    inner = getattr(owner, "backend_compile_fn", None)
    for attribute in _WRAPPED:
        inner = getattr(compiler_fn, attribute, None) if inner is None else inner
    return compiler_fn if inner is None else inner


def check_options_at_once(backend: Callable[..., Any], check: Callable[..., Any]) -> None:
    """Make ``torch.compile`` itself call ``check(mode=, options=)`` for ``backend``, as it does for Inductor."""
    get_compiler_fn = eval_frame.get_compiler_fn
    if getattr(get_compiler_fn, "_gradfuse", False):
        return

    @functools.wraps(get_compiler_fn)
    def checked(compiler_fn: Any) -> Any:
        if getattr(compiler_fn, "compiler_fn", None) is backend:
            check(**compiler_fn.kwargs)
        return get_compiler_fn(compiler_fn)

    checked._gradfuse = True
    eval_frame.get_compiler_fn = checked


def relax_front_end_checks(backend: Callable[..., Any]) -> None:
    """Lift two refusals of flex_attention while ``backend`` compiles, and only then. A backend cannot change them itself.

    The device check (CPU tensors that need a gradient) is in the public function, which Dynamo inlines. The check that a
    score_mod's output depends on its score (torch 2.15) is in the op's autograd, which Dynamo runs on fake tensors before
    the backend gets a graph. Under any other backend, and in eager mode, the original code runs.
    """
    if getattr(_flex_module._validate_device, "_gradfuse", False):
        return
    validate_device, create_fw_bw_graph = _flex_module._validate_device, _flex_ops.create_fw_bw_graph

    @torch.compiler.assume_constant_result
    def traced_by_gradfuse() -> bool:
        return _compiling_backend() is backend

    def relaxed_validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type == "cpu" and traced_by_gradfuse():
            return
        validate_device(query, key, value)

    def relaxed_create_fw_bw_graph(score_mod: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return create_fw_bw_graph(score_mod, *args, **kwargs)
        except RuntimeError as error:
            if "depend on score" not in str(error) or _compiling_backend() is not backend:
                raise

        def connected(score: Any, b: Any, h: Any, q: Any, k: Any, *captured: Any) -> Any:
            return torch.where(q >= 0, score_mod(score, b, h, q, k, *captured), score)

        return create_fw_bw_graph(connected, *args, **kwargs)

    relaxed_validate_device._gradfuse = True
    _flex_module._validate_device = relaxed_validate_device
    _flex_ops.create_fw_bw_graph = relaxed_create_fw_bw_graph


def relax_captured_scans(backend: Callable[..., Any]) -> None:
    """Lift associative_scan's refusal of captured tensors and sizes under autograd while Dynamo traces for ``backend``.

    The op's autograd already refuses when Dynamo runs it on fake tensors. AOTAutograd later differentiates the nodes with
    which the backend replaces this one. There the refusal is still active, so no gradient can get lost.
    """
    autograd_key = torch._C.DispatchKey.Autograd
    original = associative_scan_op.py_kernels[autograd_key]
    if getattr(original, "_gradfuse", False):
        return

    def relaxed(combine_fn: Any, xs: Any, additional_inputs: Any) -> Any:
        if not additional_inputs or not isinstance(xs[0], FakeTensor) or _compiling_backend() is not backend:
            return original(combine_fn, xs, additional_inputs)
        detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in (*xs, *additional_inputs)]
        ys = original(combine_fn, detached[: len(xs)], tuple(detached[len(xs) :]))
        needed = any(isinstance(x, torch.Tensor) and x.requires_grad for x in (*xs, *additional_inputs))
        return type(ys)(y.requires_grad_(needed and y.is_floating_point()) for y in ys)

    relaxed._gradfuse = True
    associative_scan_op.py_kernels[autograd_key] = relaxed
    associative_scan_op._dispatch_cache.clear()


def scalar_indexing() -> contextlib.AbstractContextManager[Any]:
    """Make ``table[i]`` with a 0-d tensor i an op that vmap knows, as flex_attention does to trace score_mods."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def saved_tensors_hooks_disabled() -> contextlib.AbstractContextManager[Any]:
    """Make autograd call no hooks for saved tensors, as Dynamo does while it traces."""
    return dynamo_utils._disable_saved_tensors_hooks_during_tracing()


def serializable(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the result of ``compile_fx`` for ``aot_compile``, while that precompiles a function.

    torch 2.11 wraps only the results of its own backends. Later releases wrap every result that can be serialized, and so
    does this function.
    """
    import torch._functorch.config as functorch_config
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable, SerializableCallable

    precompiling = functorch_config.bundled_autograd_cache and functorch_config.bypass_autograd_cache_key
    if not precompiling or isinstance(compiled, SerializableCallable) or getattr(compiled, "serialize", None) is None:
        return compiled
    return BundledAOTAutogradSerializableCallable(compiled)
