"""The options of the backend: this module documents and validates them.

gradfuse takes all modes and options of Inductor, and a few options of its own:

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

    It is a RuntimeError because ``backend="inductor"`` raises that for its own options.
    """


@dataclass(frozen=True)
class Options:
    """The options of gradfuse itself. Every other entry of ``options=`` is an option of Inductor.

    deterministic: make gradients bitwise reproducible. This is also on under
        ``torch.use_deterministic_algorithms(True)``. A lowering that would need atomics then raises an error that names
        the expression, and never gives results that silently differ between runs.
    strict: raise an error instead of falling back to stock Inductor's lowering.
    disable: the names of passes and lowerings that are left out. The names in the environment variable
        GRADFUSE_DISABLE, separated by commas, are added.
    verify: compare the first call of every compiled graph with the graph as it was traced.
    dump: the directory to which each graph is written before and after each pass, and also the code of Inductor.
    """

    deterministic: bool = False
    strict: bool = False
    disable: frozenset[str] = frozenset()
    verify: bool = False
    dump: str | None = None

    def enabled(self, name: str) -> bool:
        """Return whether the rewrite or lowering of that name is enabled."""
        return name not in self.disable


#: The names of the options of gradfuse itself.
OPTIONS: tuple[str, ...] = tuple(f.name for f in fields(Options))


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return (
        f"did you mean {' or '.join(repr(n) for n in near)}?"
        if near
        else f"the options of gradfuse itself are {list(OPTIONS)}"
    )


def _checked_disable(value: Any) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionError(f"option 'disable' takes a list of names, got {type(value).__name__}: {value!r}")
    # This is imported here because the registry imports every feature, and the features import this module.
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
    """Split ``options=`` into the options of gradfuse, which are validated here, and those of Inductor.

    Raises OptionError for an unknown name, with the nearest valid names, and for a value of a wrong type of one of our
    options. A value of a wrong type of one of Inductor's options raises an error when Inductor checks it.
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
