"""The names that ``disable`` takes: the passes, the kernels of our ops, and the lowerings of ops of PyTorch."""

from __future__ import annotations

from . import lowerings, passes

#: Each name with one line that describes it, in the order in which they apply to a graph.
NAMES: dict[str, str] = {}
for each in (*passes.ORDER, *lowerings.REPLACED, *lowerings.KERNELS):
    # A pass and a lowering of the same name are disabled together. The line is that of the pass, which comes first.
    NAMES.setdefault(each.name, each.what)
NAMES |= lowerings.CHOICES
