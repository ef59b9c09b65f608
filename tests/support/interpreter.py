"""Run the emitted Triton kernels on CPU tensors, by Triton's interpreter.

Inductor emits Triton for CPU tensors when ``cpu_backend`` is "triton"; it also asks Triton for an active driver, so a
stub answers. Usable by every lowering: compile under ``triton_on_cpu()`` and call.
"""

import contextlib
import dataclasses
import math
from unittest import mock

import numpy as np
import pytest
import torch
from torch._inductor import config
from torch._inductor.runtime.hints import HeuristicType

from tests.support.targets import on_target
from tests.support.whole_tiles import whole_tiles

#: For tests of what only the machine without a GPU emits, and for those that run kernels here or there.
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
DEVICES = [
    pytest.param("interpreter", marks=INTERPRETED),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


class _StubDriver:
    """What Inductor and Triton's interpreter ask of a driver on a machine without a GPU."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device=None):
        return 0


#: libdevice has no interpreter implementation; these are the functions that score_mods reach.
_LIBDEVICE = {
    **{name: getattr(np, name) for name in ("exp", "log", "log1p", "expm1", "tanh", "sin", "cos", "floor", "ceil", "sqrt")},
    "pow": np.power,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "erf": np.vectorize(math.erf, otypes=[np.float32]),
}


def _interpreted(function):
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def call(*arguments, **_):
        data = function(*(a.handle.data for a in arguments)).astype(arguments[0].handle.data.dtype)
        return tl.core.tensor(TensorHandle(data, arguments[0].handle.dtype), arguments[0].type)

    return call


def _dot_of_bfloat16(create_dot):
    """The interpreter keeps bfloat16 as its 16 bits and multiplies those as integers; widen them first."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def widened(x):
        if x.dtype != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def call(self, a, b, d, *rest):
        return create_dot(self, widened(a), widened(b), d, *rest)

    return call


def _rounding_to_nearest(convert_float):
    """The interpreter truncates fp32 to bf16; a GPU rounds to nearest even."""
    import triton.language as tl

    def convert(data, source, destination, rounding_mode):
        if (source, destination) != (tl.float32, tl.bfloat16):
            return convert_float(data, source, destination, rounding_mode)
        rounded = torch.from_numpy(np.array(data, dtype=np.float32, copy=True)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)

    return convert


def _true_or_false(create_splat):
    """Keep a condition that is broadcast over a tile a boolean; the interpreter of Triton 3.9 turns it into integers."""

    def call(self, kind, value):
        tile = create_splat(self, kind, value)
        if value.data.dtype == np.bool_:
            tile.data = tile.data.astype(np.bool_)
        return tile

    return call


def _descriptor_reduce(self, kind, descriptor, value, indices):
    """What TMA's reduce-add does, which the interpreter lacks."""
    from triton._C.libtriton import ir

    pointers, mask = descriptor.materialize_pointers(indices)
    self.create_atomic_rmw(ir.ATOMIC_OP.FADD, pointers, value, mask, ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU)


def _in_large_blocks(init):
    """Give Inductor's own kernels few large programs, because the cost in the interpreter does not depend on their size."""

    def call(self, fn, triton_meta, configs, *rest, **named):
        meta, kind = named.get("inductor_meta") or {}, named.get("heuristic_type")
        # A sum of one element adds it by each lane of a block.
        one_element = (named.get("size_hints") or {}).get("x") == 1
        if kind is not HeuristicType.TEMPLATE and not meta.get("no_x_dim") and not one_element:
            for tile in configs:
                least = 1024 if kind is HeuristicType.POINTWISE and "YBLOCK" not in tile.kwargs else 64
                tile.kwargs["XBLOCK"] = max(tile.kwargs.get("XBLOCK", 1), least)
        init(self, fn, triton_meta, configs, *rest, **named)

    return call


def _of_garbage(empty_strided):
    """Fill new memory with values that are not zero, so that a read of memory that nobody wrote is found."""

    def call(size, stride, dtype):
        made = empty_strided(size, stride, dtype)
        if made.numel() and not made.is_complex():
            made.fill_(math.nan if made.is_floating_point() else dtype is torch.bool or 101)
        return made

    return call


@contextlib.contextmanager
def triton_on_cpu(tma=False, **patches):
    """Inside the block, gradfuse and Inductor compile CPU graphs to Triton kernels that the interpreter runs.

    Memory that a graph asks for is full of NaN until it is written.

    ``tma``: emit the form for GPUs that move tiles by TMA.
    """
    import triton
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from torch._inductor.scheduler import BaseSchedulerNode
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    triton.runtime.driver.set_active(_StubDriver())
    with contextlib.ExitStack() as stack:
        for name, function in _LIBDEVICE.items():
            stack.enter_context(mock.patch.object(triton_helpers.libdevice, name, _interpreted(function), create=True))
        dot = _dot_of_bfloat16(InterpreterBuilder.create_dot)
        stack.enter_context(mock.patch.object(InterpreterBuilder, "create_dot", dot))
        splat = _true_or_false(InterpreterBuilder.create_splat)
        stack.enter_context(mock.patch.object(InterpreterBuilder, "create_splat", splat))
        convert = _rounding_to_nearest(interpreter._convert_float)
        stack.enter_context(mock.patch.object(interpreter, "_convert_float", convert))
        reduce = mock.patch.object(InterpreterBuilder, "create_descriptor_reduce", _descriptor_reduce, create=True)
        stack.enter_context(reduce)
        # Overflow checks double the cost of every addition, and indices here are far from 2**31.
        options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        stack.enter_context(mock.patch.object(interpreter.interpreter_builder, "options", options))
        init = _in_large_blocks(triton_heuristics.CachingAutotuner.__init__)
        stack.enter_context(mock.patch.object(triton_heuristics.CachingAutotuner, "__init__", init))
        guards = torch._C._dynamo.guards
        stack.enter_context(mock.patch.object(guards, "_empty_strided_cpu", _of_garbage(guards._empty_strided_cpu)))
        # On a GPU, Inductor also fuses loops of different orders.
        stack.enter_context(mock.patch.object(BaseSchedulerNode, "is_cpu", lambda node: False))
        stack.enter_context(whole_tiles())
        stack.enter_context(on_target(tma=tma))
        stack.enter_context(config.patch(cpu_backend="triton", fx_graph_cache=False, compile_threads=1, **patches))
        yield
