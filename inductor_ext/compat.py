"""The only door to torch's private names: a new torch release is this one file's work.

Every other module imports what it needs of Inductor, Dynamo and AOTAutograd from here, and no other module asks for a
version. Supported: torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import sympy
import torch
import torch._dynamo.utils as dynamo_utils
import torch._inductor.config as inductor_config
import torch._inductor.decomposition as _decomposition
import torch.nn.attention.flex_attention as _flex_module
from torch._dynamo import eval_frame, lookup_backend, register_backend
from torch._dynamo.backends.registry import _COMPILER_FNS
from torch._guards import detect_fake_mode
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._inductor import ir
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import empty, empty_strided, fallback_handler, lowerings
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, autotune_select_algorithm, realize_inputs
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
from torch._inductor.utils import get_donated_idxs
from torch._inductor.virtualized import V, ops
from torch._logging._internal import trace_log, trace_structured
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Mod
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

# The package shadows this module with the op of the same name.
_flex_ops = importlib.import_module("torch._higher_order_ops.flex_attention")

__all__ = [
    "CeilDiv",
    "CustomGraphPass",
    "FlexBlockMask",
    "FloorDiv",
    "Mod",
    "PointwiseSubgraphLowering",
    "SymbolicGridFn",
    "V",
    "ValueRanges",
    "associative_scan_hop",
    "autotune",
    "bound_sympy",
    "compile_fx",
    "compile_fx_inner",
    "detect_fake_mode",
    "deterministic_lowerings",
    "empty",
    "empty_strided",
    "flex_attention_backward_hop",
    "flex_attention_hop",
    "full",
    "guarded_true",
    "inductor_config",
    "ir",
    "lookup_backend",
    "lowerings",
    "make_template",
    "masks_in_registers",
    "ops",
    "override_lowerings",
    "realize",
    "register",
    "register_decomposition",
    "relax_captured_scans",
    "relax_front_end_checks",
    "scan_op",
    "statically_known_true",
    "trace",
    "while_loop_op",
    "zeros_and_scatter",
]

associative_scan_hop = torch.ops.higher_order.associative_scan
flex_attention_hop = torch.ops.higher_order.flex_attention
flex_attention_backward_hop = torch.ops.higher_order.flex_attention_backward
zeros_and_scatter = torch.ops.flex_lib.zeros_and_scatter.default

# ---------------------------------------------------------------- Dynamo: registration and the CPU training check


def register(name: str, backend: Callable[..., Any]) -> None:
    """Make ``backend`` known to ``torch.compile(backend=name)`` where no installed entry point does so.

    Loading an entry point imports this package, and Dynamo then registers what it loaded: it refuses a name it has already.
    """
    if not entry_points(group="torch_dynamo_backends", name=name) and _COMPILER_FNS.get(name) is not backend:
        register_backend(compiler_fn=backend, name=name)


def _compiling_backend() -> Any:
    """The ``compiler_fn`` of the frame that Dynamo is tracing now, wrappers removed; None outside a trace."""
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


#: Where what wraps a backend keeps it: Dynamo's own wrappers, partial functions, decorators.
_WRAPPED = ("compiler_fn", "_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "func", "__wrapped__")


def _unwrapped(compiler_fn: Any) -> Any:
    """The backend inside one wrapper; a backend that is not wrapped is returned as it is."""
    # Under DistributedDataParallel the compiler is a bound method of Dynamo's optimizer, which holds the backend.
    owner = getattr(compiler_fn, "__self__", None)
    inner = getattr(owner, "backend_compile_fn", None)
    for attribute in _WRAPPED:
        inner = getattr(compiler_fn, attribute, None) if inner is None else inner
    return compiler_fn if inner is None else inner


def check_options_at_once(backend: Callable[..., Any], check: Callable[..., Any]) -> None:
    """Have ``torch.compile`` itself call ``check(mode=, options=)`` for ``backend``, as it checks Inductor's itself."""
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
    """Lift two of flex_attention's refusals while ``backend`` compiles, and only then; no backend gets a say in them.

    The device check (CPU tensors that need a gradient) stands in the public function, which Dynamo inlines. The check that
    a score_mod's output depends on its score (torch 2.15) stands in the op's autograd, which Dynamo runs on fake tensors
    before it hands over a graph. Under any other backend, and in eager mode, the original code runs.
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

    The op's autograd stands in the way already when Dynamo runs it on fake tensors; what AOTAutograd differentiates later is
    what the backend makes of the node. There the refusal is in force, so no gradient can get lost.
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


# ---------------------------------------------------------------- Inductor: configuration


def inductor_options() -> list[str]:
    """Every option that ``torch.compile(options=...)`` takes for Inductor."""
    return sorted(inductor_config.get_config_copy())


def inductor_patches(mode: str | None, options: dict[str, Any], dynamic: bool | None) -> dict[str, Any]:
    """The configuration that ``backend="inductor"`` would set for ``mode`` and ``options``, checked as it checks them."""
    return dict(torch._TorchCompileInductorWrapper(mode, options, dynamic).config)


def reset_cudagraphs() -> None:
    """Forget recorded CUDA graphs, as ``torch._dynamo.reset`` asks of Inductor's own wrapper."""
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


def custom_passes(value: Any) -> list[Any]:
    """A custom-pass option (None, one pass or, from torch 2.13, several) as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def scalar_indexing() -> contextlib.AbstractContextManager[Any]:
    """Inside, ``table[i]`` with a 0-d tensor i is an op that vmap knows, as flex_attention traces score_mods."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def is_traced() -> bool:
    """Whether somebody collects the artifacts of a structured trace (TORCH_TRACE)."""
    return bool(trace_log.handlers)


def trace_artifact(name: str, text: str) -> None:
    """Put a text into the structured trace, where tlparse finds it."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def donated_buffers() -> list[int] | None:
    """The saved tensors that the backward which is being compiled may overwrite.

    Inductor's key of a backward graph knows nothing of them (torch 2.11 to 2.15): a backward that must keep them, for
    ``retain_graph``, would take the code of one that overwrites what it reads, and a second call would be wrong.
    """
    return get_donated_idxs()


def cacheable(functions: dict[str, str], patches: dict[str, Any]) -> dict[str, Any]:
    """The configuration by which the caches of AOTAutograd and Inductor take graphs with these functions, and our loops.

    ``functions`` gives each one's qualified name and what its behaviour depends on, which joins the keys; what the user's
    configuration ``patches`` names stays.
    """
    name = "unsafe_marked_cacheable_functions"
    loops = {f"{op.__module__}.{op.__name__}": "" for op in (scan_op, while_loop_op)}
    return {name: {**patches.get(name, getattr(inductor_config, name)), **loops, **functions}}


def register_decomposition(op: Any, decomposition: Callable[..., Any]) -> None:
    """Put an op of ours into Inductor's table of decompositions, for good: a table passed to compile_fx has no cache key."""
    _decomposition.decompositions[op] = decomposition
    _decomposition.fast_random_decomps.cache_clear()


def fallback(op: Any) -> Callable[..., Any]:
    """The lowering that calls a custom op's own code."""
    return fallback_handler(op._opoverload, add_to_fallback_set=False)


@contextlib.contextmanager
def override_lowerings(table: dict[Any, Callable[..., Any]]) -> Iterator[None]:
    """Swap entries of Inductor's table of lowerings and put the old ones back on any exit."""
    before = {op: lowerings.get(op) for op in table}
    lowerings.update(table)
    try:
        yield
    finally:
        for op, lowering in before.items():
            if lowering is None:
                lowerings.pop(op, None)
            else:
                lowerings[op] = lowering


@contextlib.contextmanager
def masks_in_registers() -> Iterator[None]:
    """Inside the block Inductor's Triton masks a value that a kernel reads of what it computed itself.

    Before 2.15 it leaves that to a load, and there is none: ``pad(softmax(x)[:-1], (0, 1)).sum()`` comes out as 1.
    """
    from torch._inductor.codegen.triton import TritonKernelOverrides
    from torch._inductor.codegen.triton import ops as triton_ops

    stock = TritonKernelOverrides.masked
    if "store_cache" in stock.__code__.co_names:
        yield
        return

    def masked(mask: Any, body: Any, other: Any) -> Any:
        (output,) = body.graph.find_nodes(op="output")
        kept = any(a.target == "load" and a.args[1] in V.kernel.cse.store_cache for a in output.args)
        result = stock(mask, body, other)
        return triton_ops.where(mask, result, triton_ops.constant(other, result.dtype)) if kept else result

    TritonKernelOverrides.masked = staticmethod(masked)
    try:
        yield
    finally:
        TritonKernelOverrides.masked = staticmethod(stock)


def uses_triton_on_cpu() -> bool:
    """Whether Inductor emits Triton for CPU tensors (the interpreter harness does)."""
    return inductor_config.cpu_backend == "triton"


# ---------------------------------------------------------------- flex_attention's higher-order ops


class FlexBlockMask(NamedTuple):
    """The block_mask operand of the flex_attention ops; torch 2.13 put four entries before the block sizes."""

    query_length: Any
    key_length: Any
    kv_num_blocks: Any
    kv_indices: Any
    full_kv_num_blocks: Any
    full_kv_indices: Any
    q_num_blocks: Any
    q_indices: Any
    full_q_num_blocks: Any
    full_q_indices: Any
    query_block_size: Any
    key_block_size: Any
    mask_mod: Any

    @classmethod
    def of(cls, operand: Sequence[Any]) -> FlexBlockMask:
        """Read the operand of any supported torch: ten entries in front, three at the end."""
        return cls(*operand[:10], *operand[-3:])


# ---------------------------------------------------------------- Inductor: IR and templates


def full(size: Sequence[Any], value: float, dtype: torch.dtype, device: torch.device) -> Any:
    """A contiguous tensor of one value, realized and registered on the graph that is being lowered.

    The layout is fixed at once: Inductor pads the strides of a flexible one (from 1024 elements), and a template that
    computes addresses for itself would write between the rows.
    """
    box = lowerings[torch.ops.aten.full](list(size), value, dtype=dtype, device=device)
    box.realize()
    box.data.data.layout = ir.FixedLayout(device, dtype, list(size), contiguous_strides(size))
    return box


def store_at(target: Any, load: Callable[..., Any], size: Sequence[Any], at: Callable[..., Any]) -> Any:
    """``target[at(index)] = load(index)`` for every index of ``size``; ``target`` is changed."""
    target.realize()
    scatter = ir.Scatter(
        device=target.get_device(),
        dtype=target.get_dtype(),
        inner_fn=load,
        ranges=list(size),
        output_indexer=at,
        scatter_mode=None,
    )
    buffer = ir.ComputedBuffer(name=None, layout=ir.MutationLayoutSHOULDREMOVE(target), data=scatter)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)
    return target


def add_in_order(target: Any, place: Any, values: Any) -> Any:
    """``target[place] += values`` by ATen's sorted index_put, whose order of additions is fixed; ``target`` is changed."""
    operands = [ir.ExternKernel.realize_input(x) for x in (place, values)]
    ir.IndexPutFallback(torch.ops.aten.index_put_.default, target, [operands[0]], operands[1], True)
    return target


def realize(nodes: Sequence[Any]) -> list[Any]:
    """Give every IR node of the list a buffer with a frozen layout; None and symbolic integers pass through."""
    out = [realize_inputs(_by_pointer(x)) if isinstance(x, ir.IRNode) else x for x in nodes]
    for node in out:
        if isinstance(node, ir.IRNode):
            with contextlib.suppress(NotImplementedError):
                node.freeze_layout()
    return out


def stored(x: Any) -> Any:
    """An IR node whose value is in a buffer of its own, which what reads it loads and does not compute anew."""
    x.realize()
    buffer = x.data.data
    if isinstance(buffer, ir.ComputedBuffer):
        # Without this, one that is computed of positions alone is put into what reads it, as a sympy expression.
        buffer._force_realize = True
    return x


def _by_pointer(node: Any) -> Any:
    """Inductor passes a one-element CPU tensor to a Triton kernel by value; a template wants its address."""
    one_on_cpu = node.get_device().type == "cpu" and sympy.prod(node.get_size()) == 1
    return ir.ExternKernel.copy_input(node) if one_on_cpu else node


def require_contiguous(node: Any) -> Any:
    """``node`` in a contiguous buffer."""
    return ir.ExternKernel.require_contiguous(node)


def in_order_of(node: Any, strides: Sequence[Any]) -> Any:
    """``node`` with its dims in the memory order of ``strides``, without a copy where its layout is still open."""
    return ir.ExternKernel.require_stride_order(node, ir.get_stride_order(strides, V.graph.sizevars.shape_env))


def input_buffer(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A 0-d placeholder that a template replaces by a tile when the subgraph is inlined."""
    return ir.TensorBox.create(ir.InputBuffer(name=name, layout=ir.FixedLayout(device, dtype, [], [])))


def fixed_layout(device: torch.device, dtype: torch.dtype, size: Sequence[Any], stride: Sequence[Any]) -> Any:
    """A layout that Inductor may not change."""
    return ir.FixedLayout(device, dtype, list(size), stride=[sympy.sympify(s) for s in stride])


def node_layout(output: int | None = None) -> Any:
    """The layout that the node which is being lowered has by its fake implementation (or one of its outputs has)."""
    value = V.graph.current_node.meta["val"]
    value = value if output is None else value[output]
    size, stride = ([x.node.expr if isinstance(x, torch.SymInt) else x for x in xs] for xs in (value.shape, value.stride()))
    return fixed_layout(value.device, value.dtype, size, stride)


def dense_strides(size: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Dense strides of ``size`` in the dimension order of ``like``, the last dimension innermost.

    This is the layout that flex_attention's fake implementation promises for outputs and gradients.
    """
    order = list(ir.get_fill_order(like, V.graph.sizevars.shape_env))
    last = len(size) - 1
    if sympy.sympify(size[last]) != 1 or order[0] != last:
        order = [last, *(d for d in order if d != last)] if order[0] != last else order
    strides: list[Any] = [0] * len(size)
    running: Any = sympy.Integer(1)
    for d in order:
        strides[d] = running
        running = running * size[d]
    return strides


def make_template(name: str, grid: Callable[..., Any], source: str) -> TritonTemplate:
    """A TritonTemplate whose input layouts are frozen where this torch has the switch."""
    extra = {}
    if "always_freeze_layout" in inspect.signature(TritonTemplate.__init__).parameters:
        extra["always_freeze_layout"] = True
    return TritonTemplate(name=name, grid=grid, source=source, **extra)


def autotune(
    name: str,
    choices: list[Any],
    inputs: Sequence[Any],
    layout: Any,
    input_gen_fns: dict[int, Callable[..., Any]],
    subgraph_inputs: Sequence[Any],
    subgraph_outputs: Sequence[Any],
) -> Any:
    """Pick the fastest choice (the only one outside max-autotune) and return its output.

    The subgraphs' inputs and outputs are left on the template buffer, where Inductor looks for the symbolic integers
    that an inlined subgraph uses.
    """
    nodes = [x for x in inputs if isinstance(x, ir.IRNode)]
    out = autotune_select_algorithm(name, choices, nodes, layout, input_gen_fns=input_gen_fns)
    if isinstance(out, tuple):
        out = out[0]
    template_buffer = out.data.data
    template_buffer.subgraph_inps = list(subgraph_inputs)
    template_buffer.subgraph_outs = list(subgraph_outputs)
    return out


def hint(value: Any) -> int:
    """The size that autotuning assumes for a symbolic integer."""
    sizevars = V.graph.sizevars
    read = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint
    return int(read(value))


def length(size: Any) -> int:
    """A size of Dynamo's graph as it was when that was traced, without a guard on it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def known_at_most(value: Any, most: int) -> bool:
    """Whether a size is known to be at most ``most``."""
    return V.graph.sizevars.statically_known_leq(value, most)


def size_hint(size: Any) -> int | None:
    """The size that an int or SymInt of a graph had when it was traced; None where data decides it."""
    return size if isinstance(size, int) else size.node.hint


def guarded_true(condition: Any) -> bool:
    """Whether a condition on sizes holds; where they are symbolic and it holds for the traced ones, a guard makes it so.

    A condition that does not hold for the traced sizes is False without a guard.
    """
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    if statically_known_true(condition):
        return True
    return condition.node.hint is True and guard_or_false(condition)


def architecture(device: torch.device) -> int:
    """Compute capability as one number (90 is 9.0); 90 too where there is no GPU and the interpreter runs the kernels."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def has_out_dtype_matmul(device: torch.device) -> bool:
    """Whether half-precision matmuls can write fp32 there: fake tensors claim so everywhere, kernels exist on CUDA."""
    return device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype") and hasattr(torch.ops.aten.bmm, "dtype")


def has_tma(device: torch.device) -> bool:
    """Whether a kernel on ``device`` may add a whole tile into memory by TMA.

    The interpreter cannot. Under ``cpp_wrapper`` gradients came out wrong by orders of magnitude, one tensor at a time: its
    launcher gives a kernel no memory for its descriptors, as far as its source tells.
    """
    return device.type == "cuda" and architecture(device) >= 90 and not inductor_config.cpp_wrapper


def is_aligned(node: Any, alignment: int) -> bool:
    """Whether the first element of a buffer or view is known to lie at a multiple of ``alignment`` (at most 16) bytes.

    Inductor keeps count of inputs on GPUs only; the interpreter does not care.
    """
    offset = node.get_layout().offset * node.get_dtype().itemsize
    if node.get_device().type != "cpu" and node.get_name() in V.graph.unaligned_buffers:
        return False
    return V.graph.sizevars.statically_known_true(sympy.Eq(offset % alignment, 0))


def contiguous_strides(size: Sequence[Any]) -> list[Any]:
    """Strides of a contiguous tensor."""
    return list(ir.FlexibleLayout.contiguous_strides(list(size)))


def inherited_block_options(device: torch.device, dtype: torch.dtype, head_dim: int, query_length: Any) -> Any:
    """Stock's tuned tile sizes: ``(forward configs, backward configs)``; one each outside max-autotune."""
    choices = V.choices
    forward = choices.get_flex_attention_fwd_configs
    args: tuple[Any, ...] = (head_dim, dtype, device.type)
    if "seq_len" in inspect.signature(forward).parameters:
        args = (head_dim, query_length, dtype, device.type)
    return forward(*args), choices.get_flex_attention_bwd_configs(head_dim, dtype, device.type)


# ---------------------------------------------------------------- tracing


def saved_tensors_hooks_disabled() -> contextlib.AbstractContextManager[Any]:
    """Inside, autograd calls no hooks for what it saves (as while Dynamo traces)."""
    return dynamo_utils._disable_saved_tensors_hooks_during_tracing()


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


def trace_apart(fn: Callable[..., Any], dtypes: Sequence[torch.dtype]) -> torch.fx.GraphModule:
    """Trace ``fn`` over real 0-d tensors of ``dtypes`` to ATen ops, whatever is being traced around it."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        traced = make_fx(fn)(*(torch.ones((), dtype=dtype) for dtype in dtypes))
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


@functools.cache
def source_hash(root: str) -> str:
    """A hash of every source file under ``root``, for cache keys."""
    import hashlib
    from pathlib import Path

    digest = hashlib.sha256()
    for path in sorted(Path(root).rglob("*")):
        if path.suffix in (".py", ".jinja"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """Compile from scratch inside the block: neither the FX-graph cache nor AOTAutograd's is read or written."""
    import torch._functorch.config as functorch_config

    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


def serializable(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What ``compile_fx`` returned, as ``aot_compile`` wants it while that precompiles a function.

    torch 2.11 wraps only what its own backends return; later ones wrap whatever can be serialized, as this does.
    """
    import torch._functorch.config as functorch_config
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable, SerializableCallable

    precompiling = functorch_config.bundled_autograd_cache and functorch_config.bypass_autograd_cache_key
    if not precompiling or isinstance(compiled, SerializableCallable) or getattr(compiled, "serialize", None) is None:
        return compiled
    return BundledAOTAutogradSerializableCallable(compiled)


@contextlib.contextmanager
def deterministic_lowerings(wanted: bool) -> Iterator[None]:
    """Lower what surrounds our kernels (the gradient of a gather) as under ``torch.use_deterministic_algorithms(True)``."""
    before, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or before:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextlib.contextmanager
def scans_allowed(gm: torch.fx.GraphModule) -> Iterator[None]:
    """Let Inductor turn every ``scan`` that we put into ``gm`` into a loop that is right.

    Two things are in the way. The loop counter is read as a Python scalar, which fake tensors allow only where Dynamo saw
    the loop itself (or under fullgraph=True). And a loop body that updates what it carries in place hands its input back
    as its output, after which the memory planner takes that buffer for dead and reuses it (seen in torch 2.13).
    """
    values = [n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    fake_mode = detect_fake_mode(values)
    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    if fake_mode is None or not any(graph.find_nodes(op="call_function", target=scan_op) for graph in graphs):
        yield
        return
    before = fake_mode.allow_scalar_outputs
    fake_mode.allow_scalar_outputs = True
    try:
        with inductor_config.patch(inplace_buffers=False):
            yield
    finally:
        fake_mode.allow_scalar_outputs = before
