"""``gradfuse explain``: what it prints, and a page whose pictures hold the right values and that needs nothing but itself."""

import contextlib
import io
import re
import textwrap

import pytest
import torch

from inductor_ext import cli
from inductor_ext.core.report import Report
from inductor_ext.explanations import heat_maps, html, script
from tests.support.eager_graphs import eager_graphs
from tests.support.pages import Page, decoded

H, S, D = 2, 48, 16

SCRIPT = f"""
    import sys
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    temperature, slope = torch.rand({H}), torch.rand({H})
    relative, column, row, pair = torch.randn(8, {H}), torch.randn({H}, {S}), torch.randn({H}, {S}), torch.randn({H}, {S}, {S})
    learned = map(torch.nn.Parameter, (temperature, slope, relative, column, row, pair))
    temperature, slope, relative, column, row, pair = learned
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


# ---------------------------------------------------------------- the command


def test_the_script_runs_as_main_and_its_decisions_are_printed(ran):
    code, printed, _ = ran
    assert code == 0
    assert "called with ['one', '--two']" in printed
    assert "Graph 0, which begins at" in printed and "train.py:" in printed
    assert "blocked dense math" in printed and "flex_attention_backward" in printed
    # Of what is merged into one table no part is hoisted once more.
    assert printed.count("-> table") == 2
    assert "out.html shows these decisions with pictures" in printed


def explained(tmp_path, capfd, text, *arguments):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    with eager_graphs():
        code = cli.main(["explain", str(script), *arguments])
    return code, *capfd.readouterr()


def test_a_script_that_raises_shows_what_was_decided_and_its_traceback(tmp_path, capfd):
    code, out, err = explained(tmp_path, capfd, SCRIPT, "raise")
    assert code == 1 and "blocked dense math" in out
    assert "ValueError: what the script raised" in err and "runpy" not in err and "explanations" not in err


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
    split = script.split_html
    assert split(["a", "--html", "f", "b"]) == (["a", "b"], "f")
    assert split(["--html=f", "--", "--html", "g"]) == (["--html", "g"], "f")
    with pytest.raises(ValueError, match="--html needs"):
        split(["--html"])


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
    assert "a table made outside the kernel [2, 95]: one value for each distance" in text["slope[h] * (k - q)"]
    assert "by autograd" in text["relative[clamp(q - k, 0, 7), h]"]
    # It shares its table with what is added to it at the same keys.
    assert "a table made outside the kernel [2, 48]: one value for each key" in text["column[h, k]"]
    assert "temperature [2]: one value for all pairs" in text["temperature[h]"]
    assert "summed over the queries of a block" in text["column[h, k]"]
    assert "summed over the queries and keys" in text["temperature[h]"]
    assert "softmax cancels it" in text["row[h, q]"] and "exactly zero" in text["row[h, q]"]
    assert "added for every pair of a block" in text["pair[h, q, k]"]


def test_the_mask_is_drawn(ran):
    mask, blocks = (f for f in Page(ran[2]).figures if f["class"] == "mask")
    assert torch.equal(decoded(mask["images"][0]["src"])[0].float(), expected()[1])
    assert decoded(blocks["images"][0]["src"])[0].tolist() == [[1, 0, 0], [2, 1, 0], [2, 2, 1]]


def test_titles_are_escaped():
    text = html.page(Report(), "<b>&")
    assert "<b>" not in text and Page(text).text.count("<b>&") == 2
