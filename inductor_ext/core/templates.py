"""Where the Jinja templates lie (package data when installed, the top-level directory in a checkout), and how one is run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..torch_api.template import autotune

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTALLED = _PACKAGE / "templates"

#: Directory of the ``*.py.jinja`` files, one folder a feature.
TEMPLATE_DIR: Path = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "templates"


def load(name: str, *macros: str) -> str:
    """The source of ``templates/<name>.py.jinja`` (name: "feature/kernel"), the files of macros that it uses in front.

    Macros are a file ("feature/file") or every file of a folder ("feature/folder/*").
    """
    files = [path for m in macros for path in sorted(TEMPLATE_DIR.glob(f"{m}.jinja"))]
    return "".join(path.read_text() for path in [*files, TEMPLATE_DIR / f"{name}.py.jinja"])


class Listed(tuple):
    """Objects that a template goes through with ``for``.

    Inductor writes every option of a template as a constant at the head of the kernel, where this one shows how many there
    are. It also writes the ``repr`` of options into the kernel's metadata and into cache keys, as Python source: that of
    this one is a string which tells all of its objects.
    """

    def __str__(self) -> str:
        return str(len(self))

    def __repr__(self) -> str:
        return repr(super().__repr__())


def bits(places: Iterable[int]) -> int:
    """Places as an option of a template: a bit each."""
    return sum(1 << place for place in places)


def run(
    template: Any,
    configs: Sequence[dict[str, Any]],
    inputs: list[Any],
    mutated: list[Any],
    layout: Any,
    call_sizes: Sequence[Any],
    subgraphs: Sequence[Any] = (),
    **options: Any,
) -> Any:
    """The output of a template: the fastest of ``configs`` beside the ``options`` that all share.

    subgraphs: what the template inlines, of its own tiles alone.
    """
    choices: list[Any] = []
    for config in configs:
        template.maybe_append_choice(
            choices=choices,
            input_nodes=inputs,
            layout=layout,
            subgraphs=list(subgraphs),
            mutated_inputs=mutated,
            call_sizes=call_sizes,
            **options,
            **config,
        )
    return autotune(template.name, choices, inputs, layout, {}, [], mutated)
