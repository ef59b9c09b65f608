"""The names of torch that are not documented API, with the modules that use them, and the names that this torch lacks.

This is the first check for a new torch release: ``gradfuse doctor`` lists the names that it no longer has.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass

import torch

#: The oldest and the newest release of torch on which the tests run.
OLDEST, NEWEST = "2.11", "2.15"


class UnsupportedTorchError(ImportError):
    """This torch lacks names that gradfuse needs; ``missing`` lists them."""

    def __init__(self, missing: list[PrivateName]) -> None:
        self.missing = missing
        lines = "".join(f"\n  {name.where}, used by torch_api/{name.used_by}.py" for name in missing)
        super().__init__(
            f"gradfuse works with torch {OLDEST} to {NEWEST}. This is torch {torch.__version__}, which lacks:{lines}\n"
            'Install a supported torch, or continue without gradfuse: torch.compile(model, backend="inductor").'
        )


@dataclass(frozen=True)
class PrivateName:
    """One name.

    where: "module" or "module:attribute". used_by: the modules of torch_api that use it. since: the first torch that is
    known to have it.
    """

    where: str
    used_by: str
    since: str = OLDEST

    def exists(self) -> bool:
        """Return whether this torch has the name. Imports its module."""
        module, _, attribute = self.where.partition(":")
        try:
            found = importlib.import_module(module)
            functools.reduce(getattr, attribute.split(".") if attribute else (), found)
        except (ImportError, AttributeError):
            return False
        return True


def _of(module: str, used_by: str, *attributes: str) -> list[PrivateName]:
    return [PrivateName(f"{module}:{a}" if a else module, used_by) for a in attributes or ("",)]


NAMES: tuple[PrivateName, ...] = (
    *_of("torch", "config", "_TorchCompileInductorWrapper"),
    *_of("torch", "frontend", "_C.DispatchKey.Autograd"),
    *_of("torch", "graph", "UntypedStorage._cdata", "_assert_async"),
    *_of("torch._C._functorch", "graph", "get_unwrapped", "is_functorch_wrapped_tensor"),
    *_of("torch._dispatch.python", "tracing", "enable_python_dispatcher"),
    *_of("torch._dynamo", "frontend", "eval_frame", "register_backend"),
    *_of("torch._dynamo._trace_wrapped_higher_order_op", "frontend", "TransformGetItemToIndex"),
    *_of("torch._dynamo.aot_compile_types", "frontend", "BundledAOTAutogradSerializableCallable", "SerializableCallable"),
    *_of("torch._dynamo.backends.registry", "frontend", "_COMPILER_FNS"),
    *_of("torch._dynamo.symbolic_convert", "frontend", "InstructionTranslator"),
    *_of("torch._dynamo.utils", "frontend", "_disable_saved_tensors_hooks_during_tracing"),
    *_of("torch._functorch.config", "config, frontend"),
    *_of("torch._guards", "graph, lowering, tracing", "detect_fake_mode"),
    *_of("torch._higher_order_ops.associative_scan", "frontend", "associative_scan_op"),
    *_of("torch._higher_order_ops.flex_attention", "frontend", "create_fw_bw_graph"),
    *_of("torch._higher_order_ops.scan", "config, higher_order, lowering", "scan_op"),
    *_of("torch._higher_order_ops.triton_kernel_wrap", "higher_order", "triton_kernel_wrapper_mutation"),
    *_of("torch._higher_order_ops.while_loop", "config, higher_order", "while_loop_op"),
    *_of(
        "torch._inductor.codegen.triton",
        "lowering",
        "TritonKernel.codegen_kernel",
        "TritonKernelOverrides.masked",
        "ops",
    ),
    *_of("torch._inductor.compile_fx", "config", "compile_fx", "compile_fx_inner"),
    *_of("torch._inductor.compiler_bisector", "bisector", "BACKENDS", "BisectSubsystem", "CompilerBisector"),
    *_of("torch._inductor.config", "config, lowering"),
    *_of("torch._inductor.cudagraph_trees", "config", "reset_cudagraph_trees"),
    *_of("torch._inductor.custom_graph_pass", "config", "CustomGraphPass"),
    *_of("torch._inductor.decomposition", "lowering", "decompositions", "fast_random_decomps"),
    *_of("torch._inductor.decomposition", "tracing", "select_decomp_table"),
    *_of("torch._inductor.graph", "lowering", "GraphLowering.find_nodes_prefer_channels_last"),
    *_of(
        "torch._inductor.ir",
        "ir, template",
        "ComputedBuffer",
        "ExternKernel",
        "FixedLayout",
        "FlexibleLayout",
        "IRNode",
        "IndexPutFallback",
        "InputBuffer",
        "MutationLayoutSHOULDREMOVE",
        "Pointwise",
        "Scatter",
        "StorageBox",
        "TensorBox",
        "get_fill_order",
        "get_stride_order",
    ),
    *_of("torch._inductor.lowering", "ir, lowering", "lowerings"),
    *_of("torch._inductor.lowering", "lowering", "empty", "empty_strided", "fallback_handler", "pointwise_cat"),
    *_of("torch._inductor.pattern_matcher", "graph", "stable_topological_sort"),
    *_of("torch._inductor.runtime.compile_tasks", "config", "_set_triton_ptxas_path"),
    *_of("torch._inductor.runtime.triton_heuristics", "gluon", "ASTSource"),
    *_of("torch._inductor.select_algorithm", "gluon", "TritonTemplateKernel"),
    *_of("torch._inductor.select_algorithm", "ir", "realize_inputs"),
    *_of(
        "torch._inductor.select_algorithm",
        "template",
        "SymbolicGridFn",
        "TritonTemplate",
        "autotune_select_algorithm",
    ),
    *_of("torch._inductor.subgraph_lowering", "lowering", "PointwiseSubgraphLowering"),
    *_of("torch._inductor.utils", "config", "get_donated_idxs"),
    *_of("torch._inductor.utils", "template", "triton_type"),
    *_of("torch._inductor.virtualized", "higher_order, ir, lowering, sizes, template", "V"),
    *_of("torch._inductor.virtualized", "lowering", "ops"),
    *_of("torch._logging._internal", "tracing", "trace_log", "trace_structured"),
    *_of("torch._ops", "graph", "HigherOrderOperator"),
    *_of("torch._ops", "graph, lowering", "OpOverload"),
    *_of("torch._subclasses.fake_tensor", "frontend, graph", "FakeTensor"),
    *_of("torch.autograd.grad_mode", "graph", "_enter_inference_mode"),
    *_of("torch.compiler", "tracing", "_is_compiling_flag"),
    *_of("torch.fx", "graph", "Node._erased"),
    *_of("torch.fx.experimental.proxy_tensor", "tracing", "get_proxy_mode", "make_fx"),
    *_of(
        "torch.fx.experimental.symbolic_shapes", "sizes", "free_unbacked_symbols", "guard_or_false", "statically_known_true"
    ),
    *_of("torch._prims.rng_prims", "graph", "run_with_rng_state"),
    *_of("torch.nn.attention.flex_attention", "frontend", "_validate_device"),
    *_of("torch.nn.attention.flex_attention", "higher_order", "_create_empty_block_mask"),
    *_of("torch.utils", "graph", "_pytree"),
    *_of("torch.utils._python_dispatch", "higher_order, tracing", "_disable_current_modes"),
    *_of("torch.utils._python_dispatch", "graph", "is_traceable_wrapper_subclass"),
    *_of("torch.utils._sympy.functions", "sizes", "CeilDiv", "FloatTrueDiv", "FloorDiv", "IntTrueDiv", "Mod"),
    *_of("torch.utils._sympy.functions", "sizes", "RoundToInt", "ToFloat"),
    *_of("torch.utils._sympy.interp", "sizes", "sympy_interp"),
    *_of("torch.utils._sympy.reference", "sizes", "PythonReferenceAnalysis"),
    *_of("torch.utils._sympy.value_ranges", "sizes", "ValueRanges", "bound_sympy"),
)


def missing() -> list[PrivateName]:
    """Return the names that this torch lacks."""
    return [name for name in NAMES if not name.exists()]


def check() -> None:
    """Raise UnsupportedTorchError if this torch lacks a name that gradfuse needs."""
    absent = missing()
    if absent:
        raise UnsupportedTorchError(absent)
