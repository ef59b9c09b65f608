"""What ``explain`` draws of attentions: the values, or why not."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import inductor_ext
from inductor_ext.core.report import Report, collect
from inductor_ext.explanations import heat_maps, html, pictures
from tests.support.eager_graphs import eager_graphs
from tests.support.interpreter import triton_on_cpu
from tests.support.pages import Page, decoded

H, S, D = 2, 48, 16


def learned_pictures(function, *inputs, **options):
    """The pictures of a function, compiled and called once."""
    with eager_graphs(), collect(pictures=True) as report:
        torch.compile(function, backend="gradfuse", **options)(*inputs)
    return report.pictures


def attention_of(score_mod):
    return lambda x: flex_attention(x, x, x, score_mod=score_mod)


def test_explain_shows_itself_in_a_notebook():
    table, x = torch.randn(S, requires_grad=True), torch.randn(1, H, S, D, requires_grad=True)
    with eager_graphs():
        explanation = inductor_ext.explain(attention_of(lambda s, b, h, q, k: s + table[k]))(x)
    (figure,) = Page(explanation._repr_html_()).figures
    expect = heat_maps.shades(table.detach().expand(S, S))
    torch.testing.assert_close(decoded(figure["images"][0]["src"])[0].int(), expect.int(), atol=1, rtol=0)
    assert explanation.html("title").startswith("<!DOCTYPE html>")


def test_nothing_is_looked_at_unless_somebody_wants_to_see_it(monkeypatch):
    monkeypatch.setattr(pictures, "_sketches", lambda *_: pytest.fail("pictures were made"))
    table, x = torch.randn(S, requires_grad=True), torch.randn(1, H, S, D, requires_grad=True)
    with eager_graphs(), collect() as report:
        torch.compile(attention_of(lambda s, b, h, q, k: s + table[k]), backend="gradfuse")(x)
    assert report.decisions and not report.pictures


def test_a_picture_that_fails_stops_nothing(monkeypatch):
    monkeypatch.setattr(pictures, "_sketch", lambda *_: 1 / 0)
    table, x = torch.randn(S, requires_grad=True), torch.randn(1, H, S, D, requires_grad=True)
    assert learned_pictures(attention_of(lambda s, b, h, q, k: s + table[k]), x) == []


def test_decisions_are_recorded_once():
    """The passes run once more on the copy that is looked at."""
    table, x = torch.randn(2 * S, requires_grad=True), torch.randn(1, H, S, D, requires_grad=True)
    with eager_graphs(), collect(pictures=True) as report:
        torch.compile(attention_of(lambda s, b, h, q, k: s + table[q - k + S]), backend="gradfuse")(x)
    assert [d.path for d in report.decisions if d.pass_name == "hoisting"] == ["table"]
    assert {d.graph for d in report.decisions} == set(report.graphs)


class Layers(torch.nn.Module):
    """A bias that the first layer's attention has a say in, in a checkpoint or not."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(D, 1)

    def forward(self, x, checkpointed):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=False) if checkpointed else self.layer(x)
        return x

    def layer(self, x):
        bias = self.line(x)[..., 0]
        return flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s + bias[b, h, k])


@pytest.mark.breadth(1)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_bias_that_is_computed_from_activations_is_drawn_as_it_was(checkpointed):
    layers, x = Layers(), torch.randn(1, H, S, D)
    first, second = sorted(learned_pictures(layers, x, checkpointed), key=lambda p: p.terms[0].grid.values is None)
    hidden = x
    for picture in (first, second):
        bias = layers.line(hidden)[0, 0, :, 0].detach().expand(S, S)
        torch.testing.assert_close(picture.terms[0].grid.values, bias, atol=1e-4, rtol=1e-4)
        line = layers.line(hidden)[..., 0]
        hidden = flex_attention_eagerly(hidden, line)


def flex_attention_eagerly(x, bias):
    return (x @ x.mT / D**0.5 + bias[:, :, None, :]).softmax(-1) @ x


@pytest.mark.breadth(2)
@pytest.mark.parametrize("change", ["dropout", "in place", "score"])
def test_what_cannot_be_computed_again_is_drawn_as_its_footprint(change):
    table, x = torch.randn(H, S, requires_grad=True), torch.randn(1, H, S, D, requires_grad=True)

    def attention(x, table):
        bias = torch.nn.functional.dropout(table, 0.5) if change == "dropout" else table.view(H, S)
        if change == "in place":
            buffer.add_(1)
            bias = bias + buffer
        score_mod = lambda s, b, h, q, k: s + (bias[h, s.long().abs() % S] if change == "score" else bias[h, k])  # noqa: E731
        return flex_attention(x, x, x, score_mod=score_mod)

    buffer = torch.zeros(S)
    (picture,) = learned_pictures(attention, x, table)
    assert change != "in place" or buffer.eq(1).all()
    (term,) = picture.terms
    reason = {"dropout": "random numbers", "in place": "written in place", "score": "depends on the score"}[change]
    assert term.grid.values is None and reason in term.grid.missing
    report = Report(graphs={picture.graph: ""}, pictures=[picture])
    (figure,) = Page(html.fragment(report)).figures
    assert figure["class"] == "schematic" and reason in figure["text"]
    indices, _ = decoded(figure["images"][0]["src"])
    assert (term.structure is None) == (change == "score")
    # One value a key.
    assert change == "score" or ((indices == indices[:1]).all() and indices[0].unique().numel() > 16)


def test_a_bias_that_is_zero_still_shows_its_structure():
    table, x = torch.zeros(16, requires_grad=True), torch.randn(1, H, S, D, requires_grad=True)
    (picture,) = learned_pictures(attention_of(lambda s, b, h, q, k: s + table[(q - k).clamp(0, 15)]), x)
    distance = (torch.arange(S)[:, None] - torch.arange(S)[None, :]).clamp(0, 15)
    shown = picture.terms[0].structure.values
    assert all(shown[distance == d].unique().numel() == 1 for d in range(16)) and shown.unique().numel() == 16
    (figure,) = Page(html.fragment(Report(graphs={picture.graph: ""}, pictures=[picture]))).figures
    assert figure["class"] == "schematic" and "all values are 0" in figure["text"]
    indices, _ = decoded(figure["images"][0]["src"])
    assert torch.equal(indices, heat_maps.shades(shown))


def test_long_sequences_are_sampled():
    length = 300
    table, x = torch.randn(length, requires_grad=True), torch.randn(1, 1, length, D, requires_grad=True)
    (picture,) = learned_pictures(attention_of(lambda s, b, h, q, k: s + table[k]), x, dynamic=True)
    grid = picture.terms[0].grid
    assert grid.values.shape == (128, 128) and (grid.keys[0], grid.keys[-1]) == (0, length - 1)
    torch.testing.assert_close(grid.values, table.detach()[grid.keys].expand(128, 128))
    assert "(128 of them shown)" in html.fragment(Report(graphs={picture.graph: ""}, pictures=[picture]))


def test_an_index_that_the_mask_hides_is_not_read():
    table, x = torch.randn(S, requires_grad=True), torch.randn(1, H, S, D, requires_grad=True)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, S, S, device="cpu", BLOCK_SIZE=16)
    (picture,) = learned_pictures(
        lambda x: flex_attention(
            x, x, x, score_mod=lambda s, b, h, q, k: s + table[(q - k).abs() + (k > q) * 1000], block_mask=mask
        ),
        x,
    )
    assert picture.terms[0].grid.missing == ""
    torch.testing.assert_close(picture.terms[0].grid.values.tril()[-1], table.detach().flip(0))


def test_a_block_mask_that_is_made_in_the_compiled_region():
    """Its blocks are not known from outside, the mask_mod is."""
    x = torch.randn(1, H, S, D, requires_grad=True)

    def attention(x):
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, S, S, device="cpu", BLOCK_SIZE=16)
        return flex_attention(x, x, x, block_mask=mask)

    (picture,) = learned_pictures(attention, x)
    assert torch.equal(picture.mask.values, torch.ones(S, S).tril()) and "under vmap" in picture.blocks.missing
    assert "under vmap" in html.fragment(Report(graphs={picture.graph: ""}, pictures=[picture]))


def test_attentions_of_one_line_have_their_own_gradients():
    """The backward of the second attention is compiled first."""
    x = torch.randn(1, H, S, D, requires_grad=True)
    tables = [torch.randn(S, requires_grad=True), torch.randn(1, requires_grad=True)]
    mods = [lambda s, b, h, q, k: s + tables[0][k], lambda s, b, h, q, k: s * tables[1][0]]

    def attention(x):
        for mod in mods:
            x = flex_attention(x, x, x, score_mod=mod)
        return x

    with eager_graphs(), collect(pictures=True) as report:
        torch.compile(attention, backend="gradfuse")(x).sum().backward()
    said = [html.gradient(report, p, p.terms[0]) for p in report.pictures]
    assert said == [
        "summed over the queries of a block, then added",
        "summed over the queries and keys of a block, then added",
    ]


def test_the_kernels_say_how_they_reduce():
    table, x = torch.randn(2 * S, requires_grad=True), torch.randn(1, H, S, D, requires_grad=True)
    with triton_on_cpu(), collect(pictures=True) as report:
        attention = torch.compile(attention_of(lambda s, b, h, q, k: s + table[q - k + S]), backend="gradfuse")
        attention(x).sum().backward()
    (picture,) = report.pictures
    assert "summed along the diagonals of a tile; from the table" in html.gradient(report, picture, picture.terms[0])


def test_what_is_not_finite_has_a_colour_of_its_own():
    values = torch.tensor([[-1.0, 0.0], [1.0, float("-inf")]])
    assert heat_maps.shades(values).tolist() == [[1, 128], [255, 0]]
    assert heat_maps.palette(-1.0, 1.0)[128] == (250, 250, 250)
