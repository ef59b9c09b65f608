"""The hardware that kernels are emitted for: every number that belongs to a device, and what it can do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..torch_api.config import inductor_config, uses_triton_on_cpu

Family = Literal["ampere", "hopper", "blackwell"]

#: Shared memory that one program may use, in bytes, on compute capability 9.0.
_SHARED_MEMORY_OF_HOPPER = 227 * 1024


@dataclass(frozen=True)
class Target:
    """A device as tile tables and lowerings see it.

    vendor: "nvidia", "amd", or "none" where Triton's interpreter runs the kernels on a CPU. architecture: the compute
    capability as one number (90 is 9.0). shared_memory: the bytes of it that a program may use. l2: bytes of the L2 cache.
    tma: whether a kernel may load, store and add whole tiles by TMA. triton: whether Inductor emits Triton for this device.
    """

    vendor: str
    architecture: int
    shared_memory: int
    l2: float
    tma: bool
    triton: bool

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """The target that tensors on ``device`` are compiled for."""
        if device.type != "cuda":
            interpreted = device.type == "cpu" and uses_triton_on_cpu()
            return cls("none", 90, _SHARED_MEMORY_OF_HOPPER, math.inf, tma=False, triton=interpreted)
        if not torch.cuda.is_available():
            # Fake tensors of a GPU that is not here, as tests of graphs have them.
            return cls("nvidia", 90, _SHARED_MEMORY_OF_HOPPER, math.inf, tma=False, triton=True)
        properties = torch.cuda.get_device_properties(device)
        vendor = "amd" if torch.version.hip else "nvidia"
        shared_memory = getattr(properties, "shared_memory_per_block_optin", _SHARED_MEMORY_OF_HOPPER)
        architecture = 10 * properties.major + properties.minor
        target = cls(vendor, architecture, shared_memory, properties.L2_cache_size, tma=False, triton=True)
        # Under ``cpp_wrapper`` gradients came out wrong by orders of magnitude, one tensor at a time: its launcher gives a
        # kernel no memory for its TMA descriptors, as far as its source tells.
        return replace(target, tma=vendor == "nvidia" and target.family != "ampere" and not inductor_config.cpp_wrapper)

    @property
    def family(self) -> Family:
        """Which tiles suit: those of data centre GPUs since 9.0, or, for every other, Ampere's, which need least.

        An AMD MI300 answers 9.4 when it is asked for its compute capability. Compute capability 12.0 has the instructions of
        Ampere's tiles and 99 KB of shared memory, not those of 10.0.
        """
        if self.vendor == "amd" or self.architecture < 90 or self.architecture >= 120:
            return "ampere"
        return "hopper" if self.architecture < 100 else "blackwell"

    @property
    def out_dtype_matmul(self) -> bool:
        """Whether half-precision matmuls can write fp32: fake tensors claim so everywhere, kernels exist on CUDA."""
        on_gpu = self.vendor != "none"
        return on_gpu and hasattr(torch.ops.aten.mm, "dtype") and hasattr(torch.ops.aten.bmm, "dtype")
