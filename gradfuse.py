"""``import gradfuse`` is ``import inductor_ext``; the name also lets ``TORCH_LOGS="+gradfuse"`` name our logger."""

from inductor_ext import *  # noqa: F403
from inductor_ext import __version__  # noqa: F401
