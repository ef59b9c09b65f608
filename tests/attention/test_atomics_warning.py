"""How many atomic adds a gradient takes at most is in the report, and a warning for many scores names the user's line."""

import logging

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext.attention import backward, hoisting
from inductor_ext.core.report import collect
from tests.support.interpreter import triton_on_cpu


@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)
    monkeypatch.setattr(backward, "MANY_SCORES", 1)


def why_of_backward(score_mod):
    inputs = [torch.zeros(1, 2, 32, 16, requires_grad=True) for _ in range(3)]
    with triton_on_cpu(), collect() as report:
        compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod), backend="gradfuse")
        compiled(*inputs).sum().backward()
    return next(d.why for d in report.decisions if d.op == "flex_attention_backward")


def test_a_lookup_for_every_score(many, caplog):
    t, index = torch.zeros(2, 9, requires_grad=True), torch.zeros(32, 32, dtype=torch.int64)
    with caplog.at_level(logging.WARNING):
        why = why_of_backward(lambda s, b, h, q, k: s + t[h, index[q, k]] + t[h, index[k, q]] * s)
    assert "at most 2 atomic adds for each score" in why
    (warning,) = [r.getMessage() for r in caplog.records if "may be slow" in r.getMessage()]
    assert "test_atomics_warning.py:" in warning and "up to 2 atomic adds" in warning


def test_what_is_reduced_without_atomics(many, caplog):
    t = torch.zeros(2, 63, requires_grad=True)
    with caplog.at_level(logging.WARNING):
        assert "atomic" not in why_of_backward(lambda s, b, h, q, k: s + t[h, q - k + 31])
    assert not [r for r in caplog.records if "may be slow" in r.getMessage()]


@pytest.mark.parametrize(("width", "warns"), [(16, False), (2, True)])
def test_a_coarse_coordinate_is_added_once_for_a_row(many, caplog, width, warns):
    """The biases of ViTDet and SAM: ``y[h, q, k // W]``, where W is the width of an image."""
    t = torch.zeros(2, 64, 32, requires_grad=True)
    with caplog.at_level(logging.WARNING):
        why = why_of_backward(lambda s, b, h, q, k: s + t[h, q, k // width])
    assert ("atomic" in why) is warns
    assert bool([r for r in caplog.records if "may be slow" in r.getMessage()]) is warns
