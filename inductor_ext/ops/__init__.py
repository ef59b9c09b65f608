"""Custom ops with an eager reference each; importing this registers them."""

from .depend import depend

__all__ = ["depend"]
