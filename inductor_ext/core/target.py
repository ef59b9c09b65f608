"""The hardware for which kernels are emitted: its sizes, and the features that it supports."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from ..torch_api.config import inductor_config, uses_triton_on_cpu

Family = Literal["ampere", "hopper", "blackwell"]
FAMILIES: tuple[Family, ...] = get_args(Family)

#: The bytes of shared memory that one program may use on compute capability 9.0.
_SHARED_MEMORY_OF_HOPPER = 227 * 1024


@dataclass(frozen=True)
class Target:
    """The properties of a device that the choice of tiles and the lowerings use.

    vendor: "nvidia", "amd", or "none" if Triton's interpreter runs the kernels on a CPU. architecture: the compute
    capability as one number (90 is 9.0). shared_memory: the bytes of shared memory that a program may use. l2: the bytes of
    the L2 cache. tma: whether a kernel may load, store and add whole tiles by TMA. triton: whether Inductor emits Triton
    for this device.
    """

    vendor: str
    architecture: int
    shared_memory: int
    l2: float
    tma: bool
    triton: bool

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """Return the target for tensors on ``device``."""
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
        # TMA is not used under ``cpp_wrapper``. There, gradients were wrong by orders of magnitude, one tensor at a time. As
        # far as its source tells, its launcher gives a kernel no memory for its TMA descriptors.
        return replace(target, tma=vendor == "nvidia" and target.family != "ampere" and not inductor_config.cpp_wrapper)

    @property
    def family(self) -> Family:
        """The family of GPUs whose tiles are used: that of a data centre GPU since 9.0, otherwise Ampere.

        Ampere's tiles need the fewest resources, so every other GPU takes them. An AMD MI300 reports a compute capability of
        9.4. A GPU of compute capability 12.0 has the instructions that Ampere's tiles use and 99 KB of shared memory, but
        not the instructions and the shared memory of 10.0.
        """
        if self.vendor == "amd" or self.architecture < 90 or self.architecture >= 120:
            return "ampere"
        return "hopper" if self.architecture < 100 else "blackwell"

    @property
    def out_dtype_matmul(self) -> bool:
        """Whether half-precision matmuls can write fp32: only on CUDA, although fake tensors claim it on every device."""
        on_gpu = self.vendor != "none"
        return on_gpu and hasattr(torch.ops.aten.mm, "dtype") and hasattr(torch.ops.aten.bmm, "dtype")
