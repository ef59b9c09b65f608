"""The letters of einsums with ellipses."""

import pytest
import torch

from inductor_ext.attention.recognition.products import _without_ellipses


@pytest.mark.parametrize(
    "first, second, out, shapes",
    [
        ("...qd", "...kd", "...qk", ((2, 3, 5, 4), (2, 3, 6, 4))),
        ("...qd", "...kd", "...qk", ((2, 3, 5, 4), (3, 6, 4))),
        ("...qd", "kd", "...qk", ((2, 3, 5, 4), (6, 4))),
        ("b...qd", "b...kd", "...bqk", ((2, 3, 5, 4), (2, 1, 6, 4))),
        ("aqd", "...kd", "...aqk", ((3, 5, 4), (2, 7, 6, 4))),
        ("qd", "kd", "qk", ((5, 4), (6, 4))),
    ],
)
def test_the_letters_say_what_the_ellipses_do(first, second, out, shapes):
    x, y = (torch.randn(shape) for shape in shapes)
    letters = _without_ellipses(first, second, out, [x.dim(), y.dim()])
    assert [len(n) for n in letters[:2]] == [x.dim(), y.dim()] and "." not in "".join(letters)
    got = torch.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", x, y)
    assert torch.equal(got, torch.einsum(f"{first},{second}->{out}", x, y))


def test_a_single_dot_is_no_ellipsis():
    assert _without_ellipses("q.d", "kd", "qk", [2, 2]) is None
