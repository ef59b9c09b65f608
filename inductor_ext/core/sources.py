"""Functions of numbers as operands of ops: their source, which is the only form of code that an op takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule


def source_of(module: GraphModule) -> str:
    """The source of a graph of ATen ops, as one line, because Inductor writes the operands of ops into comments."""
    signature, *statements = (line.strip() for line in module.code.splitlines() if line.strip())
    return f"{signature} {'; '.join(statements)}"


def function_of(source: str, device: torch.device) -> Callable[..., list[Tensor]]:
    """The function that a source stands for; constants in it are made on ``device``."""
    namespace: dict[str, Any] = {"torch": torch, "inf": float("inf"), "nan": float("nan"), "device": lambda **_: device}
    exec(source, namespace)
    return lambda *operands: namespace["forward"](None, *operands)
