"""Random score_mods as source text, for property tests: a failing example reads like a user's code.

``score_mods`` draws the body of ``lambda s, b, h, q, k, c, t, u, w: ...`` over a 0-d tensor c and tables of shapes ``TABLES``;
``function`` compiles it. The same function works on scalars and on broadcast index grids.
"""

import torch
from hypothesis import strategies as st

#: Lengths of the ranges of b, h, q, k.
EXTENTS = (2, 2, 6, 7)
#: Shapes of the captured tensors.
TABLES = {"c": (), "t": (5,), "u": (2, 6), "w": (4, 3)}

#: The same, for images with several rows of 128 places.
IMAGE_EXTENTS = (1, 2, 330, 391)

_small = st.integers(1, 4).map(str)
_positions = st.sampled_from(["b", "h", "q", "k"])


def _integer_ops(inner):
    pair = st.tuples(inner, inner)
    return st.one_of(
        pair.map("({0[0]} + {0[1]})".format),
        pair.map("({0[0]} - {0[1]})".format),
        pair.map("torch.maximum({0[0]}, {0[1]})".format),
        st.tuples(inner, _small).map("({0[0]} * {0[1]})".format),
        st.tuples(inner, _small).map("({0[0]} // {0[1]})".format),
        st.tuples(inner, _small).map("({0[0]} % {0[1]})".format),
        st.tuples(inner, _small).map("({0[0]} - {0[1]}).abs()".format),
        st.tuples(inner, _small).map("({0[0]}).clamp(max={0[1]})".format),
        st.tuples(inner, inner, inner, inner).map("torch.where({0[0]} > {0[1]}, {0[2]}, {0[3]})".format),
    )


integers = st.recursive(_positions, _integer_ops, max_leaves=4)


def _image_ops(inner):
    pair, width = st.tuples(inner, inner), st.sampled_from(["32", "64", "96", "128", "192"])
    return st.one_of(
        st.tuples(inner, width).map("({0[0]} // {0[1]})".format),
        st.tuples(inner, width).map("({0[0]} % {0[1]})".format),
        st.tuples(inner, width).map("torch.remainder({0[0]}, {0[1]})".format),
        st.tuples(inner, width).map("({0[0]} - {0[0]} // {0[1]} * {0[1]})".format),
        st.tuples(inner, width).map("({0[0]} + {0[1]})".format),
        pair.map("({0[0]} + {0[1]})".format),
        pair.map("({0[0]} - {0[1]})".format),
        pair.map("({0[0]} * {0[1]})".format),
        inner.map("({}).abs()".format),
        inner.map("({}).long()".format),
        inner.map("({}).float()".format),
    )


#: Sums and products of the rows and the columns of positions in images. Most differences are of two places of one image.
_place = st.tuples(st.sampled_from(["{0} // {1}", "{0} % {1}", "({0} - {0} // {1} * {1})"]), st.sampled_from(["64", "128"]))
_distances = _place.map(lambda drawn: f"({drawn[0].format('k', drawn[1])} - {drawn[0].format('q', drawn[1])})")
image_integers = st.recursive(st.one_of(_positions, _distances, _distances), _image_ops, max_leaves=4)

_reads = st.one_of(
    st.just("c"),
    integers.map("t[({}) % 5]".format),
    st.just("t[2]"),
    integers.map("u[h, ({}) % 6]".format),
    st.tuples(integers, integers).map("w[({0[0]}) % 4, ({0[1]}) % 3]".format),
    integers.map("w[1, ({}) % 3]".format),
)


def _float_ops(inner):
    pair = st.tuples(inner, inner)
    return st.one_of(
        pair.map("({0[0]} + {0[1]})".format),
        pair.map("({0[0]} - {0[1]})".format),
        pair.map("({0[0]} * {0[1]})".format),
        inner.map("torch.tanh({})".format),
        inner.map("torch.sigmoid({})".format),
        st.tuples(inner, integers).map("({0[0]} * ({0[1]}) / 7)".format),
        st.tuples(integers, integers, inner, inner).map("torch.where({0[0]} >= {0[1]}, {0[2]}, {0[3]})".format),
    )


floats = st.recursive(st.one_of(st.just("s"), _reads), _float_ops, max_leaves=5)
#: A body whose value depends on the score, as every score_mod does once it has been rewritten.
score_mods = floats.map("s + {}".format)


def function(body):
    return eval(f"lambda s, b, h, q, k, {', '.join(TABLES)}: {body}", {"torch": torch})


def tables(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in TABLES.values()]


def grid(extents=EXTENTS):
    """The index tensors b, h, q, k, ready to broadcast."""
    shapes = [[-1 if axis == d else 1 for d in range(4)] for axis in range(4)]
    return [torch.arange(n, dtype=torch.int32).reshape(s) for n, s in zip(extents, shapes, strict=True)]
