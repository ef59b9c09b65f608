"""What Target answers for the devices that PyTorch describes in ways of their own."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from inductor_ext.core.target import Target

KB = 1024


def target(capability, shared_memory, hip=None):
    """The target for a GPU that answers so to PyTorch's queries."""
    major, minor = capability
    properties = SimpleNamespace(
        major=major,
        minor=minor,
        shared_memory_per_block_optin=shared_memory * KB,
        L2_cache_size=4 * KB**2,
        multi_processor_count=132,
    )
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        mock.patch.object(torch.version, "hip", hip),
    ):
        return Target.of(torch.device("cuda"))


@pytest.mark.parametrize(
    "capability, shared_memory, family, tma",
    [
        ((8, 0), 163, "ampere", False),
        ((8, 6), 99, "consumer", False),
        ((8, 9), 99, "consumer", False),
        ((9, 0), 227, "hopper", True),
        ((10, 0), 227, "blackwell", True),
        ((12, 0), 99, "consumer", False),
    ],
)
def test_the_family_goes_by_architecture_and_shared_memory(capability, shared_memory, family, tma):
    found = target(capability, shared_memory)
    assert (found.family, found.tma, found.shared_memory) == (family, tma, shared_memory * KB)


def test_an_mi300_is_no_hopper_although_its_capability_is_9_4():
    found = target((9, 4), 64, hip="6.4")
    assert (found.vendor, found.family, found.tma, found.tf32) == ("amd", "ampere", False, False)


def test_a_gpu_that_is_not_here_has_the_shared_memory_of_its_architecture():
    assert Target.absent(120).shared_memory == 99 * KB and Target.absent(120).family == "consumer"
