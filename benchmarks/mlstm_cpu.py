"""mLSTM training on the CPU, a step: gradfuse's blocked dense math, the op's eager blocks, stock on the plain form.

python -m benchmarks.mlstm_cpu          # writes results/mlstm_cpu.json
"""

from __future__ import annotations

import json
from functools import partial

import torch

from inductor_ext.core.table import progress

from .flex_cpu import arguments, median_ms, step_of
from .mlstm import op, plain
from .runner import environment, gradfuse, relative_error, stock

HEADS, WIDTH = 4, 64
LENGTHS = (512, 1024, 2048, 4096)
#: Beyond this the plain form's S x S tensors are not tried.
LONGEST_PLAIN = 2048


def main() -> None:
    given, rows = arguments(__doc__, "mlstm_cpu", LENGTHS), []
    for length in progress("mlstm_cpu", "length", of=given.length):
        torch.manual_seed(0)
        shapes = [(1, HEADS, length, WIDTH)] * 3 + [(1, HEADS, length)] * 2 + [(HEADS, WIDTH)]
        drawn = [torch.randn(s) for s in shapes]
        drawn[4] += 3
        drawn[5] *= 0.1
        inputs = [x.requires_grad_() for x in drawn]
        grad = torch.randn(1, HEADS, length, WIDTH)
        exact = step_of(op, [x.detach().double().requires_grad_() for x in inputs], grad.double())
        functions = {"gradfuse": gradfuse(op), "eager op": op}
        if length <= LONGEST_PLAIN:
            functions["stock, plain form"] = stock(plain)
        row = {"length": length, "batch": 1, "heads": HEADS, "width": WIDTH, "dtype": "float32"}
        for name, function in functions.items():
            torch._dynamo.reset()
            step = partial(step_of, function, inputs, grad)
            worst = max(relative_error(a, b) for a, b in zip(step(), exact, strict=True))
            row[name] = {"step_ms": median_ms(step), "error": worst}
        rows.append(row)
        print(json.dumps(row), flush=True)
    given.out.write_text(json.dumps({"suite": "mlstm_cpu", "environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
