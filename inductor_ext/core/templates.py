"""Load and run the Jinja templates.

They are package data in an installed package, and a top-level directory in a checkout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..torch_api.template import Template, autotune, triton_type
from .fx import HALF

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTALLED = _PACKAGE / "templates"

#: The directory of the ``*.py.jinja`` files, with one folder per feature.
TEMPLATE_DIR: Path = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "templates"


def load(name: str, *macros: str) -> str:
    """The source of ``templates/<name>.py.jinja``, with the files of macros that it uses in front of it.

    name: "feature/kernel". macros: each is a file ("feature/file"), or every file of a folder ("feature/folder/*").
    """
    files = [path for m in macros for path in sorted(TEMPLATE_DIR.glob(f"{m}.jinja"))]
    return "".join(path.read_text() for path in [*files, TEMPLATE_DIR / f"{name}.py.jinja"])


class Listed(tuple):
    """A tuple of objects that a template iterates over with ``for``.

    Inductor writes every option of a template as a constant at the head of the kernel; ``str`` of this tuple, the number of
    its objects, is what it writes there. Inductor also writes the ``repr`` of options into the kernel's metadata and into
    cache keys, as Python source; ``repr`` of this tuple is a string literal that contains all of its objects.
    """

    def __str__(self) -> str:
        return str(len(self))

    def __repr__(self) -> str:
        return repr(super().__repr__())


def bits(indices: Iterable[int]) -> int:
    """A set of indices as one option of a template: bit i is set for index i."""
    return sum(1 << index for index in indices)


def run(
    template: Template,
    configs: Sequence[dict[str, Any]],
    inputs: list[Any],
    mutated: list[Any],
    layout: Any,
    call_sizes: Sequence[Any],
    subgraphs: Sequence[Any] = (),
    **template_options: Any,
) -> Any:
    """The output of a template, run with the fastest of ``configs``. All configs share the ``template_options``.

    inputs: the operands, as Inductor's IR, which include ``mutated``, the tensors that the kernel writes besides its output.
    layout: that of the output. call_sizes: the sizes that the grid function takes. subgraphs: the subgraphs that the
    template inlines; they compute on tiles of the template only.
    """
    if layout.dtype not in (torch.float32, *HALF):
        # What follows in the kernel computes with the output in this dtype. Inductor's default is fp32.
        template_options = {"ACC_TYPE": triton_type(layout.dtype), **template_options}
    choices: list[Any] = []
    for config in configs:
        template.maybe_append_choice(
            choices=choices,
            input_nodes=inputs,
            layout=layout,
            subgraphs=list(subgraphs),
            mutated_inputs=mutated,
            call_sizes=call_sizes,
            **template_options,
            **config,
        )
    return autotune(template.name, choices, inputs, layout, {}, [], mutated)
