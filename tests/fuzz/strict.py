"""Compare a program with eager mode: values, dtypes, strides, aliases, and the inputs after the call.

If gradfuse differs from eager mode, stock Inductor runs too. If it makes the same difference, a difference of strides is
accepted, and any other is "stock_too".
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import judge as judging
from . import runs
from .program import Program

_PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}


def _tolerance(program: Program) -> float:
    """The difference that fused rounding may cause: two units of the least precise dtype in the program."""
    eps = [torch.finfo(dtype).eps for name, dtype in _PRECISIONS.items() if name in program.source]
    return 2 * max(eps, default=1e-5 / 2)


def _strides(x: Tensor) -> list[int]:
    return [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]


def _same(got: Tensor, want: Tensor, tolerance: float) -> bool:
    if tolerance == 0.0 or not want.is_floating_point():
        return torch.equal(got, want) or bool(((got == want) | ((got != got) & (want != want))).all())
    nan = want.isnan()
    return torch.equal(nan, got.isnan()) and judging.relative_error(got[~nan], want[~nan]) <= tolerance


def _compare(program: Program, got: runs.Run, want: runs.Run, mode: str) -> dict[str, str]:
    """Return the differences: a dict from the kind and the name of a tensor to a description."""
    found: dict[str, str] = {}
    exact = 0.0 if program.exact and mode == "graphs" else _tolerance(program)
    if len(got.outputs) != len(want.outputs):
        return {"number of outputs": f"{len(got.outputs)}, not {len(want.outputs)}"}
    for kind, pairs in (("output", (got.outputs, want.outputs)), ("input", (got.inputs, want.inputs))):
        for i, (x, y) in enumerate(zip(*pairs, strict=True)):
            if x.dtype != y.dtype or x.shape != y.shape:
                found[f"{kind} {i}"] = f"{x.dtype} {list(x.shape)}, not {y.dtype} {list(y.shape)}"
                continue
            if not _same(x, y, exact):
                found[f"value of {kind} {i}"] = f"off by {judging.relative_error(x, y):.1e}"
            if _strides(x) != _strides(y):
                found[f"strides of {kind} {i}"] = f"{list(x.stride())}, not {list(y.stride())}"
    if got.aliases != want.aliases:
        found["aliases"] = f"{got.aliases}, not {want.aliases}"
    for name, x, y in zip(want.names, got.gradients, want.gradients, strict=True):
        if y is None and x is None:
            continue
        x = torch.zeros_like(y) if x is None else x
        y = torch.zeros_like(x) if y is None else y
        if not _same(x, y, _tolerance(program)):
            found[f"gradient of {name}"] = f"off by {judging.relative_error(x, y):.1e}"
    return found


def _eager(program: Program, device: str) -> runs.Run:
    with runs.loaded(program) as module:
        inputs = runs.draw_inputs(module, device, judging.DRAW)
        return runs.execute(module.program, inputs, runs.leaf_names(module, inputs), overwrites=program.overwrites)


def _same_code_as_stock(program: Program, device: str, found: dict[str, str]) -> bool:
    """Whether the values and aliases that differ are those of stock after code generation.

    Stock leaves out roundings between two casts, and copies of what is only returned. Its graphs still have them.
    """
    if any(not what.startswith("value") and what != "aliases" for what in found):
        return False
    got, stock = (runs.compiled(program, device, "compiled", own, [judging.DRAW])[0] for own in (False, True))
    return not set(found) & set(_compare(program, got, stock, "graphs"))


def judge_strictly(program: Program, mode: str, device: str) -> judging.Result:
    """Run and judge one program."""
    try:
        eager = _eager(program, device)
    except Exception as error:
        return judging.Result("discarded", f"eager mode raises {judging.one_line(error)}")
    try:
        (got,) = runs.compiled(program, device, mode, False, [judging.DRAW])
    except Exception as error:
        return judging.crash(program, mode, device, error)
    found = _compare(program, got, eager, mode)
    if not found:
        return judging.Result("ok")
    try:
        (stock,) = runs.compiled(program, device, mode, True, [judging.DRAW])
    except Exception as error:
        return judging.Result("wrong", f"{found} (stock raises {judging.one_line(error)})"[:300])
    unlike_stock = _compare(program, got, stock, mode)
    reason = "; ".join(f"{k} {v}" for k, v in found.items())[:300]
    if set(found) & set(unlike_stock):
        return judging.Result("stock_too" if _same_code_as_stock(program, device, found) else "wrong", reason)
    return judging.Result("ok" if all(k.startswith("strides") for k in found) else "stock_too", reason)
