"""Attention as models spell it is recognised: every gradient is that of float64 eager code, and biases are read as functions."""

import pytest

from inductor_ext.core.report import collect
from tests.soundness.check import check_matches_eager

from .spellings import SPELLINGS


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", SPELLINGS)
def test_gradients_and_what_is_read(name):
    spelling = SPELLINGS[name]
    with collect() as report:
        check_matches_eager(spelling.function, *spelling.inputs(), exact=True)
    recognised = [d for d in report.decisions if d.pass_name == "attention_pattern"]
    assert recognised and all(d.path == "flex_attention" for d in recognised)
    read = " ".join(d.why if d.pass_name == "attention_pattern" else d.path + d.why for d in report.decisions)
    assert spelling.reads in read, read
