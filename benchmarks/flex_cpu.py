"""flex_attention training on the CPU: gradfuse's blocked dense math against eager flex_attention, a whole step.

    python -m benchmarks.flex_cpu          # writes results/flex_cpu.json

Eager flex_attention refuses CPU tensors that need a gradient; for this comparison its device check is lifted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module
from torch.utils.benchmark import Timer

import inductor_ext  # noqa: F401  (registers the backend)
from inductor_ext.core.table import progress

from .flex import CASES, attention
from .runner import RESULTS, environment, relative_error


def median_ms(step: Callable[[], object], seconds: float = 2.0) -> float:
    """The median of at least ``seconds`` of steps, by ``torch.utils.benchmark`` with all threads of this process."""
    step()
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return 1e3 * timer.blocked_autorange(min_run_time=seconds).median


def arguments(description: str | None, name: str, lengths: tuple[int, ...]) -> argparse.Namespace:
    """The command line of a suite on the CPU."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, action="append", help=f"default: {', '.join(map(str, lengths))}")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    given = parser.parse_args()
    given.length = given.length or lengths
    return given


def step_of(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(function(*inputs), inputs, grad))


def main() -> None:
    given, rows = arguments(__doc__, "flex_cpu", (512, 1024, 2048)), []
    for name in progress("flex_cpu", "score_mod", of=("none", "key", "relpos")):
        for length in given.length:
            torch.manual_seed(0)
            torch._dynamo.reset()
            shapes, score_mod = CASES[name]
            inputs = [torch.randn(1, 8, length, 64) for _ in range(3)] + [torch.randn(s) for s in shapes(1, 8, length)]
            inputs = [x.requires_grad_() for x in inputs]
            grad = torch.randn(1, 8, length, 64)
            function = attention(score_mod)
            compiled = torch.compile(function, backend="gradfuse", fullgraph=True)
            got = step_of(compiled, inputs, grad)
            row = {"case": name, "length": length, "batch": 1, "heads": 8, "dim": 64, "dtype": "float32"}
            row["gradfuse_step_ms"] = median_ms(lambda c=compiled, i=inputs, g=grad: step_of(c, i, g))
            with mock.patch.object(flex_module, "_validate_device", lambda *_: None):
                want = step_of(function, inputs, grad)
                row["eager_step_ms"] = median_ms(lambda f=function, i=inputs, g=grad: step_of(f, i, g))
            row["ratio"] = row["eager_step_ms"] / row["gradfuse_step_ms"]
            row["difference"] = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
            rows.append(row)
            print(json.dumps(row), flush=True)
    given.out.write_text(json.dumps({"suite": "flex_cpu", "environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
