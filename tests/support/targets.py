"""Compile for another target than the device at hand."""

import contextlib
import dataclasses
from unittest import mock

from inductor_ext.core.target import Target


@contextlib.contextmanager
def on_target(**facts):
    """Inside the block ``Target.of`` answers as for the device, but for the fields in ``facts``."""
    found = Target.of
    with mock.patch.object(Target, "of", lambda device: dataclasses.replace(found(device), **facts)):
        yield
