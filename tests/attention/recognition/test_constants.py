"""What a graph computes from numbers only is a number: a scale, for example, so that it is known how large a bias may be."""

import math

import pytest
import torch
from torch.fx import Graph

from inductor_ext.attention.recognition.constants import folded
from inductor_ext.attention.recognition.elements import Apply, Constant, Position
from inductor_ext.attention.recognition.indices import ZERO, Ranges
from inductor_ext.attention.recognition.magnitudes import Magnitudes
from inductor_ext.core.writes import Writes

from .spellings import LOWEST
from .test_masks import LENGTHS
from .test_regressions import bias
from .test_traps import decisions, tensors


def as_deberta(q, k, v, table, exists):
    scale = torch.sqrt(torch.tensor(q.shape[-1], dtype=torch.float) * 3)
    scores = q @ (k / scale.to(q.dtype)).mT + table / scale.to(q.dtype)
    return scores.masked_fill(~exists, LOWEST).softmax(-1) @ v


def test_a_bias_that_is_divided_by_a_constant():
    """The score_mod reads the bias, the mask, and the largest number of a row, which is not computed from the bias."""
    (found,) = decisions(as_deberta, *tensors(), torch.nn.Parameter(bias().detach()), LENGTHS)
    assert "captures 3 tensors; 1 are learned" in found.why


def node(device):
    made = Graph().placeholder("x")
    made.meta["example_value"] = torch.empty((), device=device)
    return made


def applied(target, *args, dtype=torch.float32):
    kind = "call_method" if isinstance(target, str) else "call_function"
    return Apply(kind, target, args, {}, dtype)


CASES = {
    "sum": (applied(torch.add, Constant(0.1, torch.float32), 0.2), "meta", torch.tensor(0.1).add(0.2).item()),
    "root": (applied(torch.sqrt, Constant(3.0, torch.float32)), "meta", torch.tensor(3.0).sqrt().item()),
    "cast": (applied("to", Constant(13.8564, torch.float32), torch.bfloat16, dtype=torch.bfloat16), "meta", 13.875),
    "integers": (applied(torch.mul, Constant(7, torch.int64), 3, dtype=torch.int64), "meta", 21),
    "wrapped": (applied(torch.sub, Constant(1, torch.uint8), 2, dtype=torch.uint8), "meta", 255),
    "logarithm": (applied(torch.log, Constant(3.0, torch.float32)), "cpu", torch.tensor(3.0).log().item()),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    """In the dtypes of the graph, and not in Python's."""
    element, device, want = CASES[name]
    number = folded(element, node(device))
    assert (number.value, number.dtype) == (want, element.dtype) and type(number.value) is type(want)


@pytest.mark.parametrize(
    "element, device",
    [
        (applied(torch.log, Constant(3.0, torch.float32)), "meta"),
        (applied(torch.add, Constant(3.0, torch.float32), Position(ZERO, torch.float32)), "cpu"),
        (applied(torch.add, 1, 2), "cpu"),
        (applied(torch.floor_divide, Constant(3, torch.int64), Constant(0, torch.int64), dtype=torch.int64), "cpu"),
    ],
    ids=["other_last_digits_on_a_gpu", "not_only_numbers", "no_tensor", "a_division_of_integers"],
)
def test_what_is_not_computed(element, device):
    assert folded(element, node(device)) is element


def test_another_default_device():
    element, device, want = CASES["root"]
    with torch.device("meta"):
        assert folded(element, node(device)).value == want


def test_a_divisor_below_zero():
    """The bias is 2e3, at most, and the kernel need not know its largest number."""
    bias = Constant(-500.0, torch.float32)
    assert (
        Magnitudes(Ranges((1, 1, 1, 1)), Writes(Graph())).of(applied(torch.div, bias, Constant(-0.25, torch.float32)))
        == 2000.0
    )


@pytest.mark.breadth(0)
def test_a_divisor_of_zero_bounds_nothing():
    """The divisor is 0, so the bias is infinite or nan, and eager mode gives nan."""
    function = lambda q, k, v, b: (q @ k.mT + b / torch.tensor(0.0)).softmax(-1) @ v  # noqa: E731
    q, k, v = tensors()
    result = torch.compile(function, backend="gradfuse")(q, k, v, torch.nn.Parameter(bias().detach()))
    assert all(map(math.isnan, result.flatten().tolist()))
