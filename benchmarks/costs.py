"""Tables of what a backend costs besides the time of its kernels: launches, memory and compilation."""

from __future__ import annotations

import pandas as pd

from .rows import by_peer, load, markdown, provenance

#: The peers, in the order of the columns.
PEERS = ["stock", "gradfuse"]


def launches_table() -> str:
    """Short steps: kernels, time and memory."""
    result = load("launches")
    rows = pd.DataFrame(result["rows"])
    rows["step"] = rows.step_ms.map("{:.3f}".format) + " (" + rows.step_kernels_ms.map("{:.3f}".format) + ")"
    rows["graph"] = rows.graph_ms.map("{:.3f}".format, na_action="ignore")
    rows["launched"] = rows.kernels.map("{:.0f}".format, na_action="ignore")
    rows["peak"] = rows.step_peak_mb.map("{:.0f}".format, na_action="ignore")
    wide = by_peer(rows, "case", ["launched", "step", "graph", "peak", "date"])
    columns = [(what, peer) for what in ("launched", "step", "graph", "peak") for peer in PEERS]
    return (
        f"{provenance(result)} A step is forward and backward, in milliseconds. The time in brackets is that for which the "
        'GPU is busy, and the next columns are with CUDA graphs (`mode="reduce-overhead"`). The peak is what a step '
        "allocates.\n\n"
    ) + markdown(
        "case | kernels: stock | gradfuse | step: stock | gradfuse | CUDA graphs: stock | gradfuse | peak, MB: stock | "
        "gradfuse | run",
        wide[[*columns, ("date", "gradfuse")]].reset_index().to_numpy(),
    )


def compile_times() -> pd.DataFrame:
    """Seconds of first steps by model, with the columns (when, peer)."""
    return by_peer(pd.DataFrame(load("compile_time")["rows"]), "model", ["cold_s", "warm_s"])


def compile_time_table() -> str:
    """First steps of unmodified models, cold and warm."""
    result, wide = load("compile_time"), compile_times()
    columns = []
    for when in (wide.cold_s, wide.warm_s):
        columns += [when.stock.map("{:.1f}".format, "ignore"), when.gradfuse.map("{:.1f}".format, "ignore")]
        columns.append((when.gradfuse / when.stock).map("{:.2f}×".format, "ignore"))
    ours = pd.DataFrame(result["rows"]).query("peer == 'gradfuse'").set_index("model")
    columns.append(ours.date + ", " + ours[["at_once", "warm_at_once", "cores"]].astype(str).agg(" / ".join, axis=1))
    lines = pd.concat(columns, axis=1).reset_index().to_numpy()
    return (
        f"{provenance(result)} transformers {result['environment']['transformers']}. Seconds of the first step (forward and "
        "backward): cold with empty caches, warm in a new process with full ones. The last column has the date, the numbers "
        "of cold and of warm starts at a time, and that of cores.\n\n"
    ) + markdown("model | cold: stock | gradfuse | ratio | warm: stock | gradfuse | ratio | run", lines)
