"""``gradfuse explain``: the tables fit, the pictures hold the right values, the page needs nothing but itself."""

import base64
import contextlib
import html.parser
import io
import os
import re
import struct
import textwrap
import zlib

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import inductor_ext
from inductor_ext import cli, explain_html, explain_script, heat_maps, pictures
from inductor_ext.core.report import Report, collect, compiling, record
from inductor_ext.core.table import progress, short_path

from .support.eager_graphs import eager_graphs
from .support.interpreter import triton_on_cpu

H, S, D = 2, 48, 16

SCRIPT = f"""
    import sys
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    temperature, slope = torch.rand({H}), torch.rand({H})
    relative, column, row, pair = torch.randn(8, {H}), torch.randn({H}, {S}), torch.randn({H}, {S}), torch.randn({H}, {S}, {S})
    for tensor in (temperature, slope, relative, column, row, pair):
        tensor.requires_grad_()
    fixed = torch.randn({S})

    def score_mod(s, b, h, q, k):
        s = s * temperature[h] + relative[torch.clamp(q - k, 0, 7), h] + column[h, k] + row[h, q]
        return s + slope[h] * (k - q) + pair[h, q, k] + fixed[k]

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, {S}, {S}, device="cpu", BLOCK_SIZE=16)

    @torch.compile(backend="gradfuse")
    def attention(x):
        return flex_attention(x, x, x, score_mod=score_mod, block_mask=mask) if 1 < 2 & 3 else x

    x = torch.randn(1, {H}, {S}, {D}, requires_grad=True)
    attention(x).sum().backward()
    print("called with", sys.argv[1:])
    if "raise" in sys.argv:
        raise ValueError("what the script raised")
    if "exit" in sys.argv:
        sys.exit(3)
"""


def expected():
    """The terms of the script for head 0, in the order in which it has them, and its mask."""
    torch.manual_seed(0)
    temperature, slope = torch.rand(H), torch.rand(H)
    relative, column, row, pair = torch.randn(8, H), torch.randn(H, S), torch.randn(H, S), torch.randn(H, S, S)
    q, k = torch.arange(S)[:, None], torch.arange(S)[None, :]
    terms = {
        "temperature[h]": temperature[0].expand(S, S),
        "relative[clamp(q - k, 0, 7), h]": relative[(q - k).clamp(0, 7), 0],
        "column[h, k]": column[0][None, :].expand(S, S),
        "row[h, q]": row[0][:, None].expand(S, S),
        "slope[h] * (k - q)": slope[0] * (k - q),
        "pair[h, q, k]": pair[0],
    }
    full = q // 16 > k // 16
    return terms, torch.where(full, 2, (q >= k).long()).float()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The script explained once: the exit code, what was printed, and the page."""
    folder = tmp_path_factory.mktemp("explained")
    script, page = folder / "train.py", folder / "out.html"
    script.write_text(textwrap.dedent(SCRIPT))
    torch._dynamo.reset()
    with eager_graphs(), contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.main(["explain", str(script), "one", "--two", "--html", str(page)])
    return code, printed.getvalue(), page.read_text()


class Page(html.parser.HTMLParser):
    """Elements with their attributes, what is in each figure, and whether every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.figures, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "figure":
            self.figures.append({"class": dict(attrs)["class"], "text": "", "images": []})
        if tag == "img":
            self.figures[-1]["images"].append(dict(attrs))
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "figure" in self.open:
            self.figures[-1]["text"] += data


def decoded(uri):
    """The palette indices and the palette of a PNG file in a data URI."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert zlib.crc32(name + body) == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
        chunks[name], at = body, at + 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8).view(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:], torch.frombuffer(bytearray(chunks[b"PLTE"]), dtype=torch.uint8).view(-1, 3)


def learned_pictures(function, *inputs, **options):
    """The pictures of a function, compiled and called once."""
    with eager_graphs(), collect(pictures=True) as report:
        torch.compile(function, backend="gradfuse", **options)(*inputs)
    return report.pictures


def attention_of(score_mod):
    return lambda x: flex_attention(x, x, x, score_mod=score_mod)


# ---------------------------------------------------------------- the command


def test_the_script_runs_as_main_and_its_decisions_are_printed(ran):
    code, printed, _ = ran
    assert code == 0
    assert "called with ['one', '--two']" in printed
    assert "Graph 0, which begins at" in printed and "train.py:" in printed
    assert "blocked dense math" in printed and "flex_attention_backward" in printed and "-> table" in printed
    assert "out.html shows this with pictures" in printed


def explained(tmp_path, capfd, text, *arguments):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    with eager_graphs():
        code = cli.main(["explain", str(script), *arguments])
    return code, *capfd.readouterr()


def test_a_script_that_raises_shows_what_was_decided_and_its_traceback(tmp_path, capfd):
    code, out, err = explained(tmp_path, capfd, SCRIPT, "raise")
    assert code == 1 and "blocked dense math" in out
    assert "ValueError: what the script raised" in err and "runpy" not in err and "explain_script" not in err


def test_a_script_without_a_graph_says_so(tmp_path, capfd):
    code, out, _ = explained(tmp_path, capfd, "print('hello')", "--html", str(tmp_path / "none.html"))
    assert code == 1 and out.startswith("hello\n")
    words = " ".join(out.split())
    assert "script.py compiled no graph with gradfuse" in words and 'torch.compile(model, backend="gradfuse")' in words
    assert not (tmp_path / "none.html").exists()


def test_a_graph_without_a_decision_is_listed(tmp_path, capfd):
    text = "import torch\ntorch.compile(lambda x: x.sin(), backend='gradfuse')(torch.ones(3))"
    code, out, _ = explained(tmp_path, capfd, text)
    assert code == 0 and "Graph 0" in out and "nothing to do here" in out


@pytest.mark.parametrize(("ends", "code"), [("raise SystemExit(3)", 3), ("raise SystemExit('why')", 1), ("exit(0)", 1)])
def test_the_exit_code_is_the_script_s(tmp_path, capfd, ends, code):
    got, _, err = explained(tmp_path, capfd, f"import sys\n{ends}")
    assert got == code and ("why" in err) == ("why" in ends)


def test_a_script_that_does_not_exist(capfd):
    assert cli.main(["explain", "no such script.py"]) == 2
    assert "there is no file 'no such script.py'" in capfd.readouterr().err


def test_html_may_stand_anywhere_before_two_dashes():
    split = explain_script.split_html
    assert split(["a", "--html", "f", "b"]) == (["a", "b"], "f")
    assert split(["--html=f", "--", "--html", "g"]) == (["--html", "g"], "f")
    with pytest.raises(ValueError, match="--html needs"):
        split(["--html"])


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_table_is_as_wide_as_the_terminal(width, monkeypatch):
    with collect() as report, compiling(0, "somewhere.py:1: x"):
        record(
            "hoisting",
            "flex_attention",
            "table",
            "t[clamp(q - k, 0, 31), h]: a long reason, " * 8,
            "file.py:3: " + "code " * 60,
        )
        record("a_pass", "an_op", "stock", "z" * 300, "")
    assert max(map(len, report.text(width).splitlines())) <= width
    monkeypatch.setenv("COLUMNS", str(width))
    assert str(report) == report.text(width)
    # Words are cut only where they do not fit, and nothing is left out.
    assert "-> table" in str(report) and str(report).count("z") == 300 and str(report).count("reason,") == 8


def test_a_table_without_a_terminal_has_100_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    with collect() as report:
        record("a_pass", "an_op", "a_path", "why " * 100)
    with contextlib.redirect_stdout(io.StringIO()):
        assert max(map(len, str(report).splitlines())) <= 100


def test_paths_are_short():
    here = os.getcwd()
    assert short_path(f"{here}/models/layer.py") == "models/layer.py"
    assert short_path("/usr/lib/python3/site-packages/transformers/models/t5.py") == "transformers/models/t5.py"
    assert short_path(os.path.expanduser("~/elsewhere/a.py")) == "~/elsewhere/a.py"
    assert short_path("/nowhere/else/a.py") == "/nowhere/else/a.py"


# ---------------------------------------------------------------- the page


def test_the_page_parses_and_needs_nothing_else(ran):
    page = Page(ran[2])
    assert not page.open
    assert not {"script", "link", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.elements}
    addresses = [value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")]
    assert addresses and all(address.startswith("data:image/png;base64,") for address in addresses)
    without_data = re.sub(r"base64,[^\"]*", "", ran[2])
    assert not re.search(r"https?:|url\(|@import|//", without_data)


def test_the_page_has_the_table_of_decisions(ran):
    page = Page(ran[2])
    assert "Graph 0" in page.text and "blocked dense math" in page.text
    # The user's line has characters that mean something in HTML.
    assert "if 1 < 2 & 3 else x" in page.text and "if 1 < 2 &amp; 3" not in page.text


def test_there_is_one_heat_map_a_learned_term_and_its_values_are_right(ran):
    figures = [f for f in Page(ran[2]).figures if f["class"] == "term"]
    terms, _ = expected()
    assert [f["images"][0]["alt"] for f in figures] == list(terms)
    for figure, values in zip(figures, terms.values(), strict=True):
        indices, palette = decoded(figure["images"][0]["src"])
        assert indices.shape == (S, S)
        torch.testing.assert_close(indices.int(), heat_maps.shades(values).int(), atol=1, rtol=0)
        # The colours run from the least value to the greatest, which are written below.
        least, most = heat_maps.limits(values)
        assert palette.tolist() == [list(c) for c in heat_maps.palette(least, most)]
        assert f"{least:.4g}" in figure["text"] and f"{most:.4g}" in figure["text"]


def test_the_page_says_how_each_term_is_read_and_reduced(ran):
    text = {f["images"][0]["alt"]: f["text"] for f in Page(ran[2]).figures if f["class"] == "term"}
    assert "head+diagonal" in text["relative[clamp(q - k, 0, 7), h]"]
    assert "a table made outside the kernel [2, 95]: one value a distance" in text["slope[h] * (k - q)"]
    assert "by autograd" in text["relative[clamp(q - k, 0, 7), h]"]
    # It shares its table with what is added to it at the same keys.
    assert "a table made outside the kernel [2, 48]: one value a key" in text["column[h, k]"]
    assert "temperature [2]: one value for all pairs" in text["temperature[h]"]
    assert "summed over the queries of a block" in text["column[h, k]"]
    assert "summed over the queries and keys" in text["temperature[h]"]
    assert "softmax does not see it" in text["row[h, q]"] and "exactly zero" in text["row[h, q]"]
    assert "every pair of a block added" in text["pair[h, q, k]"]


def test_the_mask_is_drawn(ran):
    mask, blocks = (f for f in Page(ran[2]).figures if f["class"] == "mask")
    assert torch.equal(decoded(mask["images"][0]["src"])[0].float(), expected()[1])
    assert decoded(blocks["images"][0]["src"])[0].tolist() == [[1, 0, 0], [2, 1, 0], [2, 2, 1]]


def test_titles_are_escaped():
    text = explain_html.page(Report(), "<b>&")
    assert "<b>" not in text and Page(text).text.count("<b>&") == 2


# ---------------------------------------------------------------- what can be drawn, and what cannot


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
    (figure,) = Page(explain_html.fragment(report)).figures
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
    (figure,) = Page(explain_html.fragment(Report(graphs={picture.graph: ""}, pictures=[picture]))).figures
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
    assert "(128 of them shown)" in explain_html.fragment(Report(graphs={picture.graph: ""}, pictures=[picture]))


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
    assert "under vmap" in explain_html.fragment(Report(graphs={picture.graph: ""}, pictures=[picture]))


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
    said = [explain_html.gradient(report, p, p.terms[0]) for p in report.pictures]
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
    assert "summed along the diagonals of a tile; from the table" in explain_html.gradient(report, picture, picture.terms[0])


def test_what_is_not_finite_has_a_colour_of_its_own():
    values = torch.tensor([[-1.0, 0.0], [1.0, float("-inf")]])
    assert heat_maps.shades(values).tolist() == [[1, 128], [255, 0]]
    assert heat_maps.palette(-1.0, 1.0)[128] == (250, 250, 250)


# ---------------------------------------------------------------- progress


class Screen(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize(("terminal", "patience", "shown"), [(True, 0.0, True), (False, 0.0, False), (True, 60.0, False)])
def test_a_bar_is_for_terminals_and_for_what_is_slow(monkeypatch, terminal, patience, shown):
    screen = Screen(terminal)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("inductor_ext.core.table.PATIENCE", patience)
    assert list(progress("counting", "number", of=range(3))) == [0, 1, 2]
    assert ("counting" in screen.getvalue()) == shown
