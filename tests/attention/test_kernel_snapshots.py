"""The emitted kernels, word for word: a reviewer reads the diff."""

import pytest
import torch

from tests.support import snapshots
from tests.support.emitted import body

from .attention_kernels import ATTENTIONS, sources, sources_of_windows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="emitted through the interpreter's CPU path")


@pytest.mark.parametrize("name", ATTENTIONS)
def test_emitted_kernels(name):
    for direction, source in sources(name).items():
        snapshots.check(__file__, f"{name}_{direction}", body(source))


def test_emitted_kernels_of_windows():
    for direction, source in sources_of_windows().items():
        snapshots.check(__file__, f"windows_{direction}", body(source))
