"""A position that the indices determine is the same for all scores that are added to one element."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext.attention.captured_grads import Contribution
from inductor_ext.attention.score_mod import ScoreMod, output_nodes
from inductor_ext.attention.writers import writers

from .test_bounds import EXPRESSIONS, EXTENTS, evaluate

B, H, Q, K = False, False, True, True


def traced(function):
    """The indices that ``function(b, h, q, k)`` returns, and the inputs of their graph."""
    index = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    module = make_fx(function, tracing_mode="fake")(*index)
    return tuple(output_nodes(module.graph)), ScoreMod.of_mask(module.graph)


def found(function, shape, extents=EXTENTS):
    """The writers of ``t[function(b, h, q, k)]`` for a tensor of this shape."""
    indices, inputs = traced(function)
    positions = tuple(inputs.positions.index(i) if i in inputs.positions else None for i in indices)
    contribution = Contribution(None, indices, shape, positions, (True,) * 4, *[(True,) * len(shape)] * 2, False)
    return writers(contribution, inputs, extents)


def determined(function, *shape):
    return "".join(name for name, yes in zip("bhqk", found(function, shape).determined, strict=True) if yes)


def test_positions_themselves():
    assert determined(lambda b, h, q, k: (h, k), 3, 11) == "hk"


def test_a_relative_shift_determines_the_key():
    assert determined(lambda b, h, q, k: (q, q - k + 10), 7, 17) == "qk"
    assert determined(lambda b, h, q, k: (q - k + 10, q), 17, 7) == "qk"
    assert determined(lambda b, h, q, k: (q - k + 10,), 17) == ""


def test_negative_indices_that_meet_positive_ones():
    assert determined(lambda b, h, q, k: (q, q - k), 7, 17) == "qk"
    assert determined(lambda b, h, q, k: (q, q - k), 7, 16) == "q"


def test_multiples_and_wrapping():
    assert determined(lambda b, h, q, k: (q, 3 * k - q), 7, 99) == "qk"
    assert determined(lambda b, h, q, k: (q, k * 2**30), 7, 2**33) == "q"
    assert determined(lambda b, h, q, k: (q, (k * 30).to(torch.int8).int()), 7, 300) == "q"
    assert determined(lambda b, h, q, k: (q, k // 2), 7, 99) == "q"


def test_a_clamped_distance_determines_the_key_between_its_bounds():
    clamped = lambda b, h, q, k: (b, h, q, (q - k).clamp(-4, 3) + 4)  # noqa: E731
    result = found(clamped, (2, 3, 7, 8))
    assert result.determined == (True, True, True, False)
    ((node, low, high),) = [(c.node.name, c.low, c.high) for c in result.clamps]
    assert (node, low, high) == ("sub", -4, 3)
    # Element 3 of a table of 7 is that of -4 too.
    assert not found(lambda b, h, q, k: (b, h, q, (q - k).clamp(-4, 3)), (2, 3, 7, 7)).clamps
    assert not found(lambda b, h, q, k: (h, q, (q - k).clamp(-4, 3) + 4), (3, 7, 8)).clamps
    nested = found(lambda b, h, q, k: (b, h, q, (q - k).clamp(min=-4).clamp(-6, 3) + 4), (2, 3, 7, 8))
    assert [(c.low, c.high) for c in nested.clamps] == [(-4, 3)]
    assert not found(lambda b, h, q, k: (b, h, q, (q - k).clamp(-4, 3) + k.clamp(0, 2)), (2, 3, 7, 8)).clamps


def test_a_position_beside_a_clamp_must_be_determined():
    """Between the bounds ``clamp(q - k) + k`` is q, but a score at a bound may have the same element."""
    assert not found(lambda b, h, q, k: (b, h, (q - k).clamp(-4, 3) + k + 4, q + k), (2, 3, 15, 18)).clamps
    assert found(lambda b, h, q, k: (b, h, k, (q - k).clamp(-4, 3) + k + 4), (2, 3, 11, 18)).clamps


def test_cycles():
    result = found(lambda b, h, q, k: (q % 4, k % 8), (4, 8))
    assert result.determined == (False,) * 4
    assert (result.query_cycle, result.key_cycle) == (4, 8)


AFFINE = st.lists(st.tuples(*[st.integers(-2, 2)] * 4, st.integers(-12, 12)), min_size=1, max_size=3)


def check(function, shape):
    """Compare with all scores."""
    result = found(function, shape).determined
    grid = torch.meshgrid(*[torch.arange(n, dtype=torch.int32) for n in EXTENTS], indexing="ij")
    indices = [torch.as_tensor(i).expand(EXTENTS) for i in function(*grid)]
    inside = torch.stack([(-n <= i) & (i < n) for i, n in zip(indices, shape, strict=True)]).all(0)
    element = torch.zeros(EXTENTS, dtype=torch.int64)
    for i, n in zip(indices, shape, strict=True):
        element = element * n + torch.where(i < 0, i + n, i)
    for yes, position in zip(result, grid, strict=True):
        if yes:
            pairs = torch.stack([element[inside], position[inside]], 1).unique(dim=0)
            assert len(pairs) == len(pairs[:, 0].unique()), (shape, result)
    return result


@pytest.mark.breadth(0)
@settings(deadline=None, max_examples=150)
@given(AFFINE, st.lists(st.integers(1, 40), min_size=3, max_size=3))
def test_multiples_of_positions(factors, sizes):
    def function(b, h, q, k):
        return [x * b + y * h + z * q + w * k + c for x, y, z, w, c in factors]

    check(function, tuple(sizes[: len(factors)]))


@settings(deadline=None, max_examples=100)
@given(st.lists(EXPRESSIONS, min_size=1, max_size=3), st.lists(st.integers(1, 40), min_size=3, max_size=3))
def test_random_expressions(expressions, sizes):
    def function(b, h, q, k):
        env = {"b": b, "h": h, "q": q, "k": k}
        return [evaluate(e, env) for e in expressions]

    check(function, tuple(sizes[: len(expressions)]))


CLAMPED = st.lists(
    st.tuples(
        st.tuples(*[st.integers(-2, 2)] * 4, st.integers(-6, 12)),
        st.none() | st.integers(-6, 9),
        st.integers(-4, 12),
        st.sampled_from([(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (1, 0, 2, 0)]),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.breadth(0)
@settings(deadline=None, max_examples=200)
@given(CLAMPED, st.lists(st.integers(1, 40), min_size=3, max_size=3))
def test_elements_strictly_between_the_bounds_of_clamps_have_one_writer(indices, sizes):
    def function(b, h, q, k):
        sums = [(x * b + y * h + z * q + w * k, low, high, c, beside) for (x, y, z, w, c), low, high, beside in indices]
        clamped = [(s if low is None else s.clamp(low, high)) + c for s, low, high, c, _ in sums]
        beside = [b * x + h * y + q * z + k * w for *_, (x, y, z, w) in sums]
        return [one + other if any(sums[i][-1]) else one for i, (one, other) in enumerate(zip(clamped, beside, strict=True))]

    shape = tuple(sizes[: len(indices)])
    result = found(function, shape)
    if not result.clamps:
        return
    assert result.determined != (True,) * 4
    grid = torch.meshgrid(*[torch.arange(n, dtype=torch.int32) for n in EXTENTS], indexing="ij")
    values = [torch.as_tensor(i).expand(EXTENTS) for i in function(*grid)]
    exists = torch.stack([(-n <= i) & (i < n) for i, n in zip(values, shape, strict=True)]).all(0)
    between = torch.ones(EXTENTS, dtype=torch.bool)
    for (x, y, z, w, _), low, high, _ in indices:
        if low is not None:
            b, h, q, k = grid
            operand = x * b + y * h + z * q + w * k
            between &= (operand > low) & (operand < high)
    element = torch.zeros(EXTENTS, dtype=torch.int64)
    for i, n in zip(values, shape, strict=True):
        element = element * n + torch.where(i < 0, i + n, i)
    writers_of = torch.bincount(element[exists])
    assert (writers_of[element[exists & between]] == 1).all()
