"""Tell the lowering the kind of each captured tensor that is a table made by hoisting.

This is one entry of ``kernel_options``, which AOTAutograd and the caches pass on without changes.
"""

from __future__ import annotations

import json
from typing import Any

from .kinds import FootprintKind, TiledKind, named

OPTION = "GRADFUSE_TABLES"


def described(kinds: dict[int, FootprintKind]) -> dict[str, str]:
    """Return the kernel option for tables, given by their numbers among the captured tensors.

    There is no option if no kernel reads a table by tile.
    """
    tiled = {str(i): str(kind) for i, kind in kinds.items() if isinstance(kind, TiledKind)}
    return {OPTION: json.dumps(tiled)} if tiled else {}


def read(kernel_options: dict[str, Any]) -> dict[int, TiledKind]:
    """Return the kinds that ``described`` has put into these options."""
    return {int(i): named(text) for i, text in json.loads(kernel_options.get(OPTION, "{}")).items()}
