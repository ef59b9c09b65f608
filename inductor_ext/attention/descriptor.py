"""What hoisting tells the lowering: the kind of each captured tensor that is a table of its own making.

It travels as one entry of ``kernel_options``, which AOTAutograd and the caches hand on as they are.
"""

from __future__ import annotations

import json
from typing import Any

from .kinds import BY_NAME, FootprintKind, TiledKind

OPTION = "GRADFUSE_TABLES"


def described(kinds: dict[int, FootprintKind]) -> dict[str, str]:
    """The kernel option for tables by their position among the captured tensors; none where no kernel reads one by tile."""
    tiled = {str(i): kind.name for i, kind in kinds.items() if isinstance(kind, TiledKind)}
    return {OPTION: json.dumps(tiled)} if tiled else {}


def read(kernel_options: dict[str, Any]) -> dict[int, TiledKind]:
    """The kinds that ``described`` put into these options."""
    return {int(i): BY_NAME[name] for i, name in json.loads(kernel_options.get(OPTION, "{}")).items()}
