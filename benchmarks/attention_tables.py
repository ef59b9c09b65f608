"""Tables of attention: kernels by score_mod, biases of real models, dropout, the forward in Gluon, and CPUs."""

from __future__ import annotations

import pandas as pd

from .rows import BUSY, MEDIANS, STEP, by_peer, load, markdown, measured, provenance


def flex_table() -> str:
    result = load("flex")
    rows = measured(result)
    # The first four errors are those of the output and of the gradients of query, key and value.
    rows["table_error"] = rows.error.map(lambda e: f"{e[-1]:.1e}" if len(e) > 4 else None, na_action="ignore")
    wide = by_peer(rows, ["dim", "case"], ["forward", "backward", "backward_ms", "table_error"])
    times = wide.backward_ms
    wide["backward", "ratio"] = (times.stock / times.gradfuse).map("{:.2f}×".format, na_action="ignore")
    columns = [("forward", "stock"), ("forward", "gradfuse")]
    columns += [("backward", peer) for peer in ("stock", "gradfuse", "ratio", "gradfuse-deterministic")]
    columns += [("table_error", "stock"), ("table_error", "gradfuse")]
    first = rows.iloc[0]
    return (
        f"{provenance(result)} The operands are bf16, with a batch of {first.batch}, {first.heads} heads and "
        f"{first.length} tokens. {MEDIANS} The error is that of the learned table's gradient against float64.\n\n"
    ) + markdown(
        "D | score_mod | forward: stock | gradfuse | backward: stock | gradfuse | ratio | deterministic | "
        "error: stock | gradfuse",
        wide.sort_index(level="dim", sort_remaining=False, kind="stable")[columns].reset_index().to_numpy(),
    )


def biases_table() -> str:
    """Biases of real models: times beside the bound, and the error of the learned table's gradient."""
    result = load("biases")
    rows = measured(result)
    rows["size"] = rows[["batch", "heads", "length", "dim"]].astype(str).agg(" × ".join, axis=1)
    rows["table_error"] = rows.error.map(lambda e: f"{max(e[4:]):.1e}", na_action="ignore")
    rows["bound"] = rows.bound_forward_ms.map("{:.2f}".format) + " / " + rows.bound_backward_ms.map("{:.2f}".format)
    rows["times"] = (rows.forward + " / " + rows.backward).where(rows.refused.isna(), "refused")
    # Rows whose peer takes minutes to compile are kept from an earlier run, with their date.
    earlier = rows.get("date", pd.Series(index=rows.index, dtype=object))
    rows.loc[earlier.notna(), "times"] += " \\*"
    wide = by_peer(rows, ["case", "size", "bound"], ["times", "table_error"])
    columns = [("times", peer) for peer in ("no bias", "stock", "sdpa-mask", "gradfuse")]
    columns += [("table_error", "stock"), ("table_error", "gradfuse")]
    note = "".join(f" \\* measured on {date}." for date in earlier.dropna().unique())
    return f"{provenance(result)} The operands are bf16. {BUSY} Each cell is forward / backward.{note}\n\n" + markdown(
        "case | B × H × S × D | bound | without bias | stock | SDPA, bias as mask | gradfuse | error: stock | gradfuse",
        wide.reindex(columns=columns).reset_index().to_numpy(),
    )


def flex_sweep_table() -> str:
    result, compiled = load("flex_sweep"), pd.DataFrame(load("flex_compile")["rows"])
    rows = measured(result)
    rows["head_pair"] = rows.heads.astype(str) + "/" + rows.kv_heads.astype(str)
    wide = by_peer(rows, ["case", "length", "head_pair", "mask", "dtype"], ["forward", "backward"])
    columns = [(direction, peer) for direction in ("forward", "backward") for peer in ("stock", "gradfuse")]
    table = markdown(
        "score_mod | tokens | heads | mask | dtype | forward: stock | gradfuse | backward: stock | gradfuse",
        wide[columns].reset_index().to_numpy(),
    )
    compiled["what"] = compiled.case.where(compiled["mode"] == "default", compiled.case + " with " + compiled["mode"])
    seconds = by_peer(compiled, "what", ["compile_s"]).compile_s
    pairs = ", ".join(f"{s.Index} {s.stock:.1f} / {s.gradfuse:.1f}" for s in seconds.itertuples())
    return (
        f"{provenance(result)} D=64, with a batch of 2. Times are in milliseconds.\n\n{table}\n\n"
        f"Seconds to the first gradient without caches, stock / gradfuse: {pairs}."
    )


def hopper_table() -> str:
    """The forward in Gluon."""
    result = load("hopper")
    rows = pd.DataFrame(result["rows"])
    rows["shape"] = rows[["batch", "heads", "length"]].astype(str).agg(" × ".join, axis=1)
    rows["mask"] = rows["mask"].fillna("")
    rows["forward"] = rows.forward_kernels_ms.map("{:.3f}".format)
    rows = rows[(rows.peer != "gluon") | rows.kernel.str.contains("hopper", na=False)]
    wide = by_peer(rows, ["case", "mask", "shape"], ["forward"]).forward[["triton", "gluon", "cudnn"]]
    note = "D = 128, bf16, forward, milliseconds for which the GPU is busy."
    return f"{provenance(result)} {note}\n\n" + markdown(
        "score_mod | mask | B × H × S | Triton | Gluon | cuDNN", wide.reset_index().to_numpy()
    )


def cudnn_table() -> str:
    """Both kernels beside stock's and cuDNN's, and what a bias adds to ours."""
    result = load("cudnn")
    rows = pd.DataFrame(result["rows"])
    times = ["forward_ms", "backward_ms"]
    plain = rows[(rows.case == "none") & rows["mask"].isna() & (rows.peer == "gradfuse")].set_index("dim")[times]
    ratios = rows[times] / plain.loc[rows.dim].to_numpy()
    rows["mask"] = rows["mask"].fillna("")
    rows["times"] = rows[times].map("{:.3f}".format).agg(" / ".join, axis=1)
    rows["ratio"] = ratios.map("{:.2f}×".format).agg(" / ".join, axis=1).where(rows.case != "none")
    wide = by_peer(rows, ["case", "dim", "mask"], ["times", "ratio"])
    columns = [("times", "stock"), ("times", "gradfuse"), ("times", "cudnn"), ("ratio", "gradfuse")]
    note = "2 × 16 × 4096 in bf16, forward / backward, milliseconds by wall clock; last, over the time without a bias."
    return f"{provenance(result)} {note}\n\n" + markdown(
        "score_mod | D | mask | stock | gradfuse | cuDNN | over no bias",
        wide.reindex(columns=columns).reset_index().to_numpy(),
    )


def counters_table() -> str:
    """What Nsight Compute counted in the long kernels of those cases."""
    result = load("counters")
    rows = pd.DataFrame(result["rows"])
    rows["ms"] = rows["gpu__time_duration.sum"] / 1e6
    rows = rows[rows.ms > 0.1].copy()
    rows["way"] = rows.kernel.str.contains("backward").map({False: "forward", True: "backward"})
    limits = rows[["launch__occupancy_limit_registers", "launch__occupancy_limit_shared_mem"]]
    rows["programs"] = limits.min(axis=1)
    whole = ["launch__registers_per_thread", "programs", *(f"{unit}.pct_of_peak_sustained_{of}" for unit, of in _UNITS)]
    rows[whole] = rows[whole].map("{:.0f}".format)
    columns = ["case", "way", "ms", "sm__inst_executed.avg.per_cycle_active", *whole]
    rows["ms"] = rows.ms.map("{:.3f}".format)
    note = f"{result['shape'][0]} × {result['shape'][1]} × {result['shape'][2]} in bf16; kernels above 0.1 ms."
    return f"{provenance(result)} {note}\n\n" + markdown(
        "case, D | kernel of | ms | instructions a cycle | registers | programs on an SM | tensor cores, % | L1, % | L2, %",
        rows[columns].to_numpy(),
    )


#: Units of the GPU, and the time that their share is of.
_UNITS = (
    ("sm__pipe_tensor_cycles_active.avg", "active"),
    ("l1tex__throughput.avg", "active"),
    ("lts__throughput.avg", "elapsed"),
)


def dropout_table() -> str:
    """Dropout in the kernels."""
    result = load("dropout")
    rows = measured(result)
    rows["how"] = rows.peer + rows.p.map(lambda p: ", dropout" if p else "")
    columns = ["case", "dim", "how", "forward", "backward"]
    return f"{provenance(result)} 2 × 16 × 4096 tokens in bf16, p = 0.1. {MEDIANS}\n\n" + markdown(
        "score_mod | D | | forward | backward", rows[columns].to_numpy()
    )


def flex_cpu_table() -> str:
    result = load("flex_cpu")
    rows = pd.DataFrame(result["rows"])
    for column, text in {"eager_step_ms": "{:.0f}", "gradfuse_step_ms": "{:.0f}", "ratio": "{:.1f}×"}.items():
        rows[column] = rows[column].map(text.format)
    return (f"{provenance(result)} The operands are fp32, with a batch of 1, 8 heads and D=64. {STEP}\n\n") + markdown(
        "score_mod | tokens | eager flex_attention (device check lifted) | gradfuse | eager / gradfuse",
        rows[["case", "length", "eager_step_ms", "gradfuse_step_ms", "ratio"]].to_numpy(),
    )
