"""Run one program with gradfuse and say whether it is right.

The reference is the same source run eagerly on float64 copies of its inputs (integers keep their dtype). In single
precision the bound of an error is the largest of three: 1e-5, three times the error of eager fp32, and the error of a
probability that rounding the largest score causes (softmax turns the absolute error of a score of 400 into a relative
error of 7e-5). In half precision the bound is 1.2 times the error of an emulation, which does the rounding steps of the
program with sums accumulated in fp32. A result that looks wrong is judged again over many draws of the inputs, as one
long vector, and is then compared with stock. If stock is equally wrong, the outcome is "stock_too".

A program is discarded if eager mode raises, if the reference is not finite, or if the error of eager fp32 is above 1e-3
(in half precision: that of the emulation above 0.3). A comparison of rounded floats has such errors.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .program import Program
from .runs import HALF, Run, compiled, eager, forward_of_stock, reference

SLACK = 1.2
#: A program counts as wrong only over this many draws together. The rounding errors of two right ways to compute a number
#: are independent, so their ratio is above 1.2 in 44 of 100 draws. The ratio of their root mean squares over 256 draws is
#: above 1.2 in 2 of 1,000 cases.
DRAWS = 256
#: Of a tensor with fewer elements one draw says little, however wrong it looks: the ratio of two rounding errors of a single
#: number is above 3 in a fifth of all draws.
FEW = 64
#: Seed of the inputs.
DRAW = 0


@dataclass
class Result:
    """``outcome`` is ok, wrong, crash, stock_too, stock_crashes_too or discarded, and ``reason`` is one line."""

    outcome: str
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome in ("wrong", "crash")


def relative_error(got: Tensor, want: Tensor) -> float:
    """The relative Frobenius error. Infinities have to agree."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    infinite = want.isinf()
    if not torch.equal(got[infinite], want[infinite]):
        return math.inf
    got, want = got.masked_fill(infinite, 0.0), want.masked_fill(infinite, 0.0)
    difference, scale = float((got - want).norm()), float(want.norm())
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale > 1e-6 else difference


def one_line(error: BaseException) -> str:
    """The type of an exception, and the first line that says something."""
    cause: BaseException = error
    while (inner := getattr(cause, "inner_exception", None) or cause.__cause__) is not None:
        cause = inner
    skip = ("The above exception", "While executing", "target:", "args[")
    lines = [line.strip() for line in str(cause).splitlines() if line.strip() and not line.strip().startswith(skip)]
    text = re.sub(r"\s+", " ", " | ".join(lines[:2]))
    return f"{type(cause).__name__}: {text}"[:240]


def _differences(program: Program, got: Run, exact: Run, eager_run: Run) -> list[tuple[str, float, float]]:
    """The name, the error and the bound of every tensor. The error is infinite if the shape or the dtype differs."""
    found = []
    dtype = getattr(torch, program.dtype)
    if len(got.outputs) != len(eager_run.outputs):
        return [("number of outputs", math.inf, 0.0)]
    for (name, x), (_, want), (_, eager_one) in zip(got.tensors(), exact.tensors(), eager_run.tensors(), strict=True):
        if want is None:
            found.append((name, 0.0 if x is None else float(x.abs().max()), 1e-6))
            continue
        x = torch.zeros_like(eager_one if eager_one is not None else want) if x is None else x
        eager_one = torch.zeros_like(want) if eager_one is None else eager_one
        # The logsumexp is float32 for every dtype of the inputs.
        alike = x.dtype == eager_one.dtype or (program.family == "score_mods" and x.dtype is torch.float32)
        if x.shape != want.shape or not alike:
            found.append((f"{name}: {x.dtype} {list(x.shape)}, not {eager_one.dtype} {list(want.shape)}", math.inf, 0.0))
            continue
        if not want.is_floating_point():
            found.append((name, 0.0 if torch.equal(x, want) else math.inf, 0.0))
            continue
        error, reference_error = relative_error(x, want), relative_error(eager_one, want)
        floor = max(1e-5, exact.rounding) if x.dtype not in HALF else torch.finfo(x.dtype).eps / 8
        if dtype is torch.float64 and x.dtype is dtype:
            floor = 1e-6
        # A scan sums in the order of a tree, and the emulation in the order of a loop.
        slack = 2.0 if program.family == "scans" else SLACK
        allowed = max(floor, (slack if x.dtype in HALF else 3) * reference_error)
        if float(want.norm()) < 1e-6:
            # The exact result is zero, so gradfuse and eager mode have nothing but rounding errors.
            allowed = max(1e-4, 4 * reference_error)
        found.append((name, error, allowed))
    return found


def _ill_conditioned(program: Program, exact: Run, eager_run: Run) -> str | None:
    limit = 0.3 if program.dtype in ("bfloat16", "float16") else 1e-3
    for (name, want), (_, x) in zip(exact.tensors(), eager_run.tensors(), strict=True):
        if want is None or x is None:
            continue
        if want.is_floating_point() and bool(want.isnan().any()):
            return f"{name} of the reference is not a number"
        if want.shape == x.shape and want.is_floating_point() and relative_error(x, want) > limit and want.norm() > 1e-6:
            return f"{name} of eager mode is off by {relative_error(x, want):.1e}"
    return None


def _report(bad: list[tuple[str, float, float]]) -> str:
    return "; ".join(f"{name}: {error:.1e}, allowed {allowed:.1e}" for name, error, allowed in bad)[:300]


def _pooled(runs: list[Run]) -> Run:
    """Concatenate the results of several draws, tensor by tensor, as if they were one run."""

    def together(tensors: tuple[Tensor | None, ...]) -> Tensor | None:
        there = [x.flatten() for x in tensors if x is not None]
        return torch.cat(there) if there else None

    outputs = [x for x in map(together, zip(*(r.outputs for r in runs), strict=True)) if x is not None]
    gradients = [together(draws) for draws in zip(*(r.gradients for r in runs), strict=True)]
    return Run(outputs, gradients, [], [], runs[0].names, statistics.fmean(r.rounding for r in runs))


def _over_draws(
    program: Program, device: str, mode: str, stock: bool, draws: list[int], options: dict[str, Any] | None = None
) -> list[tuple[str, float, float]]:
    """As ``_differences``, over several draws. The errors are summed before the division, so that no draw decides alone."""
    runs = compiled(program, device, mode, stock, draws, options)
    exact = _pooled([reference(program, device, draw) for draw in draws])
    eager_run = _pooled([eager(program, device, draw) for draw in draws])
    return _differences(program, _pooled(runs), exact, eager_run)


def judge(program: Program, mode: str = "graphs", device: str = "cpu", deterministic: bool = False) -> Result:
    """Run and judge one program."""
    if program.strides:
        from .strict import judge_strictly

        return judge_strictly(program, mode, device)
    if device == "cuda" and "16777213" in program.source:
        return Result(
            "discarded", "Triton fuses a product into a sum, which then rounds once: fp32 beyond its integers differs"
        )
    if mode == "compiled" and device == "cpu" and 'combine_mode="pointwise"' in program.source:
        return Result("discarded", "Inductor's C++ has no pointwise scans")
    try:
        exact, eager_run = reference(program, device, DRAW), eager(program, device, DRAW)
    except Exception as error:
        return Result("discarded", f"eager mode raises {one_line(error)}")
    reason = _ill_conditioned(program, exact, eager_run)
    if reason:
        return Result("discarded", reason)
    options = {"deterministic": True} if deterministic else None
    try:
        runs = compiled(program, device, mode, False, [DRAW] * (2 if deterministic else 1), options)
    except Exception as error:
        return crash(program, mode, device, error)
    if deterministic:
        for (name, x), (_, y) in zip(runs[0].tensors(), runs[1].tensors(), strict=True):
            if (x is None) != (y is None) or (x is not None and not torch.equal(x, y)):
                reason = f"{name} differs between two deterministic runs"
                stock_too = _stock_is_wrong_or_varies(program, mode, device, name, exact, eager_run)
                return Result("stock_too" if stock_too else "wrong", reason)
    found = _differences(program, runs[0], exact, eager_run)
    bad = [d for d in found if not d[1] <= d[2]]

    draws = [DRAW]
    sizes = {name: x.numel() for name, x in exact.tensors() if x is not None}
    if bad and all(
        math.isfinite(error) and (error / max(bound, 0.1) < 2 or sizes[name] < FEW) for name, error, bound in bad
    ):
        # All draws but the first, which was chosen because it looks wrong.
        many = list(range(DRAW + 1, DRAW + 1 + DRAWS))
        with contextlib.suppress(Exception):
            bad = [d for d in _over_draws(program, device, mode, False, many, options) if not d[1] <= d[2]]
            draws = many
    return _blame(program, mode, device, bad, draws) if bad else Result("ok")


def context_lost(device: str) -> bool:
    """Whether nothing can run on the GPU any more in this process, as after an index out of bounds in a kernel."""
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def crash(program: Program, mode: str, device: str, error: Exception) -> Result:
    """Judge a program that raises: does stock raise too? For flex_attention on a CPU stock always does."""
    reason = one_line(error)
    if context_lost(device):
        # Stock cannot be asked in this process, since everything raises now.
        return Result("crash", f"the context of the GPU is lost: {reason}"[:300])
    traced = isinstance(error, torch._dynamo.exc.TorchDynamoException) or "from user code" in reason
    if traced and not isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        # Dynamo itself refuses the program, before there is a graph for a backend.
        return Result("stock_crashes_too", reason)
    if mode == "graphs" and "with a bool tensor is not supported" in reason:
        # vmap, through which flex_attention calls a score_mod, lets it pass, and so does code generation.
        return Result("discarded", "op by op, PyTorch subtracts no booleans")
    if device == "cpu" and program.family in ("score_mods", "scans"):
        return Result("crash", reason)
    try:
        compiled(program, device, mode, True, [DRAW])
    except Exception as stock_error:
        return Result("stock_crashes_too", f"{reason} (stock: {one_line(stock_error)})"[:300])
    try:
        forward_of_stock(program, device, mode)
    except Exception as stock_error:
        # A gradient of another form may change what the forward keeps for it, so that it is what stock has without gradients.
        if one_line(stock_error) == reason:
            return Result("stock_crashes_too", f"{reason} (stock, without gradients)")
    if program.overwrites >= 0 and "modified by an inplace operation" in reason:
        # Of an input and what is computed from it, AOTAutograd keeps the smaller for the backward, under stock too:
        # ``buffer.double() * x`` keeps the buffer. A program that overwrites it then raises, and is not silently wrong.
        return Result("discarded", "an input that is kept for the backward is overwritten, which raises")
    return Result("crash", reason)


def _stock_is_wrong_or_varies(program: Program, mode: str, device: str, name: str, exact: Run, eager_run: Run) -> bool:
    """Whether a tensor is wrong with stock, or differs between two runs. Triton's sort does that to programs of both."""
    try:
        runs = compiled(program, device, mode, True, [DRAW] * 2)
        errors = {n: error for n, error, _ in _differences(program, runs[0], exact, eager_run)}
        first, second = (dict(run.tensors())[name] for run in runs)
    except Exception:
        return False
    return errors.get(name, 0.0) > 0.2 or first is None or second is None or not torch.equal(first, second)


def _blame(program: Program, mode: str, device: str, bad: list[tuple[str, float, float]], draws: list[int]) -> Result:
    """Compare a wrong result of gradfuse with the errors of stock over the same draws."""
    reason = _report(bad)
    if device == "cpu" and program.family in ("score_mods", "scans"):
        return Result("wrong", reason)
    try:
        theirs = {name: error for name, error, _ in _over_draws(program, device, mode, True, draws)}
    except Exception as error:
        return Result("wrong", f"{reason} (stock raises {one_line(error)})"[:300])
    if all(theirs.get(name, 0.0) > 0.5 * error for name, error, _ in bad):
        return Result("stock_too", reason)
    return Result("wrong", reason)
