"""Attention is recognised on a CPU too, however few its scores are: these tests run there."""

import pytest

from inductor_ext.attention.recognition import rewrite


@pytest.fixture(autouse=True)
def few_scores_are_enough(monkeypatch):
    monkeypatch.setattr(rewrite, "FEWEST_ON_CPU", 0)
