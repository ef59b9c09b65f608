"""Write the generated parts of the documents: tables from ``results/*.json`` and from the code, and the plots.

    python -m benchmarks.report            # rewrites the marked sections of README.md and docs/, and the SVG files

The text between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is generated. Do not edit it by hand;
``tests/test_docs.py`` compares it with what this module would write.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from inductor_ext.options import Options
from inductor_ext.registry import NAMES

from . import plots
from .attention_tables import (
    biases_table,
    counters_table,
    cudnn_table,
    dropout_table,
    flex_cpu_table,
    flex_sweep_table,
    flex_table,
    hopper_table,
)
from .composition import composition_table, one_process_table, scaling_table, several_gpus_table
from .costs import compile_time_table, launches_table
from .rows import BUSY, BYTES_PER_MS, ERRORS, MEDIANS, STEP, by_peer, load, markdown, measured, provenance
from .runner import RESULTS

ROOT = Path(__file__).parent.parent
MARK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def moe_table() -> str:
    result = load("moe")
    rows = measured(result)
    rows["bound"] = (rows.backward_bytes / BYTES_PER_MS).where(rows.backward_bytes > 0).map("{:.2f}".format, "ignore")
    peers = ["eager", "stock", "gradfuse"]
    wide = by_peer(rows, "case", ["forward", "backward", "worst", "bound"])
    columns = [("bound", "gradfuse"), *(("forward", p) for p in peers)]
    columns += [*(("backward", p) for p in (*peers, "gradfuse-deterministic")), *(("worst", p) for p in peers)]
    return (
        f"{provenance(result)} The operands are bf16 unless the name says otherwise. {BUSY} Short kernels wait for "
        f"this host. The bound is the time to move the bytes of the backward at 4.3 TB/s. {ERRORS} "
        "A forward includes its sort.\n\n"
    ) + markdown(
        "case | bound | forward: eager | stock | gradfuse | backward: eager | stock | gradfuse | deterministic | "
        "error: eager | stock | gradfuse",
        wide[columns].reset_index().to_numpy(),
    )


def moe_parts_table() -> str:
    """The parts of a layer of experts, with bytes and FLOPs."""
    result = load("moe_parts")
    rows = measured(result)
    wide = by_peer(rows, "case", ["forward", "backward"])
    ours = rows[rows.peer == "gradfuse"].set_index("case").loc[wide.index]
    moved = [" / ".join(f"{n / 1e6:.0f}" for n in row) for row in ours.bytes]
    flops = [" / ".join(f"{n / 1e12:.2f}" for n in row) for row in ours.flops]
    cells = [(n, *row) for n, *row in zip(wide.index, moved, flops, *(wide[c] for c in _PART_COLUMNS), strict=True)]
    return f"{provenance(result)} {BUSY} MB and TFLOP are forward / backward.\n\n" + markdown(
        "part | MB | TFLOP | forward: stock | gradfuse | backward: stock | gradfuse", cells
    )


_PART_COLUMNS = [(step, peer) for step in ("forward", "backward") for peer in ("stock", "gradfuse")]


def _ratio(times: pd.DataFrame) -> pd.Series:
    """How much faster than stock gradfuse is, as text."""
    return (times.stock / times.gradfuse).map("{:.2f}×".format, na_action="ignore")


def models_table() -> str:
    """A training step of unmodified models."""
    result = load("models")
    rows = pd.DataFrame(result["rows"])
    rows["model"] = rows.model + ", batch " + rows.batch.astype(str)
    rows["step"] = rows.step_ms.map("{:.1f}".format)
    if "step_kernels_ms" in rows:
        rows["step"] += rows.step_kernels_ms.map(" ({:.1f})".format, na_action="ignore").fillna("")
    wide = by_peer(rows, "model", ["step_ms", "step_kernels_ms", "step_peak_mb", "step"])
    ratio = _ratio(wide.step_ms)
    if "step_kernels_ms" in rows:
        ratio += _ratio(wide.step_kernels_ms).map(" ({})".format, na_action="ignore").fillna("")
    step = wide.step
    peak = (wide.step_peak_mb / 1024).map("{:.1f}".format, na_action="ignore")
    ours = rows[rows.peer == "gradfuse"].set_index("model")
    rows["first"] = rows.first_step_s.map("{:.0f}".format, na_action="ignore")
    first = by_peer(rows, "model", ["first"])["first"]
    on = ours.date + ", " + ours.device.str.removeprefix("NVIDIA ").str.split().str[0]
    columns = [step.eager, step.stock, step.gradfuse, ratio, peak.stock, peak.gradfuse, first.stock, first.gradfuse]
    lines = pd.concat([*columns, ours.fired.map(_fired), on], axis=1).reset_index()
    head = "model | eager | stock | gradfuse | ratio | peak, GB: stock | gradfuse | first step, s: stock | gradfuse"
    head += " | what fires | run"
    return (
        f"{provenance(result)} transformers {result['environment']['transformers']}, bf16 autocast (ESMFold fp16). {STEP} "
        "The time in brackets is that for which the GPU is busy. "
        "The peak is what a step allocates beyond the parameters. The first step is with empty caches.\n\n"
    ) + markdown(head, lines.to_numpy())


def _fired(counts: dict[str, int]) -> str:
    shown = (
        "attention_pattern",
        "attention_dropout",
        "hoisting",
        "mlstm_pattern",
        "time_loops",
        "scans",
        "scatters",
        "gathers",
        "casts",
        "casts_together",
        "linears_together",
        "cpu_indices",
    )
    return ", ".join(f"{counts[name]} × {name}" for name in shown if name in counts)


def casts_table() -> str:
    result = load("casts")
    rows = measured(result)
    # The first error is that of the output.
    rows["errors"] = rows.error.map(lambda errors: ", ".join(f"{e:.1e}" for e in errors[1:]))
    rows["gigabytes"] = (rows.cast_bytes / 1e9).map("{:.2f} GB".format)
    for direction in ("forward", "backward"):
        rows[direction] = rows[f"{direction}_ms"].map("{:.2f}".format)
    columns = ["case", "peer", "forward", "backward", "kernels", "cast_kernels", "gigabytes", "errors"]
    return (
        f"{provenance(result)} There are 8192 tokens of width 4096. {MEDIANS} Errors are against float64, in the order "
        "of the parameters. Kernels that only cast, and their bytes, are counted in the code that Inductor wrote.\n\n"
    ) + markdown(
        "case | | forward | backward | kernels | of them only cast | bytes of these | errors of the gradients",
        rows[columns].to_numpy(),
    )


def mlstm_table() -> str:
    result = load("mlstm")
    rows = measured(result)
    rows = rows[rows.refused.isna() & (rows.peer != "gradfuse, plain form")]
    cases = rows.case + (" (" + rows.date + ")").fillna("")
    columns = ["peer", "forward", "backward", "worst", "step_peak_mb"]
    return (
        f"{provenance(result)} The operands are bf16 with 8 heads, in batches of 4096 tokens or of one sequence, and the "
        f"norm is included. {BUSY} {ERRORS} The peak is that of a step. `triton_limit_chunk` is from mlstm-kernels 2.0.6; "
        "its other kernels make Triton's compiler abort on this machine.\n\n"
    ) + markdown(
        "tokens, head width | | forward | backward | largest error | peak, MB",
        rows.assign(case=cases, step_peak_mb=rows.step_peak_mb.map("{:.0f}".format))[["case", *columns]].to_numpy(),
    )


def scan_table() -> str:
    result = load("scan")
    rows = measured(result)
    rows["where"] = [f"{shape}, {dim}, {dtype}" for shape, dim, dtype in rows[["shape", "dim", "dtype"]].to_numpy()]
    rows["peak"] = rows.step_peak_mb.map("{:.0f}".format)
    columns = ["case", "where", "peer", "forward", "backward", "worst", "peak"]
    return (
        f"{provenance(result)} The cases are the gated recurrence `(a1 a2, x1 a2 + x2)`, the same in log space, and "
        "products of 2 x 2 matrices, real (4 leaves) and complex (8), of which the last leaf is returned. "
        f"{BUSY} {ERRORS} An error of 1 is a gradient of zeros.\n\n"
    ) + markdown(
        "case | shape, dim | | forward | backward | largest error | peak, MB",
        rows.loc[rows.refused.isna(), columns].to_numpy(),
    )


def mlstm_cpu_table() -> str:
    result = load("mlstm_cpu")
    rows = pd.DataFrame(result["rows"]).set_index("length")[["gradfuse", "eager op", "stock, plain form"]]
    cells = rows.map(lambda cell: f"{cell['step_ms']:.0f} ({cell['error']:.0e})", na_action="ignore")
    return (
        f"{provenance(result)} mLSTM with its norm in fp32, with a batch of 1, 4 heads and D=64. {STEP} The number in "
        "brackets is the largest error of output and gradients.\n\n"
    ) + markdown(" | ".join(["tokens", *cells]), cells.reset_index().to_numpy())


def fuzz_table() -> str:
    """Random programs by commit, device and family; ``fuzz.json`` is a list of what the fuzzer wrote with ``--json``."""
    rows = []
    for run in json.loads((RESULTS / "fuzz.json").read_text()):
        versions, settings = run["versions"], run["settings"]
        twice = ", each twice and compared bitwise" if settings["deterministic"] else ""
        ways = {"graphs": "op by op", "interpreted": "Triton's interpreter"}.get(settings["mode"], f"compiled{twice}")
        device = "CPU" if settings["device"] == "cpu" else versions["device"]
        where = f"commit {run['commit']}, {device}, torch {versions['torch']}, {run['date'][:10]}, {ways}"
        rows += [{"where": where, "family": family, **counts} for family, counts in run["counts"].items()]
    counts = pd.DataFrame(rows).groupby(["where", "family"], sort=False).sum().astype(int)
    counts["programs"] = counts.sum(axis=1)
    counts["also"] = counts.stock_crashes_too + counts.stock_too
    columns = ["programs", "ok", "wrong", "crash", "also", "discarded"]
    return markdown(
        "where | family | programs | right | wrong | fail here alone | stock fails or is wrong too | not judged",
        counts.reindex(columns=columns, fill_value=0).reset_index().to_numpy(),
    )


def sanitizer_table() -> str:
    """What compute-sanitizer said of the kernels of each feature."""
    result = load("sanitizer")
    lines = [
        (row["tool"], row["part"], row["summary"] if row["errors"] is None else row["errors"]) for row in result["rows"]
    ]
    return f"{provenance(result)}\n\n" + markdown("tool | kernels of | errors", lines)


@dataclasses.dataclass(frozen=True)
class Win:
    """A row of the README's table: what is measured, where it stands in a file of results, and stock's name there."""

    what: str
    file: str
    where: dict[str, Any]
    key: str
    stock: str = "stock"


WINS = (
    Win("attention with `score * scale[h]`, backward", "flex", {"case": "head_scale", "dim": 64}, "backward_ms"),
    Win("attention with T5's bucketed bias, backward", "flex", {"case": "t5", "dim": 64}, "backward_ms"),
    Win("the combine step of a mixture of experts, forward", "moe", {"case": "combine-16384x8x2048"}, "forward_ms"),
    Win("`associative_scan` of a gated recurrence, backward", "scan", {"case": "gated-dim1"}, "backward_ms"),
    Win("mLSTM over 8192 tokens, backward", "mlstm", {"case": "S=8192 D=128"}, "backward_ms", "stock, plain form"),
    Win("a step of transformers' T5-base, 2048 tokens", "models", {"model": "t5_base_2048"}, "step_ms"),
)


def wins_table() -> str:
    """Six rows of the tables of ``docs/benchmarks.md``."""
    lines = []
    for win in WINS:
        rows = measured(load(win.file))
        here = rows[rows[list(win.where)].eq(pd.Series(win.where)).all(axis=1)].set_index("peer")
        stocks, ours = here.loc[win.stock], here.loc["gradfuse"]
        ratio = stocks[win.key] / ours[win.key]
        times = [f"{stocks[win.key]:.2f}", f"{ours[win.key]:.2f}", f"{ratio:.{0 if ratio > 10 else 1}f}×"]
        lines.append([win.what, *times, stocks.get("worst"), ours.get("worst")])
    return (
        f"Milliseconds on one {load('flex')['environment']['device']}; the error is the largest of any output or gradient "
        "against float64, where 1 means that a gradient came back as zeros.\n\n"
    ) + markdown("what is measured | stock Inductor | gradfuse | ratio | error: stock | gradfuse", lines)


def options_table() -> str:
    """gradfuse's own options, as the docstring of ``Options`` describes them."""
    lines = []
    texts = _described(inspect.getdoc(Options) or "")
    for field in dataclasses.fields(Options):
        default = "none" if field.default in (None, frozenset()) else field.default
        kind = {"frozenset[str]": "list of names", "str | None": "path"}.get(str(field.type), field.type)
        lines.append([f"`{field.name}`", kind, default, texts[field.name]])
    return markdown("option | type | default | meaning", lines)


def _described(docstring: str) -> dict[str, str]:
    """The entries ``name: text`` of a docstring, whose further lines are indented; a sentence each begins in upper case."""
    entries = re.findall(r"^(\w+): (.*(?:\n[ ]+.*)*)", docstring, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("``", "`").strip() for name, text in entries}


def passes_table() -> str:
    """What ``disable`` may name."""
    return markdown("name | what it does", ([f"`{name}`", what.replace("|", r"\|")] for name, what in NAMES.items()))


TABLES: dict[str, Callable[[], str]] = {
    "wins": wins_table,
    "options": options_table,
    "passes": passes_table,
    "flex": flex_table,
    "flex_sweep": flex_sweep_table,
    "biases": biases_table,
    "models": models_table,
    "compile_time": compile_time_table,
    "launches": launches_table,
    "hopper": hopper_table,
    "cudnn": cudnn_table,
    "counters": counters_table,
    "dropout": dropout_table,
    "flex_cpu": flex_cpu_table,
    "mlstm_cpu": mlstm_cpu_table,
    "moe": moe_table,
    "moe_parts": moe_parts_table,
    "casts": casts_table,
    "mlstm": mlstm_table,
    "scan": scan_table,
    "fuzz": fuzz_table,
    "sanitizer": sanitizer_table,
    "composition": composition_table,
    "several_gpus": several_gpus_table,
    "scaling": scaling_table,
    "one_process": one_process_table,
}


def documents() -> Iterator[Path]:
    """The files that may hold generated sections."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def rendered(text: str) -> str:
    """A document with every generated section as it should be now. Raises KeyError for a section of an unknown name."""
    return MARK.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[3]}", text)


def main() -> None:
    for path in documents():
        path.write_text(rendered(path.read_text()))
    plots.write(RESULTS)


if __name__ == "__main__":
    main()
