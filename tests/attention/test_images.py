"""Biases of the distance of two places of an image, row by row: read and reduced like diagonals, one for each pair of rows."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext.attention import hoisting
from inductor_ext.attention.kinds import DIAGONAL
from inductor_ext.attention.kinds.images import Image
from inductor_ext.attention.tile_tables import TileTable, TileTables
from inductor_ext.core.report import collect
from tests.support.interpreter import INTERPRETED, triton_on_cpu

from .case import Case
from .cases import BIASES

CASES = [c for c in BIASES if c.name.startswith("places_of_an_image")]


def image(width, rows, **sizes):
    """Distances of two places, in a table for each head."""
    return Case(
        f"image_{width}",
        {"t": (1, 2 * rows - 1, 2 * width - 1)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k // width - q // width + rows - 1, k % width - q % width + width - 1],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k // width - q // width + rows - 1, k % width - q % width + width - 1],
        **{"batch": 1, "heads": 1, **sizes},
    )


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def no_tables_of_pairs(monkeypatch):
    """These lengths stand for long ones."""
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)


def kernels(report):
    return " ".join(d.why for d in report.decisions if d.pass_name == "flex_attention_backward")


@pytest.mark.breadth(1)
@INTERPRETED
@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("tma", [True, False])
@each_case
def test_matches_float64(case, tma, one_pass):
    with triton_on_cpu(tma=tma), collect() as report:
        case.check("cpu", kernel_options={"bwd_ONE_PASS": one_pass})
    assert ("tiles added to a strip" if tma else "summed along the diagonals of a tile") in kernels(report)


@pytest.mark.breadth(1)
@INTERPRETED
@pytest.mark.parametrize(("tma", "deterministic"), [(True, False), (False, False), (False, True)])
def test_lengths_that_fill_whole_rows(tma, deterministic):
    with triton_on_cpu(tma=tma):
        image(64, 2, length=128).check("cpu", options={"deterministic": deterministic})


@pytest.mark.breadth(1)
@INTERPRETED
@pytest.mark.parametrize("width", [64, 128])
def test_tiles_of_32_queries(width):
    """They begin in the middle of a strip, whose height is 64."""
    options = {"bwd_ONE_PASS": True, "bwd_BLOCK_M1": 32, "bwd_BLOCK_M2": 32}
    with triton_on_cpu(tma=True), collect() as report:
        image(width, 3, length=100, kv_length=130).check("cpu", kernel_options=options)
    assert "tiles added to a strip" in kernels(report)


@pytest.mark.breadth(0)
@INTERPRETED
@each_case
def test_deterministic_matches_float64(case):
    with triton_on_cpu(), collect() as report:
        case.check("cpu", options={"deterministic": True})
    assert "partial sums in a fixed order" in kernels(report)


@pytest.mark.breadth(0)
@INTERPRETED
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("names", [("BLOCK_M",), ("BLOCK_N",), ("bwd_BLOCK_M1", "bwd_BLOCK_N2")], ids="-".join)
def test_tiles_that_are_longer_than_a_row(width, names):
    """If the user asks for such tiles, elements are read and added one by one."""
    case = image(width, 2, length=2 * width, block_size=256, mask=lambda b, h, q, k: q >= 0)
    with triton_on_cpu(tma=True), collect() as report:
        case.check("cpu", kernel_options=dict.fromkeys(names, 2 * width))
    assert "one fp32 add for each score" in kernels(report)


def test_the_longest_tile_of_several_tables():
    kinds = (DIAGONAL, Image.of(192), Image.of(128))
    tables = [TileTable(i, i, kind, True, True) for i, kind in enumerate(kinds)]
    assert TileTables(tuple(tables), []).longest_tile == 64
    assert TileTables((tables[0], tables[2]), []).longest_tile == 128


@pytest.mark.breadth(0)
@INTERPRETED
@each_case
def test_dynamic_lengths(case):
    with triton_on_cpu(tma=True), collect() as report:
        case.check("cpu", dynamic=True)
    assert "summed along the diagonals of a tile" in kernels(report)


def path_of(score_mod):
    """What is reported of the tables that are made of a score_mod of 256 places."""
    x = torch.randn(1, 2, 256, 16, requires_grad=True)
    compiled = torch.compile(
        lambda x, t: flex_attention(x, x, x, score_mod=score_mod(t)), backend="gradfuse", fullgraph=True
    )
    with collect() as report:
        compiled(x, torch.randn(2, 16, 512, requires_grad=True))
    return [d.why for d in report.decisions if d.pass_name == "hoisting"]


def test_what_becomes_a_table():
    place = lambda t: lambda s, b, h, q, k: s + t[h, q // 64 - k // 64 + 8, q % 64 - k % 64 + 63]  # noqa: E731
    (why,) = path_of(place)
    assert "has the footprint head+image 64; its table is [H, 127 * (rows of queries + rows of keys - 1)]" in why
    diagonal = lambda t: lambda s, b, h, q, k: s + t[h, q // 64 - k // 64 + 8, q - k + 255]  # noqa: E731
    assert "head+image 64" in path_of(diagonal)[0]


@pytest.mark.breadth(0)
def test_images_of_two_widths_have_a_table_each():
    """Their sum would be a table of pairs."""
    distance = lambda t, h, q, k, w: t[h, q // w - k // w + 8, q % w - k % w + w - 1]  # noqa: E731
    first, second = path_of(lambda t: lambda s, b, h, q, k: s + distance(t, h, q, k, 64) + distance(t, h, q, k, 128))
    assert "head+image 64" in first + second and "head+image 128" in first + second


def test_an_image_with_one_row_is_a_diagonal():
    (why,) = path_of(lambda t: lambda s, b, h, q, k: s + t[h, q // 512 - k // 512 + 8, q % 512 - k % 512 + 255])
    assert "head+diagonal" in why


def test_vectors_of_one_distance_are_not_made_for_every_pair():
    """A table of their sums would be made from a vector for each query and key."""
    assert path_of(lambda t: lambda s, b, h, q, k: s + (t[0, q // 64 - k // 64 + 8] * t[1, h]).sum(-1)) == []


@pytest.mark.breadth(0)
def test_tables_of_one_distance_are_small_enough_to_share_one(monkeypatch):
    """Each is a table of pairs by itself. Their sum is the kind of the image."""
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 2**22)
    rows = lambda t, h, q, k: t[h, 0, q // 64 - k // 64 + 8]  # noqa: E731
    columns = lambda t, h, q, k: t[h, 1, q % 64 - k % 64 + 63]  # noqa: E731
    for score_mod in (
        lambda t: lambda s, b, h, q, k: s + (rows(t, h, q, k) + columns(t, h, q, k)),
        lambda t: lambda s, b, h, q, k: s + rows(t, h, q, k) + columns(t, h, q, k),
    ):
        torch._dynamo.reset()
        (why,) = path_of(score_mod)
        assert "head+image 64" in why


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "index", ["q // 64 - k // 64", "q % 64 - k % 64", "q // 96 - k // 96", "q // 64 + k // 64", "a product"]
)
def test_what_does_not(index):
    """Values of rows only, or of columns only, have better reductions; tiles of 64 do not lie in rows of 96."""
    score_mod = {
        "q // 64 - k // 64": lambda t: lambda s, b, h, q, k: s + t[h, 0, q // 64 - k // 64 + 8],
        "q % 64 - k % 64": lambda t: lambda s, b, h, q, k: s + t[h, 0, q % 64 - k % 64 + 63],
        "q // 96 - k // 96": lambda t: lambda s, b, h, q, k: s + t[h, q // 96 - k // 96 + 3, q % 96 - k % 96 + 95],
        "q // 64 + k // 64": lambda t: lambda s, b, h, q, k: s + t[h, q // 64 + k // 64, q % 64 - k % 64 + 63],
        "a product": lambda t: lambda s, b, h, q, k: s + t[h, 0, q // 64 - k // 64 + 8] * t[h, 1, q % 64 - k % 64 + 63],
    }[index]
    assert path_of(score_mod) == []
