"""A Dynamo graph as a Python file that compiles and verifies it, beside a file with its inputs."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

_HEAD = '''"""Written by ``gradfuse bisect``: one graph of a model, with the inputs of its first call."""

import operator

import torch
import torch.fx._symbolic_trace
from math import inf, nan
from torch import device
'''

_TAIL = """
inputs = torch.load({inputs!r}, weights_only=False)
torch.compile({name}(), backend="gradfuse", options={{"verify": True, "disable": {disable!r}}})(*inputs)
print("It computes what it should.")
"""


def source(gm: GraphModule, name: str = "Model") -> str:
    """The classes of a graph and of the graphs in it."""
    children = [(target, child) for target, child in gm.named_children() if isinstance(child, GraphModule)]
    classes = [source(child, f"{name}_{target}") for target, child in children]
    made = "".join(f"\n        self.{target} = {name}_{target}()" for target, _ in children)
    code = gm.graph.python_code("self").src
    init = f"    def __init__(self):\n        super().__init__(){made}\n"
    return "\n\n".join([*classes, f"class {name}(torch.nn.Module):\n{init}\n{textwrap.indent(code.strip(), '    ')}\n"])


def saving(gm: GraphModule, compiled: Callable[..., Any], path: Path, disable: list[str]) -> Callable[..., Any]:
    """``compiled``, which is made of ``gm`` and whose first call writes the file and its inputs."""
    pending = [True]

    @functools.wraps(compiled)
    def run(*inputs: Any) -> Any:
        if pending:
            pending.clear()
            data = path.with_suffix(".pt").absolute()
            copies = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
            torch.save(copies, data)
            tail = _TAIL.format(inputs=str(data), name="Model", disable=disable)
            path.write_text(f"{_HEAD}\n\n{source(gm)}\n{tail}")
        return compiled(*inputs)

    return run
