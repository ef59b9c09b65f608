"""The hardware for which kernels are emitted: its sizes, and the features that it supports."""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch

from ..torch_api.config import inductor_config, uses_triton_on_cpu

Family = Literal["ampere", "consumer", "hopper", "blackwell"]
FAMILIES: tuple[Family, ...] = get_args(Family)

#: The bytes of shared memory that one program may use, by architecture. This is for GPUs that are not here.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
#: TMA needs addresses and strides that are multiples of this number of bytes.
TMA_ALIGNMENT = 16


@functools.cache
def has_gluon() -> bool:
    """Return whether this Triton has the language Gluon."""
    try:
        return importlib.util.find_spec("triton.experimental.gluon") is not None
    except ModuleNotFoundError:
        return False


@dataclass(frozen=True)
class Target:
    """The properties of a device that the choice of tiles and the lowerings use.

    vendor: "nvidia", "amd", or "none" if Triton's interpreter runs the kernels on a CPU. architecture: the compute
    capability as one number (90 is 9.0). shared_memory: the bytes of shared memory that a program may use. l2: the bytes of
    the L2 cache. tma: whether a kernel may load, store and add whole tiles by TMA. gluon: whether a kernel may be in Gluon,
    for Hopper. triton: whether Inductor emits Triton for this device. multiprocessors: their number, which is that of an
    H200 for a GPU that is not here. The speeds, in bytes and in atomic adds of fp32 per second and in seconds for a sort,
    are those of an H200 (docs/notes/gathers.md) on every device.
    """

    bandwidth: ClassVar[float] = 3.5e12
    atomics: ClassVar[float] = 0.6e12
    sort_seconds: ClassVar[float] = 60e-6

    vendor: str
    architecture: int
    shared_memory: int
    l2: float
    tma: bool
    triton: bool
    multiprocessors: int = 132
    gluon: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """Return the target for tensors on ``device``."""
        vendor = "amd" if torch.version.hip else "nvidia"
        if device.type != "cuda":
            interpreted = device.type == "cpu" and uses_triton_on_cpu()
            return replace(cls.absent(90), vendor="none", triton=interpreted)
        if not torch.cuda.is_available():
            # Fake tensors of a GPU that is not here, as tests of graphs have them.
            return replace(cls.absent(90), vendor=vendor)
        properties = torch.cuda.get_device_properties(device)
        shared_memory = getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY[90])
        architecture = 10 * properties.major + properties.minor
        l2, multiprocessors = properties.L2_cache_size, properties.multi_processor_count
        target = cls(vendor, architecture, shared_memory, l2, tma=False, triton=True, multiprocessors=multiprocessors)
        # TMA is not used under ``cpp_wrapper``. There, gradients were wrong by orders of magnitude, one tensor at a time. As
        # far as its source tells, its launcher gives a kernel no memory for its TMA descriptors.
        tma = vendor == "nvidia" and target.adds_tiles and not inductor_config.cpp_wrapper
        return replace(target, tma=tma, gluon=tma and target.family == "hopper" and has_gluon())

    @classmethod
    def absent(cls, architecture: int) -> Target:
        """Return the target for an NVIDIA GPU that is not here. TMA is not used, and the L2 cache has no limit."""
        return cls("nvidia", architecture, SHARED_MEMORY[architecture], math.inf, tma=False, triton=True)

    @property
    def family(self) -> Family:
        """The family of GPUs whose tiles are used: that of a data centre GPU since 9.0, otherwise Ampere or consumer.

        Ampere's tiles need the fewest registers, so every other GPU takes them; an AMD MI300 reports a compute capability of
        9.4. If an NVIDIA GPU has less shared memory than 8.0, as 8.6, 8.9 and 12.0 have, it takes smaller tiles. A GPU of
        compute capability 12.0 has the instructions that Ampere's tiles use, but not those of 10.0.
        """
        if self.vendor != "amd" and self.shared_memory < SHARED_MEMORY[80]:
            return "consumer"
        if self.vendor == "amd" or self.architecture < 90 or self.architecture >= 120:
            return "ampere"
        return "hopper" if self.architecture < 100 else "blackwell"

    @property
    def adds_tiles(self) -> bool:
        """Whether adding whole tiles in memory is fast, as on data centre GPUs since 9.0."""
        return self.family in ("hopper", "blackwell")

    @property
    def tf32(self) -> bool:
        """Whether Triton multiplies fp32 matrices in tf32."""
        return self.vendor != "amd"

    @property
    def out_dtype_matmul(self) -> bool:
        """Whether half-precision matmuls can write fp32: only on CUDA, although fake tensors claim it on every device."""
        on_gpu = self.vendor != "none"
        return on_gpu and hasattr(torch.ops.aten.mm, "dtype") and hasattr(torch.ops.aten.bmm, "dtype")
