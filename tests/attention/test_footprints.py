"""Footprints: spellings that users write, and random score_mods checked against what their nodes evaluate to."""

import pytest
import torch
from hypothesis import given, settings
from torch.fx import Interpreter, symbolic_trace

from inductor_ext.attention import footprints as analysis
from inductor_ext.attention.footprints import footprints
from tests.support import random_score_mods

#: (body of a score_mod, footprint of what it returns). t [5], u [2, 6], w [4, 3]; c is 0-d.
SPELLINGS = [
    ("c", "none"),
    ("t[0]", "none"),
    ("t[b]", "batch+none"),
    ("t[h]", "head+none"),
    ("u[b, h]", "batch+head+none"),
    ("torch.exp(t[h])", "head+none"),
    ("t[h] * 2 + c", "head+none"),
    ("t[q - q]", "none"),
    ("t[q]", "row"),
    ("u[h, q]", "head+row"),
    ("t[q // 2]", "row"),
    ("t[q % 3]", "row"),
    ("t[q * 2 - q]", "row"),
    ("torch.where(q > 2, t[q], c)", "row"),
    ("t[t[q].long()]", "row"),
    ("q.float() / 3", "row"),
    ("(q - k) + k", "row"),
    ("(q + k) - k", "row"),
    ("t[b] * q", "batch+row"),
    ("t[k]", "column"),
    ("u[h, k]", "head+column"),
    ("u[h, k // 2]", "head+column"),
    ("t[-1 - k]", "column"),
    ("torch.where(k < 3, t[k], 0.0)", "column"),
    ("(k - q) + q", "column"),
    ("t[h] * k", "head+column"),
    ("t[k].sigmoid() * u[b, k]", "batch+column"),
    ("q - k", "diagonal"),
    ("k - q", "diagonal"),
    ("t[q - k]", "diagonal"),
    ("t[k - q + 4]", "diagonal"),
    ("u[h, q - k + 3]", "head+diagonal"),
    ("t[q - (k - 4)]", "diagonal"),
    ("t[-(k - q)]", "diagonal"),
    ("t[q + (-1) * k]", "diagonal"),
    ("t[2 * q - 2 * k]", "diagonal"),
    ("t[(q + 1) * 3 - 3 * k + 1]", "diagonal"),
    ("torch.sub(q, k)", "diagonal"),
    ("torch.sub(q, k, alpha=1)", "diagonal"),
    ("torch.add(q, k, alpha=-1)", "diagonal"),
    ("torch.neg(k) + q", "diagonal"),
    ("(q - k).abs()", "diagonal"),
    ("abs(q - k)", "diagonal"),
    ("torch.abs(k - q) * t[h]", "head+diagonal"),
    ("t[(q - k).clamp(0, 5)]", "diagonal"),
    ("t[torch.clamp(q - k, min=0, max=5)]", "diagonal"),
    ("t[torch.clamp(k - q, -3, 3) + 3]", "diagonal"),
    ("(q - k) // 2", "diagonal"),
    ("(k.float() * 16777213 - q.float() * 16777213).long()", "pair"),
    ("(k * 2**30).long() - (q * 2**30).long()", "pair"),
    ("(k.long() * 2**30) - (q.long() * 2**30)", "diagonal"),
    ("(k.half() - q.half()).long()", "pair"),
    ("(q - k) % 4", "diagonal"),
    ("(q - k) * (q - k)", "diagonal"),
    ("(q - k) ** 2", "diagonal"),
    ("torch.exp(-t[h] * (q - k).abs())", "head+diagonal"),
    ("torch.log((q - k).abs().clamp(min=1).float())", "diagonal"),
    ("torch.where(q > k, t[0], t[1])", "pair"),
    ("torch.where(q - k > 0, t[0], t[1])", "diagonal"),
    ("torch.where(k - q > 0, 8, 0) + (k - q).abs().clamp(max=7)", "diagonal"),
    ("u[h, torch.where((k - q) > 0, 3, 0) + torch.minimum((k - q).abs(), torch.full_like(k, 2))]", "head+diagonal"),
    ("q.float() - k.float()", "diagonal"),
    ("q.to(torch.float32) - k.to(torch.float32)", "diagonal"),
    ("q.half() - k.half()", "pair"),
    ("(q - k).half()", "diagonal"),
    ("q / 3 - k / 3", "pair"),
    ("t[q + k]", "antidiagonal"),
    ("t[4 - q - k]", "antidiagonal"),
    ("(q + k) % 5", "antidiagonal"),
    ("(q + k) + (q - k)", "row"),
    ("(q + k) * (q - k)", "pair"),
    ("u[q, k]", "pair"),
    ("t[q] + t[k]", "pair"),
    ("t[q] * t[q - k]", "pair"),
    ("t[q // 2 - k // 2 + 3]", "pair"),
    ("u[h, t[q].long() - t[k].long()]", "head+pair"),
    ("q + 2 * k", "pair"),
    ("s", "score+none"),
    ("s * t[h]", "head+score+none"),
    ("s + t[q - k]", "score+diagonal"),
    ("torch.tanh(s / 20) * 20", "score+none"),
    ("t[(s > 0).long()]", "score+none"),
    ("t.sum()", "none"),
    ("u[h].sum()", "head+none"),
    ("s + torch.rand_like(s)", "unknown"),
    ("torch.max(q, k)", "pair"),
    # A list is one index of several elements, or several indices: torch is about to change its meaning.
    ("u[[h, k]]", "unknown"),
]
NAMES = "s, b, h, q, k, c, t, u, w"


class Evaluate(Interpreter):
    """Runs a graph on index grids and keeps every node's value; ``meta`` gets one, as Dynamo's nodes carry a fake tensor."""

    def run_node(self, node):
        value = super().run_node(node)
        node.meta["grid"] = value
        if isinstance(value, torch.Tensor):
            node.meta["example_value"] = value
        return value


def analysed(body):
    module = symbolic_trace(eval(f"lambda {NAMES}: {body}", {"torch": torch}))
    score = torch.randn(random_score_mods.EXTENTS, dtype=torch.float64)
    tables = [t.detach() for t in random_score_mods.tables()]
    return module, score, tables


@pytest.mark.parametrize(("body", "expected"), SPELLINGS, ids=[body for body, _ in SPELLINGS])
def test_spelling(body, expected):
    module, _, tables = analysed(body)
    Evaluate(module).run(torch.zeros(()), *(torch.zeros((), dtype=torch.int32) for _ in "bhqk"), *tables)
    (out,) = module.graph.find_nodes(op="output")[0].args
    assert str(footprints(module.graph, random_score_mods.EXTENTS)[out]) == expected


#: The same for places in images (IMAGE_EXTENTS).
IMAGE_SPELLINGS = [
    ("q // 64 - k // 64 + (q % 64 - k % 64) * 3", "image 64"),
    ("torch.remainder(q, 64) - torch.fmod(k, 64) + (k // 64 - q // 64) * 127", "image 64"),
    ("(k // 64 - q // 64).abs() + (k % 64 - q % 64)", "image 64"),
    ("(q - q // 64 * 64) - k % 64 + k.floor_divide(64) - q // 64", "image 64"),
    ("q // 64 - k // 64 + (q - k).abs()", "image 64"),
    ("q // 128 - k // 128 + q % 64 - k % 64", "pair"),
    ("q // 64 - k // 64 + (q % 64 + k % 64)", "pair"),
    ("(k // 64 - q // 64) // 64 * 2 + q % 64 - k % 64", "image 64"),
    ("(q - k) // 64 + q % 64 - k % 64", "image 64"),
    ("(q + k) // 64 + q % 64 - k % 64", "pair"),
    ("(q + 1) // 64 - (k + 1) // 64 + q % 64 - k % 64", "pair"),
    ("q.float() % 64 - k.float() % 64 + (q // 64 - k // 64)", "pair"),
    ("q // 512 - k // 512 + (q % 512 - k % 512)", "diagonal"),
    # The last key is in the second row.
    ("q // 390 - k // 390 + (q % 390 - k % 390)", "pair"),
    ("q // 384 - k // 384 + (q % 384 - k % 384)", "image 384"),
]


@pytest.mark.parametrize(("body", "expected"), IMAGE_SPELLINGS, ids=[body for body, _ in IMAGE_SPELLINGS])
def test_spelling_of_a_place_in_an_image(body, expected):
    module, _, tables = analysed(body)
    Evaluate(module).run(torch.zeros(()), *(torch.zeros((), dtype=torch.int32) for _ in "bhqk"), *tables)
    (out,) = module.graph.find_nodes(op="output")[0].args
    assert str(footprints(module.graph, random_score_mods.IMAGE_EXTENTS)[out]) == expected


def same(values, others):
    """Whether values are equal but for the last bit: a vectorised function rounds the last elements of a row by itself."""
    return torch.allclose(values, others, rtol=5e-7, atol=0, equal_nan=True)


def varies(values, kind):
    """Whether ``values`` [B, H, Q, K] are more than this kind of function of the positions (for each batch and head)."""
    queries, keys = (torch.arange(n) for n in values.shape[2:])
    alike = kind.alike(queries[:, None], keys[None, :]).expand(values.shape[2:])
    index = torch.unique(alike, return_inverse=True)[1].reshape(-1)
    flat = values.reshape(*values.shape[:2], -1)
    representative = torch.zeros(*flat.shape[:2], int(index.max()) + 1, dtype=flat.dtype)
    representative[..., index] = flat
    return not same(representative[..., index], flat)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(random_score_mods.score_mods)
def test_no_node_depends_on_more_than_its_footprint_says(body):
    check_footprints(body, random_score_mods.EXTENTS)


@pytest.mark.breadth(0)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(random_score_mods.image_integers)
def test_no_place_in_an_image_depends_on_more_than_its_footprint_says(body):
    check_footprints(body, random_score_mods.IMAGE_EXTENTS)


def check_footprints(body, extents):
    module, score, tables = analysed(body)
    Evaluate(module).run(score, *random_score_mods.grid(extents), *tables)
    for node, footprint in footprints(module.graph, extents).items():
        value = node.meta.get("grid")
        if footprint.score or footprint.unknown or not isinstance(value, torch.Tensor) or node.name in ("t", "u", "w"):
            continue
        values = value.expand(extents).double()
        assert footprint.batch or same(values, values[:1].expand_as(values)), (node, footprint)
        assert footprint.head or same(values, values[:, :1].expand_as(values)), (node, footprint)
        assert not varies(values, footprint.kind), (node, footprint)


def test_equal_score_mods_are_read_once(monkeypatch):
    """The footprints of another graph of the same contents are known, and those for other lengths or dtypes are not."""
    evaluated, evaluate = [], analysis._evaluated
    monkeypatch.setattr(analysis, "_interpretations", {})
    monkeypatch.setattr(analysis, "_evaluated", lambda graph, *rest: evaluated.append(graph) or evaluate(graph, *rest))

    def of_result(dtype=torch.int32, extents=(None,) * 4):
        module, _, tables = analysed("(q.half() - k.half()) + t[q] * 0")
        Evaluate(module).run(torch.zeros(()), *(torch.zeros((), dtype=dtype) for _ in "bhqk"), *tables)
        (out,) = module.graph.find_nodes(op="output")[0].args
        return str(footprints(module.graph, extents)[out])

    short = (1, 1, 16, 16)
    assert [of_result(), of_result(), of_result(extents=short), of_result(extents=short)] == ["pair", "pair", "pair", "pair"]
    assert len(evaluated) == 2
    assert of_result(torch.int64, short) == "pair"
    assert len(evaluated) == 3


def test_what_is_known_has_the_ranges_of_its_symbols():
    """The second analysis of equal graphs knows the same numbers to be in the same ranges as the first."""
    module, _, tables = analysed("t[q // 2] + t[k % 3]")
    Evaluate(module).run(torch.zeros(()), *(torch.zeros((), dtype=torch.int32) for _ in "bhqk"), *tables)
    ranges = [analysis.Ranges((1, 1, 16, 16)) for _ in range(3)]
    for known in ranges[1:]:
        analysis._interpret(module.graph, known)
    assert ranges[0].key() != ranges[1].key() == ranges[2].key()
