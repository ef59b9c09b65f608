"""What keeps our code apart in the FX-graph and AOTAutograd caches: version, source, templates and options."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from torch.fx import Graph

from .core.templates import TEMPLATE_DIR
from .options import Options
from .torch_api.config import CustomGraphPass, donated_buffers


class CacheKey(CustomGraphPass):
    """A pass that changes nothing and, by its uuid, keeps our code apart from stock's in every cache.

    It runs the user's own pass of that slot, whose uuid joins the key (a pass without one makes the caches step aside,
    as it does under stock Inductor).
    """

    def __init__(self, options: Options, users: list[Any]) -> None:
        self.options = options
        self.users = users

    def __call__(self, graph: Graph) -> None:
        """Run the user's own passes."""
        for user_pass in self.users:
            user_pass(graph)

    def uuid(self) -> Any:
        """The part of the cache key that is ours; None where one of the user's passes has none."""
        source, templates = source_hash(Path(__file__).parent), source_hash(TEMPLATE_DIR)
        flags = f"{self.options.deterministic},{self.options.strict},{sorted(self.options.disable)}"
        parts = ["gradfuse", source, templates, flags, f"donated {donated_buffers()}"]
        for user_pass in self.users:
            uuid = getattr(user_pass, "uuid", lambda: None)()
            if uuid is None:
                return None
            parts.append(repr(uuid))
        return "|".join(parts)


@functools.cache
def source_hash(root: Path) -> str:
    """A hash of every Python file and template under ``root``."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".jinja"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
