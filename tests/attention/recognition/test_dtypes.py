"""Attention whose operands, probabilities or products have several dtypes."""

import pytest
import torch

from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.soundness.check import run
from tests.support.eager_graphs import eager_graphs

from .spellings import H, S
from .test_traps import randn, tensors


def half_values(q, k, v, bias):
    return (q @ k.mT + bias).softmax(-1).bfloat16() @ v.bfloat16()


def half_queries(q, k, v, bias):
    return (q.bfloat16() @ k.bfloat16().mT + bias).softmax(-1) @ v


def rounded_probabilities(q, k, v, bias):
    return (q @ k.mT + bias).softmax(-1).bfloat16().float() @ v


@pytest.mark.parametrize(
    ("function", "path"),
    [(half_values, "stock"), (half_queries, "stock"), (rounded_probabilities, "flex_attention")],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_dtypes_that_are_mixed(function, path):
    """Products of two dtypes are left alone. Where probabilities are rounded for nothing, they no longer are."""
    inputs = *tensors(), randn(1, H, S, S)
    torch._dynamo.reset()
    with collect() as report, eager_graphs():
        ours = run(torch.compile(function, backend="gradfuse", fullgraph=True), inputs)
    (decision,) = [d for d in report.decisions if d.pass_name == "attention_pattern"]
    assert decision.path == path
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = run(lambda q, k, v, bias: (q @ k.mT + bias).softmax(-1) @ v, wide)
    mine, eager = (_errors(found, exact) for found in (ours, run(function, inputs)))
    assert all(x <= 1.2 * y for x, y in zip(mine, eager, strict=True)), (mine, eager)


def _errors(found, exact):
    """Those of results and gradients."""
    return [relative_error(x, y) for mine, right in zip(found, exact, strict=True) for x, y in zip(mine, right, strict=True)]
