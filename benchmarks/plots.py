"""The plots of the documents. matplotlib is imported only to draw them, because the tables do not need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from .costs import compile_times
from .rows import BYTES_PER_MS, by_peer, load, measured

#: The colours of peers.
OURS, STOCK, OTHER, EAGER = "#2a6fdb", "#8f8f8f", "#c77f12", "#d6d6d6"
#: Where bars begin.
FIRST = 0.5


def write(folder: Path) -> None:
    """Draw every plot into ``folder``."""
    flex_plot(folder / "flex.svg")
    biases_plot(folder / "biases.svg")
    moe_plot(folder / "moe.svg")
    mlstm_plot(folder / "mlstm.svg")
    scan_plot(folder / "scan.svg")
    scaling_plot(folder / "scaling.svg")
    compile_time_plot(folder / "compile_time.svg")


def lines_plot(path: Path, xlabel: str, ylabel: str, times: pd.DataFrame, colours: dict[str, str]) -> None:
    """Milliseconds of each peer, a column of ``times``, by length.

    The name of a peer is beside the end of its line: on the right of the plot, or on the left of an end within the plot.
    """
    figure, axes = new_figure(3.6)
    for peer, colour in colours.items():
        own = times[peer].dropna().sort_index()
        axes.plot(own.index, own, marker="o", color=colour)
        side, offset = ("left", (9, 0)) if own.index[-1] == times.index[-1] else ("right", (-9, 7))
        end = own.index[-1], own.iloc[-1]
        axes.annotate(peer, end, offset, textcoords="offset points", ha=side, va="center", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(y=0.1)
    axes.set_xticks(times.index, map(str, times.index))
    axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    save(figure, axes, path)


def bars_plot(path: Path, xlabel: str, values: pd.DataFrame, colours: dict[str, str], text: str) -> None:
    """A group of horizontal bars for each row of ``values``, a bar for each column. What is missing was refused."""
    figure, axes = new_figure(0.6 + len(values) * (0.12 + 0.17 * len(colours)))
    height = 0.84 / len(colours)
    for place, (peer, colour) in enumerate(colours.items()):
        at = [i + (place + 0.5) * height - 0.42 for i in range(len(values))]
        bars = axes.barh(at, values[peer].fillna(FIRST), 0.9 * height, label=peer, color=colour)
        labels = ["refused" if pd.isna(value) else format(value, text) for value in values[peer]]
        axes.bar_label(bars, labels, fontsize=7, padding=3)
    axes.set_xscale("log")
    axes.set_xlim(FIRST, 2 * values[list(colours)].max().max())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(values)), values.index)
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_xlabel(xlabel)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(colours))
    save(figure, axes, path)


def mlstm_plot(path: Path) -> None:
    """Kernel time of a step by length."""
    rows = measured(load("mlstm"))
    rows = rows[rows.refused.isna() & (rows.width == 128)]
    rows["step_ms"] = rows.forward_kernels_ms + rows.backward_kernels_ms
    times = rows.pivot(index="length", columns="peer", values="step_ms")
    colours = {"stock, plain form": STOCK, "triton_limit_chunk 64": OTHER, "gradfuse": OURS}
    lines_plot(path, "tokens of a sequence", "forward + backward, ms", times, colours)


def scan_plot(path: Path) -> None:
    """Kernel time of the gated recurrence's backward by length, along dim 1 of [8, length, 512] fp32."""
    rows = measured(load("scan"))
    rows = rows[rows.case.str.startswith("gated") & (rows.dim == 1) & (rows.dtype == "float32")]
    rows["length"] = rows["shape"].str[1]
    times = rows.pivot(index="length", columns="peer", values="backward_kernels_ms")
    lines_plot(path, "length", "backward, ms", times, {"stock": STOCK, "stock, generic": OTHER, "gradfuse": OURS})


def scaling_plot(path: Path) -> None:
    """Time of a step by the number of GPUs."""
    rows = measured(load("scaling"))
    layer = rows.case.str.split().str[0]
    times = rows.assign(layer=layer).groupby(["gpus", "layer"]).step_ms.min().unstack()
    lines_plot(path, "GPUs", "step, ms", times, dict(zip(times, (OURS, OTHER), strict=True)))


def compile_time_plot(path: Path) -> None:
    """Time of a first step over stock's, by model."""
    seconds = compile_times()
    values = pd.DataFrame({when: seconds[f"{when}_s"].gradfuse / seconds[f"{when}_s"].stock for when in ("cold", "warm")})
    bars_plot(path, "first step / stock's (log)", values.dropna(), {"cold": OTHER, "warm": OURS}, ".2f")


def moe_plot(path: Path) -> None:
    """Backward kernel time over the bound, by case."""
    rows = measured(load("moe")).query("backward_bytes > 0")
    rows["times_bound"] = rows.backward_kernels_ms / (rows.backward_bytes / BYTES_PER_MS)
    colours = {"eager": EAGER, "stock": STOCK, "gradfuse": OURS}
    values = by_peer(rows, "case", ["times_bound"]).times_bound
    bars_plot(path, "kernel time of the backward / bandwidth bound (log)", values, colours, ".2f")


def biases_plot(path: Path) -> None:
    """Time of a step with a bias of a real model, over the bound."""
    rows = measured(load("biases"))
    bound = rows.bound_forward_ms + rows.bound_backward_ms
    rows["times_bound"] = (rows.forward_ms + rows.backward_ms) / bound
    colours = {"stock": STOCK, "sdpa-mask": OTHER, "gradfuse": OURS}
    values = by_peer(rows, "case", ["times_bound"]).times_bound
    bars_plot(path, "forward + backward / bound (log)", values, colours, ".1f")


def flex_plot(path: Path) -> None:
    """Time of the backward at a head width of 64, by score_mod."""
    values = by_peer(measured(load("flex")).query("dim == 64"), "case", ["backward_ms"]).backward_ms
    bars_plot(path, "backward, ms (log)", values, {"stock": STOCK, "gradfuse": OURS}, ".2f")


def new_figure(height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gradfuse"
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(9, height), layout="constrained")


def save(figure: Any, axes: Any, path: Path) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
