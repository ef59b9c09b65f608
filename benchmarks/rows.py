"""The rows of ``results/*.json``, as the tables and the plots of the documents take them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pandas as pd

from .runner import RESULTS

#: The bandwidth of the bounds, 4.3 TB/s.
BYTES_PER_MS = 4.3e9
#: Sentences that several captions share.
MEDIANS = "Times are medians of `do_bench` in milliseconds."
BUSY = f"{MEDIANS[:-1]}; the time in brackets is that for which the GPU is busy."
ERRORS = "The error is the largest of output and gradients against float64."
STEP = "Times are those of a training step (forward and backward) in milliseconds."


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured(result: dict[str, Any]) -> pd.DataFrame:
    """The rows of a file of results, with what tables show of them as text."""
    rows = pd.DataFrame(result["rows"])
    if "refused" not in rows:
        rows["refused"] = None
    for direction in (d for d in ("forward", "backward") if f"{d}_ms" in rows):
        rows[direction] = rows[f"{direction}_ms"].map("{:.2f}".format).where(rows.refused.isna(), "refused")
        if f"{direction}_kernels_ms" in rows:
            rows[direction] += rows[f"{direction}_kernels_ms"].map(" ({:.2f})".format, na_action="ignore").fillna("")
    if "error" in rows:
        rows["worst"] = rows.error.map(lambda errors: f"{max(errors):.1e}", na_action="ignore")
    return rows


def by_peer(rows: pd.DataFrame, index: str | list[str], values: list[str]) -> pd.DataFrame:
    """One line a case, in the order of the rows, with the columns (value, peer)."""
    wide = rows.pivot_table(values, index, "peer", aggfunc="first", sort=False)
    return wide.reindex(rows.set_index(index).index.unique())


def markdown(header: str, lines: Iterable[Iterable[Any]]) -> str:
    """A table of Markdown, whose header is written as in Markdown."""
    texts = (" | ".join("–" if pd.isna(cell) else str(cell) for cell in line) for line in lines)
    return "\n".join([f"| {header} |", "|---" * (1 + header.count(" |")) + "|", *(f"| {text} |" for text in texts)])


def provenance(result: dict[str, Any]) -> str:
    e = result["environment"]
    when = f" {e['date']}" if "date" in e else ""
    where = f" on {e['device']}, torch" if "device" in e else " with torch"
    return f"Measured{when}{where} {e['torch']}, Triton {e['triton']}."
