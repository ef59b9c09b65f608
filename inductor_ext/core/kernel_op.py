"""A custom op of ours with its kernel: what is supported, the lowering, and the one fallback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..options import Options
from ..torch_api.lowering import V, fallback, overload
from .report import record, user_line
from .target import Target


def needs_triton(*operands: Any) -> str | None:
    """Why operands cannot go to a Triton kernel: the device of the first tensor has none."""
    device = next(x.get_device() for x in _flat(operands) if hasattr(x, "get_device"))
    return None if Target.of(device).triton else f"device {device.type!r} has no kernel"


def runs_anywhere(*operands: Any) -> str | None:
    """For lowerings into Inductor's own IR, which has code for every device."""
    return None


def _flat(operands: Any) -> list[Any]:
    return [x for operand in operands for x in (operand if isinstance(operand, (list, tuple)) else [operand])]


@dataclass(frozen=True)
class KernelOp:
    """A custom op that passes put into graphs, and how it is lowered.

    name: what ``disable`` and reports call it. what: one line for the documents. op: the op, whose own code is the eager
    reference. lower: takes the op's operands as Inductor's IR and returns its results. unsupported: why given operands
    cannot be lowered by it, or None. Where they cannot, or where the name is disabled, the op's own code runs, which reports
    call ``otherwise``.
    """

    name: str
    what: str
    op: Any
    lower: Callable[..., Any]
    unsupported: Callable[..., str | None] = needs_triton
    otherwise: str = "the op's own code"

    @property
    def overload(self) -> Any:
        """The op as a node of a graph has it."""
        return overload(self.op)

    def lowering(self, options: Options) -> Callable[..., Any]:
        """The entry of Inductor's table of lowerings."""

        def lowered(*operands: Any) -> Any:
            reason = self.unsupported(*operands) if options.enabled(self.name) else "disabled"
            if reason is None:
                return self.lower(*operands)
            label = self.overload._schema.name.split("::")[1]
            record(self.name, label, self.otherwise, reason, user_line(V.graph.current_node))
            return fallback(self.op)(*operands)

        return lowered
