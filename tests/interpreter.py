"""Run the emitted Triton kernels on CPU tensors, by Triton's interpreter.

Inductor emits Triton for CPU tensors when ``cpu_backend`` is "triton"; it also asks Triton for an active driver, so a stub
answers. Usable by every lowering: compile under ``triton_on_cpu()`` and call.
"""

import contextlib

import torch
from torch._inductor import config


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

    def get_device_interface(self):
        return torch.cpu

    def get_benchmarker(self):
        return lambda fn, **_: (fn(), [1.0, 1.0, 1.0])[1]


@contextlib.contextmanager
def triton_on_cpu(**patches):
    """Inside the block, gradfuse and Inductor compile CPU graphs to Triton kernels that the interpreter runs."""
    import triton

    triton.runtime.driver.set_active(_StubDriver())
    with config.patch(cpu_backend="triton", fx_graph_cache=False, compile_threads=1, **patches):
        yield
