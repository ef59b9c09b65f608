"""Write a Dynamo graph as a Python file that compiles and verifies it, and its inputs to a second file beside it."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

_HEAD = '''"""``gradfuse bisect`` wrote this file: one graph of a model, with the inputs of its first call."""

import operator

import torch
import torch.fx._symbolic_trace
from math import inf, nan
from torch import device


def call_flex_attention(query, key, value, score_mod, block_mask, scale, options, captured=(), mask_captured=()):
    """Call the op in the form that Dynamo accepts: the captured tensors are in the closures."""
    score = lambda *indices: score_mod(*indices, *captured)
    mask = lambda *indices: block_mask[-1](*indices, *mask_captured)
    mask_operand = (*block_mask[:-1], mask)
    return torch.ops.higher_order.flex_attention(query, key, value, score, mask_operand, scale, options)
'''

_TAIL = """
inputs = torch.load({inputs!r}, weights_only=False)
torch.compile({name}(), backend="gradfuse", options={{"verify": True}})(*inputs)
print("The graph computes the right results.")
"""


def source(gm: GraphModule, name: str = "Model") -> str:
    """Return the source of the classes of a graph and of the graphs in it."""
    children = [(target, child) for target, child in gm.named_children() if isinstance(child, GraphModule)]
    classes = [source(child, f"{name}_{target}") for target, child in children]
    made = "".join(f"\n        self.{target} = {name}_{target}()" for target, _ in children)
    # Dynamo traces the file again, and the op takes its captured tensors as operands only in a graph that is already traced.
    code = gm.graph.python_code("self").src.replace("torch.ops.higher_order.flex_attention(", "call_flex_attention(")
    init = f"    def __init__(self):\n        super().__init__(){made}\n"
    return "\n\n".join([*classes, f"class {name}(torch.nn.Module):\n{init}\n{textwrap.indent(code.strip(), '    ')}\n"])


def saving(gm: GraphModule, compiled: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """Wrap ``compiled``, which was compiled from ``gm``, so that its first call writes the file and its inputs."""
    pending = [True]

    @functools.wraps(compiled)
    def run(*inputs: Any) -> Any:
        if pending:
            pending.clear()
            data = path.with_suffix(".pt").absolute()
            copies = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
            torch.save(copies, data)
            tail = _TAIL.format(inputs=str(data), name="Model")
            path.write_text(f"{_HEAD}\n\n{source(gm)}\n{tail}")
        return compiled(*inputs)

    return run
