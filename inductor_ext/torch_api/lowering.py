"""Inductor's tables of lowerings and decompositions, and changes to Inductor while one of our graphs compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Container, Iterator
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch._inductor.decomposition as _decomposition
from torch._guards import detect_fake_mode
from torch._higher_order_ops.scan import scan_op
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import empty, empty_strided, fallback_handler, lowerings, pointwise_cat
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
from torch._inductor.virtualized import V, ops
from torch._ops import OpOverload

__all__ = ["PointwiseSubgraphLowering", "V", "empty", "empty_strided", "lowerings", "ops", "pointwise_cat"]


def register_decomposition(op: Any, decomposition: Callable[..., Any]) -> None:
    """Add an op of ours to Inductor's table of decompositions, permanently: a table for compile_fx has no cache key."""
    _decomposition.decompositions[op] = decomposition
    _decomposition.fast_random_decomps.cache_clear()


def fallback(op: Any) -> Callable[..., Any]:
    """Return the lowering that calls the code of a custom op."""
    return fallback_handler(overload(op), add_to_fallback_set=False)


def overload(op: Any) -> Any:
    """Return the overload of a custom op, which is the target of a node in a graph."""
    return op._opoverload


@contextlib.contextmanager
def override_lowerings(table: dict[Any, Callable[..., Any]]) -> Iterator[None]:
    """Replace entries of Inductor's table of lowerings inside the block, and restore the old ones at every exit."""
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
    """Make Inductor's Triton code mask a value that a kernel has computed itself and then reads.

    Before 2.15 the load applies the mask, and here there is no load: ``pad(softmax(x)[:-1], (0, 1)).sum()`` would be 1.
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


@contextlib.contextmanager
def tuned_kernels(wanted: Callable[[Collection[torch.fx.Node]], bool]) -> Iterator[None]:
    """Let Inductor time several tiles of some of the kernels that it makes, as ``max_autotune_pointwise`` does for all.

    Other kernels are built once. wanted: says whether a kernel is one of these, from the nodes that it computes.
    """
    from torch._inductor.codegen.triton import TritonKernel

    stock = TritonKernel.codegen_kernel

    def codegen_kernel(self: Any, *args: Any, **kwargs: Any) -> str:
        nodes = set().union(*(scheduled.node.get_origins() for scheduled in self.features.scheduler_nodes()))
        every = inductor_config.max_autotune_pointwise
        with inductor_config.patch(max_autotune_pointwise=every or wanted(nodes)):
            return stock(self, *args, **kwargs)

    TritonKernel.codegen_kernel = codegen_kernel
    try:
        yield
    finally:
        TritonKernel.codegen_kernel = stock


@contextlib.contextmanager
def rows_kept(kernels: Container[Any]) -> Iterator[None]:
    """Keep Inductor from storing what these ops read with dim 1 innermost, as it stores 4-D tensors between convolutions.

    Their kernels load rows, so each would need a copy, or load single elements (a scan of Mamba took four times as long).
    """
    stock = GraphLowering.find_nodes_prefer_channels_last

    def found(self: Any) -> Any:
        read, nodes = set(), stock(self)
        for node in reversed(self.module.graph.nodes):
            if any(user.target in kernels or (user in read and _is_view(user)) for user in node.users):
                read.add(node)
        return nodes - read

    GraphLowering.find_nodes_prefer_channels_last = found
    try:
        yield
    finally:
        GraphLowering.find_nodes_prefer_channels_last = stock


def _is_view(node: torch.fx.Node) -> bool:
    """Whether the result of a node is a view of its operand."""
    return isinstance(node.target, OpOverload) and node.target.is_view


@contextlib.contextmanager
def scans_allowed(gm: torch.fx.GraphModule) -> Iterator[None]:
    """Let Inductor turn every ``scan`` that we put into ``gm`` into a correct loop.

    There are two problems. The loop counter is read as a Python scalar, which fake tensors allow only if Dynamo has traced
    the loop itself (or under fullgraph=True). And if a loop body updates its carried value in place, it returns its input as
    its output; the memory planner then thinks that nobody reads the buffer any more, and reuses it (seen in torch 2.13).
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
