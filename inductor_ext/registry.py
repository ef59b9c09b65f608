"""Everything that ``disable`` may name: the passes, the kernels of our ops, and the lowerings of ops of PyTorch."""

from __future__ import annotations

from . import lowerings, passes

#: Each name and what it is, in one line, in the order in which a graph meets them.
NAMES: dict[str, str] = {}
for each in (*passes.ORDER, *lowerings.REPLACED, *lowerings.KERNELS):
    # A pass and a lowering of one name are left out together; the pass comes first.
    NAMES.setdefault(each.name, each.what)
