"""The part of the cache keys that is ours: version, source, templates and options.

It separates our code from stock's in the FX-graph cache and in AOTAutograd's cache.
"""

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
    """A pass that changes nothing itself. Its uuid separates our code from stock's in every cache.

    It runs the user's passes of the same slot, and their uuids become part of the key. If one of them has no uuid, the
    caches are not used, which is also what stock Inductor does.
    """

    def __init__(self, options: Options, users: list[Any]) -> None:
        self.options = options
        self.users = users

    def __call__(self, graph: Graph) -> None:
        """Run the user's own passes."""
        for user_pass in self.users:
            user_pass(graph)

    def uuid(self) -> Any:
        """Return our part of the cache key, or None if one of the user's passes has no uuid."""
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
    """Return a hash of all Python files and templates under ``root``."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".jinja"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
