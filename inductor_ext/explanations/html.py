"""Write the result of ``explain`` as HTML: the decisions for every graph, and the mask and learned terms of attentions.

A page needs no other files: styles are inline, pictures are PNG files in data URIs, and there are no scripts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import torch

from ..attention.footprints import Footprint
from ..attention.kinds import PAIR
from ..core.report import NOTHING, STOCK, Decision, Report
from ..core.table import wrapped
from . import heat_maps
from .pictures import Grid, Picture, Term

_STYLE = """
.gradfuse { font: 14px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1100px }
.gradfuse code { font: 12.5px/1.4 ui-monospace, monospace; overflow-wrap: anywhere }
.gradfuse table { border-collapse: collapse; margin: 8px 0 16px }
.gradfuse th, .gradfuse td { border: 1px solid #ccc; padding: 4px 8px; text-align: left; vertical-align: top }
.gradfuse tr.stock td { background: #fff3e0 }
.gradfuse section.attention { border-left: 4px solid #4a7fb5; padding-left: 14px; margin: 18px 0 }
.gradfuse .pictures { display: flex; flex-wrap: wrap; gap: 22px }
.gradfuse figure { margin: 0; width: 260px }
.gradfuse img.map { width: 240px; height: 240px; image-rendering: pixelated; border: 1px solid #999; display: block }
.gradfuse img.scale { width: 240px; height: 8px; display: block; margin-top: 5px }
.gradfuse .ends, .gradfuse .axis { display: flex; justify-content: space-between; width: 240px }
.gradfuse .ends, .gradfuse .axis { font-size: 11px; color: #555 }
.gradfuse figcaption { margin-top: 5px; font-size: 12.5px }
.gradfuse dl { margin: 4px 0; display: grid; grid-template-columns: max-content 1fr; gap: 1px 8px }
.gradfuse dt { color: #555 } .gradfuse dd { margin: 0 }
"""
#: The heading of the decisions that were not taken while a graph was compiled.
AT_RUN_TIME = "At run time"
#: The meaning of the colours of a mask and of its blocks.
MASK_NAMES = ("hidden", "visible by the mask_mod", "visible, no mask is computed")
BLOCK_NAMES = ("skipped", "the mask_mod is computed", "full, no mask is computed")


def page(report: Report, title: str) -> str:
    """Return a whole HTML document."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>body {{ margin: 24px }}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{fragment(report, title)}\n</body></html>\n'


def fragment(report: Report, title: str = "") -> str:
    """Return the same for use inside another document, for example a notebook."""
    parts = [f"<h1>{escape(title)}</h1>"] if title else []
    for order, number in enumerate(report.graphs):
        parts.append(_graph(report.of_graph(number), order, report.graphs[number]))
    others = report.of_graph(None)
    if others.decisions or not report.graphs:
        parts += [f"<h2>{AT_RUN_TIME}</h2>"] * bool(report.graphs)
        parts.append(_decisions(others.decisions))
    return f'<div class="gradfuse"><style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</div>"


def _graph(report: Report, order: int, where: str) -> str:
    heading = f"<h2>Graph {order}</h2>" + (f"<p>It begins at <code>{escape(where)}</code></p>" if where else "")
    attentions = [_attention(report, picture) for picture in report.pictures]
    return "\n".join([heading, _decisions(report.decisions), *attentions])


def _decisions(decisions: Sequence[Decision]) -> str:
    if not decisions:
        return f"<p>{escape(NOTHING)}</p>"
    seen = dict.fromkeys((d.op, d.path, d.pass_name, d.why, d.where) for d in decisions)
    rows = []
    for op, path, pass_name, why, where in seen:
        cells = [f"<code>{escape(op)}</code>", escape(path), escape(pass_name), escape(why), f"<code>{escape(where)}</code>"]
        kind = ' class="stock"' if path == STOCK else ""
        rows.append(f"<tr{kind}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{name}</th>" for name in ("op", "became", "pass", "why", "where"))
    return f"<table><thead><tr>{header}</tr></thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table>"


# ---------------------------------------------------------------- one attention


def _attention(report: Report, picture: Picture) -> str:
    facts = [
        f"<h3>flex_attention at <code>{escape(picture.where)}</code></h3>",
        f"<p>score_mod: <code>{escape(picture.score_mod)}</code>; {escape(picture.shape)}</p>",
        "<p>Every picture is for batch element 0 and head 0; queries run down, keys run to the right.</p>",
    ]
    figures = [*_masks(picture), *(_term(report, picture, term) for term in picture.terms)]
    if not picture.terms:
        facts.append("<p>Its score_mod has no learned term.</p>")
    return f'<section class="attention">{"".join(facts)}\n<div class="pictures">{"".join(figures)}</div></section>'


def _masks(picture: Picture) -> list[str]:
    if picture.mask is None:
        return []
    figures = [_categories("mask", picture.mask, MASK_NAMES)]
    if picture.blocks is not None:
        figures.append(_categories("blocks of the block mask", picture.blocks, BLOCK_NAMES))
    return figures


def _categories(name: str, grid: Grid, names: Sequence[str]) -> str:
    if grid.values is None:
        return f"<figure><figcaption><b>{name}</b>, not drawn: {escape(grid.missing)}</figcaption></figure>"
    legend = []
    for i, text in enumerate(names):
        share = float((grid.values == i).float().mean())
        legend.append(
            f'<dt style="background:{heat_maps.css(heat_maps.CATEGORIES[i])}">&emsp;</dt><dd>{text}: {share:.0%}</dd>'
        )
    image = heat_maps.categories_png(grid.values)
    return _figure("mask", image, name, grid, f"<figcaption><b>{name}</b><dl>{''.join(legend)}</dl></figcaption>")


def _term(report: Report, picture: Picture, term: Term) -> str:
    facts = [("footprint", str(term.footprint)), ("read", term.read), ("gradient", gradient(report, picture, term))]
    drawn = _instead_of_values(term)
    if drawn:
        facts.append(("drawn", drawn))
    listed = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    caption = f"<figcaption><code>{escape(term.text)}</code><dl>{listed}</dl></figcaption>"
    if drawn:
        pattern = schematic(term.footprint) if term.structure is None else heat_maps.shades(term.structure.values)
        return _figure("schematic", heat_maps.schematic_png(pattern), term.text, term.structure or Grid(), caption)
    least, most = heat_maps.limits(term.grid.values)
    ends = f'<div class="ends"><span>{least:.4g}</span><span>{most:.4g}</span></div>'
    scale = f'<img class="scale" alt="colour scale" src="{heat_maps.scale_png(least, most)}">{ends}'
    return _figure("term", heat_maps.png_of(term.grid.values), term.text, term.grid, scale + caption)


def _instead_of_values(term: Term) -> str:
    """Return what the picture of a term shows, and why, if it does not show the values."""
    if term.grid.values is not None and term.structure is None:
        return ""
    what = (
        "only its footprint" if term.structure is None else "which values are equal, with random numbers for the parameters"
    )
    if term.grid.values is None:
        return f"{what}; its values are not known ({term.grid.missing})"
    return f"{what}; all values are {float(term.grid.values[0, 0]):.4g}"


def _figure(kind: str, image: str, name: str, grid: Grid, below: str) -> str:
    axis = ""
    if grid.keys:
        every = "" if len(grid.keys) == grid.keys[-1] + 1 else f" ({len(grid.keys)} of them shown)"
        axis = f'<div class="axis"><span>key 0</span><span>{grid.keys[-1]}{every}</span></div>'
    return f'<figure class="{kind}"><img class="map" alt="{escape(name)}" src="{image}">{axis}{below}</figure>'


def gradient(report: Report, picture: Picture, term: Term) -> str:
    """Return a sentence about the way in which the gradient of a term is reduced."""
    if not term.owners:
        return "it is exactly zero"
    reductions = _backward(report, picture)
    if reductions is None:
        return "gradfuse compiled no backward for this attention"
    ways = dict.fromkeys(how for owner, how in reductions if owner in term.owners)
    text = "; ".join(ways) or "no gradient is needed"
    return f"{text}; from the table to the parameters it is computed by autograd" if term.hoisted else text


def _backward(report: Report, picture: Picture) -> tuple[tuple[int, str], ...] | None:
    """Return how the captured gradients of an attention are reduced. Backwards are compiled in the opposite order."""
    same = [p for p in report.pictures if (p.graph, p.where) == (picture.graph, picture.where)]
    decisions = [d for d in report.decisions if d.op == "flex_attention_backward" and d.graph == picture.graph]
    found = [d for d in decisions if d.where == picture.where and d.path != STOCK]
    if not found:
        return None
    number = next(i for i, p in enumerate(same) if p is picture)
    return (found[len(same) - 1 - number] if len(found) == len(same) else found[0]).reductions


def schematic(footprint: Footprint) -> torch.Tensor:
    """Return a pattern for a footprint: it is equal where a term with this footprint must be equal."""
    q, k = torch.arange(16)[:, None], torch.arange(16)[None, :]
    if not footprint.unknown and footprint.kind is not PAIR:
        alike = footprint.kind.alike(q, k)
        return alike - alike.min()
    # The values of a pair need not be equal anywhere, so neighbours differ.
    return (q * 37 + k * 59 + q * k * 11) % 31


def lines(report: Report, width: int | None = None) -> Iterable[str]:
    """Yield the decisions as text, with a table for each graph."""
    for order, (number, where) in enumerate(report.graphs.items()):
        yield wrapped(f"Graph {order}" + (f", which begins at {where}" if where else ""), width)
        yield report.of_graph(number).text(width)
        yield ""
    others = report.of_graph(None)
    if others.decisions:
        yield AT_RUN_TIME
        yield others.text(width)
