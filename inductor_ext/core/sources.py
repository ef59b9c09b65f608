"""The source of functions of numbers.

A custom op takes no functions as operands. It takes their source instead, which is a string.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule


def source_of(module: GraphModule) -> str:
    """The source of a graph of ATen ops.

    It is one line, because Inductor writes the operands of ops into comments.
    """
    signature, *statements = (line.strip() for line in module.code.splitlines() if line.strip())
    return f"{signature} {'; '.join(statements)}"


def function_of(source: str, device: torch.device) -> Callable[..., list[Tensor]]:
    """The function that ``source`` (from ``source_of``) defines. Its constants are created on ``device``."""
    namespace: dict[str, Any] = {"torch": torch, "inf": float("inf"), "nan": float("nan"), "device": lambda **_: device}
    exec(source, namespace)
    return lambda *operands: namespace["forward"](None, *operands)
