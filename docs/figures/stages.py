"""Draw the stages of a compilation: ``python docs/figures/stages.py`` writes stages.svg beside this file.

The drawing is plain SVG text. The passes of a stage come from ``STAGES``; ``tests/test_docs.py`` holds that every pass of
``inductor_ext.registry.NAMES`` stands in one of them, and that the file is what this script writes.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple


class Stage(NamedTuple):
    """A box: its title, what it holds, whether it is ours, and the passes that run there."""

    title: str
    text: str
    ours: bool
    passes: tuple[str, ...] = ()


STAGES = (
    Stage("torch.compile: Dynamo", "traces your code into an FX graph", False),
    Stage(
        'Stage "dynamo"',
        "plain FX, before autograd",
        True,
        (
            "attention_pattern",
            "score_mods",
            "hoisting",
            "layouts",
            "attention_dropout",
            "time_loops",
            "scans",
            "mlstm_pattern",
            "equal_graphs",
            "linears_together",
        ),
    ),
    Stage("AOTAutograd", "derives the backward: one joint graph", False),
    Stage(
        'Stage "joint"',
        "forward and backward in one graph",
        True,
        ("cpu_indices", "scatters", "gathers", "casts", "out_dtype"),
    ),
    Stage("Inductor", "its own passes over the joint graph", False),
    Stage('Stage "partition"', "the same graph, before it is partitioned", True, ("no_mask",)),
    Stage("AOTAutograd", "partitions it into a forward and a backward graph", False),
    Stage('Stage "post_aot"', "forms for the CPU, groups of casts", True, ("dense_attention", "mlstm", "casts_together")),
    Stage(
        "Inductor lowering, with our entries",
        "FX node to Inductor IR; one template for each kernel",
        True,
        (
            *("flex_attention", "flex_attention_backward", "gluon", "batch_sums", "mlstm"),
            *(
                "linear_scan",
                "scan_forward",
                "scan_backward",
                "gather_sum",
                "counted_order",
                "segment_sum",
                "entry_sums",
                "bin_sums",
                "place_rows",
            ),
        ),
    ),
    Stage("Inductor code generation", "Triton on a GPU, C++ on a CPU; fusion, caches, launching", False),
)

WIDTH, BOX, GAP, LEFT, PASSES_LEFT, CHIP = 900, 54, 26, 20, 450, 26
OURS, STOCK, INK = "#dce8fb", "#efefef", "#222222"
FONT, MONOSPACE = "Helvetica, Arial, sans-serif", "Menlo, Consolas, monospace"


def text(x: float, y: float, content: str, size: int, weight: str = "normal", font: str = FONT) -> str:
    """One line of text."""
    style = f"font-family='{font}' font-size='{size}' font-weight='{weight}' fill='{INK}'"
    return f"<text x='{x:g}' y='{y:g}' {style}>{escape(content)}</text>"


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """A rectangle with round corners."""
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='6' fill='{fill}' stroke='#888888'/>"


def chips(y: float, passes: tuple[str, ...]) -> list[str]:
    """The names of passes in small boxes as wide as their letters need, in as many lines as they need, centred at ``y``."""
    lines: list[list[tuple[float, str]]] = [[]]
    x = float(PASSES_LEFT)
    for name in passes:
        width = 8 * len(name) + 16
        if x + width > WIDTH - LEFT:
            lines.append([])
            x = float(PASSES_LEFT)
        lines[-1].append((x, name))
        x += width + 8
    parts, top = [], y - (CHIP * len(lines) + 6 * (len(lines) - 1)) / 2
    for i, line in enumerate(lines):
        at = top + i * (CHIP + 6)
        for x, name in line:
            parts += [box(x, at, 8 * len(name) + 16, CHIP, "#ffffff"), text(x + 8, at + 17, name, 13, font=MONOSPACE)]
    return parts


def draw() -> str:
    """The whole picture."""
    height = 30 + len(STAGES) * (BOX + GAP) + 20
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'>",
        "<title>The stages of a compilation with gradfuse</title>",
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
    ]
    for i, stage in enumerate(STAGES):
        y = 14 + i * (BOX + GAP)
        parts.append(box(LEFT, y, 400, BOX, OURS if stage.ours else STOCK))
        parts.append(text(LEFT + 14, y + 23, stage.title, 15, weight="bold"))
        parts.append(text(LEFT + 14, y + 42, stage.text, 13))
        parts += chips(y + BOX / 2, stage.passes)
        if i + 1 < len(STAGES):
            middle, top, bottom = LEFT + 200, y + BOX, y + BOX + GAP
            parts.append(f"<line x1='{middle}' y1='{top}' x2='{middle}' y2='{bottom - 7}' stroke='{INK}'/>")
            arrow = f"{middle - 5},{bottom - 8} {middle + 5},{bottom - 8} {middle},{bottom}"
            parts.append(f"<polygon points='{arrow}' fill='{INK}'/>")
    y = height - 22
    parts += [box(LEFT, y, 16, 12, OURS), text(LEFT + 24, y + 11, "gradfuse", 13)]
    parts += [box(LEFT + 110, y, 16, 12, STOCK), text(LEFT + 134, y + 11, "PyTorch, unchanged", 13)]
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
