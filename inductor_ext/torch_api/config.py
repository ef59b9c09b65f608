"""Inductor's configuration, its caches and the compiler itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
from torch._inductor.utils import get_donated_idxs

__all__ = ["CustomGraphPass", "compile_fx", "compile_fx_inner", "inductor_config"]


def inductor_options() -> list[str]:
    """Return every option that ``torch.compile(options=...)`` takes for Inductor."""
    return sorted(inductor_config.get_config_copy())


def inductor_patches(mode: str | None, options: dict[str, Any], dynamic: bool | None) -> dict[str, Any]:
    """Return the configuration that ``backend="inductor"`` sets for ``mode`` and ``options``, after its checks."""
    return dict(torch._TorchCompileInductorWrapper(mode, options, dynamic).config)


def reset_cudagraphs() -> None:
    """Forget recorded CUDA graphs. ``torch._dynamo.reset`` calls the same method of Inductor's wrapper."""
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


def choose_ptxas() -> None:
    """Choose the ptxas of torch's package for Triton, as Inductor does before the first kernel that a process builds itself.

    The version of ptxas is part of the key of Triton's cache. Inductor builds another tile of some reductions in the process
    that trains. Which ptxas it took there depended on the kernels before, so a new process built such kernels again although
    the cache had them. The choice is an environment variable: every kernel of the process gets this ptxas, and its children.
    """
    _set_triton_ptxas_path()


def asserts_in_kernels() -> bool:
    """Return whether the kernels that Inductor makes for a GPU assert what they are told to."""
    return inductor_config.assert_indirect_indexing and torch.version.hip is None


def templates_multiply() -> bool:
    """Return whether matmuls may be Triton kernels, into which Inductor fuses what computes their operands."""
    return inductor_config.max_autotune or inductor_config.max_autotune_gemm or inductor_config.triton.native_matmul


def addmm_stays_whole() -> bool:
    """Return whether Inductor leaves a half-precision ``addmm`` as it is. Torch 2.13 has an option against it."""
    return getattr(inductor_config, "keep_addmm_fused_for_half_dtypes", True)


def custom_passes(value: Any) -> list[Any]:
    """Return the value of a custom-pass option (None, one pass or, from torch 2.13, several passes) as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def donated_buffers() -> list[int] | None:
    """Return the saved tensors that the backward which is being compiled may overwrite.

    Inductor's key of a backward graph does not contain them (torch 2.11 to 2.15). Without them in our key, a backward that
    must keep the tensors, for ``retain_graph``, would take the code of one that overwrites them, and a second call would be
    wrong.
    """
    return get_donated_idxs()


def cacheable(functions: dict[str, str], patches: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration that lets the caches of AOTAutograd and Inductor take graphs with these functions and loops.

    ``functions`` is a dict from the qualified name of a function to a text for the cache keys, on which its behaviour
    depends. The functions that the user's configuration ``patches`` names are kept.
    """
    name = "unsafe_marked_cacheable_functions"
    loops = {f"{op.__module__}.{op.__name__}": "" for op in (scan_op, while_loop_op)}
    return {name: {**patches.get(name, getattr(inductor_config, name)), **loops, **functions}}


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """Compile from scratch inside the block. Neither the FX-graph cache nor AOTAutograd's cache is read or written."""
    import torch._functorch.config as functorch_config

    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


def uses_triton_on_cpu() -> bool:
    """Return whether Inductor emits Triton for CPU tensors (under the interpreter of the tests it does)."""
    return inductor_config.cpu_backend == "triton"


def uses_eager_random_numbers() -> bool:
    """Return whether compiled code draws the random numbers of eager mode (``fallback_random``)."""
    return inductor_config.fallback_random


@contextlib.contextmanager
def deterministic_lowerings(wanted: bool) -> Iterator[None]:
    """Lower the ops around our kernels (e.g. the gradient of a gather) as ``torch.use_deterministic_algorithms`` asks."""
    before, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or before:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
