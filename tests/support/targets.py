"""Compile for another target than the device at hand."""

import contextlib
import dataclasses
from unittest import mock

from inductor_ext.core.target import SHARED_MEMORY, Target


@contextlib.contextmanager
def on_target(**facts):
    """Inside the block ``Target.of`` answers as for the device, but for the fields in ``facts``.

    An ``architecture`` comes with its shared memory.
    """
    if "architecture" in facts:
        facts = {"shared_memory": SHARED_MEMORY[facts["architecture"]], **facts}
    found = Target.of
    with mock.patch.object(Target, "of", lambda device: dataclasses.replace(found(device), **facts)):
        yield
