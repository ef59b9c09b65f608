"""PyTorch's own bisector of compilers, which learns that our backend consists of passes that it can turn off."""

from __future__ import annotations

from collections.abc import Iterable

from torch._inductor.compiler_bisector import BACKENDS, BisectSubsystem, CompilerBisector

#: The module by which users start it.
MODULE: str = CompilerBisector.__module__


def offer(backend: str, subsystems: Iterable[str]) -> None:
    """Let ``CompilerBisector.do_bisect`` try ``backend`` after Inductor, and then its subsystems one by one.

    The bisector has no function for this. Its backends are a dict, to which PyTorch itself adds entries at run time.
    """
    BACKENDS.setdefault(backend, [BisectSubsystem(name) for name in subsystems])


def turned_off(backend: str, subsystems: Iterable[str], what: str) -> frozenset[str]:
    """Return the subsystems that a bisection turns off now; ``what`` names the graph in its result."""
    return frozenset(name for name in subsystems if CompilerBisector.disable_subsystem(backend, name, lambda: what))
