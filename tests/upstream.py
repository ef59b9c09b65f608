"""Run one of PyTorch's own test files with gradfuse instead of Inductor.

    python -m tests.upstream ~/pytorch/test/inductor/test_flex_attention.py -k TestLearnableBiases

The file is the user's, of the release that is installed. What it compiles by ``torch.compile`` without a backend, or with
``backend="inductor"``, is compiled by gradfuse; other backends (a test's own, "eager", "aot_eager") stay. Everything
after the file goes to pytest. A test that expects a refusal of stock's which gradfuse lifts is skipped, with this reason.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo import testing

import inductor_ext  # noqa: F401  (registers the backend)

#: What stock says where it refuses what gradfuse does.
LIFTED = (
    "Using multiple indexing operations on the same tensor that requires gradients in a score_mod function is not currently "
    "supported.",
    "FlexAttention does not support backward on CPU. Please set the input requires_grad to False or use another device.",
)


def ours(backend: Any) -> Any:
    """The backend to use for the one that was asked for."""
    return "gradfuse" if backend == "inductor" else backend


class CompileCounterWithBackend(testing.CompileCounterWithBackend):
    """Upstream's counter of compilations, which looks up another backend by name: the one of ours."""

    def __init__(self, backend: str) -> None:
        super().__init__(ours(backend))


@contextlib.contextmanager
def gradfuse_for_inductor() -> Iterator[None]:
    """Inside the block ``torch.compile`` and ``Module.compile`` mean gradfuse where they would mean Inductor."""
    original, leave = torch.compile, unittest.case._AssertRaisesContext.__exit__

    @functools.wraps(original)
    def compile(*args: Any, backend: Any = "inductor", **kwargs: Any) -> Any:
        return original(*args, backend=ours(backend), **kwargs)

    def skip_what_is_lifted(self: Any, kind: type | None, *rest: Any) -> Any:
        expected = self.expected_regex
        if kind is None and expected is not None and any(expected.search(message) for message in LIFTED):
            raise unittest.SkipTest(f"gradfuse lifts this refusal: {expected.pattern}")
        return leave(self, kind, *rest)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", compile))
        stack.enter_context(mock.patch.object(testing, "CompileCounterWithBackend", CompileCounterWithBackend))
        stack.enter_context(mock.patch.object(unittest.case._AssertRaisesContext, "__exit__", skip_what_is_lifted))
        yield


def run(file: Path, arguments: list[str]) -> int:
    """Run the file under pytest; returns pytest's exit status."""
    file = file.resolve()
    tests = next((p for p in file.parents if p.name == "test"), file.parent)
    # Upstream's files import one another from their own folder and from PyTorch's ``test``.
    sys.path[:0] = [str(file.parent), str(tests)]
    options = ["-c", os.devnull, "--rootdir", str(file.parent), "-p", "no:cacheprovider", "--import-mode=importlib"]
    with gradfuse_for_inductor():
        return int(pytest.main([*options, str(file), *arguments]))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a test file of PyTorch")
    given, arguments = parser.parse_known_args()
    if not given.file.is_file():
        parser.error(f"{given.file} is not a file")
    return run(given.file, arguments)


if __name__ == "__main__":
    sys.exit(main())
