"""A custom op of ours with its kernel: the operands that are supported, the lowering, and the fallback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..options import Options
from ..torch_api.lowering import V, fallback, overload
from .report import record, user_line
from .target import Target


def needs_triton(*operands: Any) -> str | None:
    """Return why operands cannot go to a Triton kernel, or None: the device of the first tensor may have no Triton."""
    device = next(x.get_device() for x in _flat(operands) if hasattr(x, "get_device"))
    return None if Target.of(device).triton else f"there is no kernel for the device {device.type!r}"


def runs_anywhere(*operands: Any) -> str | None:
    """Return None. This is for lowerings into Inductor's own IR, which can be compiled for every device."""
    return None


def _flat(operands: Any) -> list[Any]:
    return [x for operand in operands for x in (operand if isinstance(operand, (list, tuple)) else [operand])]


@dataclass(frozen=True)
class KernelOp:
    """A custom op that passes put into graphs, and how it is lowered.

    name: the name in ``disable`` and in reports. what: one line for the documents. op: the op, whose own code is the eager
    reference. lower: takes the op's operands as Inductor's IR and returns its results. unsupported: returns the reason why
    ``lower`` cannot take the operands, or None. If there is a reason, or if the name is disabled, the op's own code runs;
    reports call that ``otherwise``.
    """

    name: str
    what: str
    op: Any
    lower: Callable[..., Any]
    unsupported: Callable[..., str | None] = needs_triton
    otherwise: str = "the op's own code"

    @property
    def overload(self) -> Any:
        """The overload of the op, which is the target of a node in a graph."""
        return overload(self.op)

    def lowering(self, options: Options) -> Callable[..., Any]:
        """Return the entry of this op in Inductor's table of lowerings."""

        def lowered(*operands: Any) -> Any:
            reason = self.unsupported(*operands) if options.enabled(self.name) else f"{self.name!r} is disabled"
            if reason is None:
                return self.lower(*operands)
            label = self.overload._schema.name.split("::")[1]
            record(self.name, label, self.otherwise, reason, user_line(V.graph.current_node))
            return fallback(self.op)(*operands)

        return lowered
