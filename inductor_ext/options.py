"""Every option of the backend: validated here, documented here.

gradfuse takes all of Inductor's modes and options and a few of its own beside them:

    torch.compile(model, backend="gradfuse", options={"strict": True, "max_autotune": True})
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from .torch_api.config import inductor_options


class OptionError(RuntimeError):
    """An option of ``torch.compile(backend="gradfuse")`` that does not exist or has the wrong type.

    It is a RuntimeError because that is what ``backend="inductor"`` raises for its own options.
    """


@dataclass(frozen=True)
class Options:
    """gradfuse's own options; everything else in ``options=`` is Inductor's.

    deterministic: bitwise reproducible gradients. Also on under ``torch.use_deterministic_algorithms(True)``. A lowering
        that would need atomics refuses, naming the expression, instead of being silently irreproducible.
    strict: raise instead of falling back to stock Inductor's lowering.
    disable: names of rewrites and lowerings to leave out (see ``registry.NAMES``). The environment's GRADFUSE_DISABLE, names
        with commas between them, adds to it.
    verify: check the first call of every compiled graph against the graph as it was traced (``verify.py``).
    dump: a directory for each graph before and after each pass, and for the code that Inductor wrote (``dump.py``).
    """

    deterministic: bool = False
    strict: bool = False
    disable: frozenset[str] = frozenset()
    verify: bool = False
    dump: str | None = None

    def enabled(self, name: str) -> bool:
        """Whether the rewrite or lowering of that name is to run."""
        return name not in self.disable


#: Names of gradfuse's own options.
OPTIONS: tuple[str, ...] = tuple(f.name for f in fields(Options))


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"gradfuse's own are {list(OPTIONS)}"


def _checked_disable(value: Any) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionError(f"option 'disable' takes a list of names, got {type(value).__name__}: {value!r}")
    # The registry imports every feature, and features take the options.
    from .registry import NAMES

    names = list(value)
    for name in names:
        if name not in NAMES:
            raise OptionError(f"option 'disable' names {name!r}, which does not exist: {_nearest(str(name), NAMES)}")
    return frozenset(names)


def _checked_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"option {name!r} takes a bool, got {type(value).__name__}: {value!r}")
    return value


def _checked_directory(value: Any) -> str | None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise OptionError(f"option 'dump' takes the path of a directory, got {type(value).__name__}: {value!r}")
    return None if value is None else os.fspath(value)


def split(options: dict[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Split ``options=`` into gradfuse's own, validated, and Inductor's.

    Raises OptionError for an unknown name (with the nearest valid ones) and for a wrong type of one of ours; a wrong
    type of one of Inductor's raises when Inductor checks it.
    """
    ours: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    ours["disable"] = _checked_disable(filter(None, os.environ.get("GRADFUSE_DISABLE", "").split(",")))
    theirs: dict[str, Any] = {}
    known = {*OPTIONS, *inductor_options()}
    for key, value in (options or {}).items():
        name = key.replace("-", "_")
        if name == "disable":
            ours[name] |= _checked_disable(value)
        elif name == "dump":
            ours[name] = _checked_directory(value)
        elif name in OPTIONS:
            ours[name] = _checked_bool(name, value) or ours.get(name, False)
        elif name in known:
            theirs[name] = value
        else:
            raise OptionError(f"Unexpected optimization option {key}, {_nearest(name, known)}")
    if ours["deterministic"] and "deterministic" in known - set(OPTIONS):
        theirs.setdefault("deterministic", True)
    return Options(**ours), theirs
