"""Where the Jinja templates lie: package data when installed, the top-level directory in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTALLED = _PACKAGE / "templates"

#: Directory of the ``*.py.jinja`` files.
TEMPLATE_DIR: Path = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "templates"


def load(name: str, *macros: str) -> str:
    """The source of ``templates/<name>.py.jinja``, the files of macros that it uses in front."""
    files = [*(f"{m}.jinja" for m in macros), f"{name}.py.jinja"]
    return "".join((TEMPLATE_DIR / f).read_text() for f in files)
