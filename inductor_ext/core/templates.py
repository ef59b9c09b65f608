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
    """The source of ``templates/<name>.py.jinja`` (name: "feature/kernel"), the files of macros that it uses in front."""
    files = [*(f"{m}.jinja" for m in macros), f"{name}.py.jinja"]
    return "".join((TEMPLATE_DIR / f).read_text() for f in files)


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
