"""Write the generated parts of the documents: tables from ``results/*.json`` and from the code, and the plots.

    python -m benchmarks.report            # rewrites the marked sections of README.md and docs/, and the SVG files

The text between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is generated. Do not edit it by hand;
``tests/test_docs.py`` compares it with what this module would write.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from inductor_ext.options import Options
from inductor_ext.registry import NAMES

from .runner import RESULTS

ROOT = Path(__file__).parent.parent
COMPOSITION = ROOT / "tests" / "composition"
#: Sentences that several captions share.
MEDIANS = "Times are medians of `do_bench` in milliseconds."
BUSY = f"{MEDIANS[:-1]}; the time in brackets is that for which the GPU is busy."
ERRORS = "The error is the largest of output and gradients against float64."
STEP = "Times are those of a training step (forward and backward) in milliseconds."
MARK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def provenance(result: dict[str, Any]) -> str:
    e = result["environment"]
    return f"Measured {e['date']} on {e['device']}, torch {e['torch']}, Triton {e['triton']}."


def by_case(result: dict[str, Any], dim: int) -> dict[str, dict[str, dict[str, Any]]]:
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["dim"] == dim:
            cases.setdefault(row["case"], {})[row["peer"]] = row
    return cases


def cell(row: dict[str, Any], key: str) -> str:
    return "refused" if "refused" in row else f"{row[key]:.2f}"


def ratio(ours: dict[str, Any], stocks: dict[str, Any], key: str) -> str:
    return "–" if "refused" in ours or "refused" in stocks else f"{stocks[key] / ours[key]:.2f}×"


def flex_table() -> str:
    result = load("flex")
    first = result["rows"][0]
    lines = [
        f"{provenance(result)} The operands are bf16, with a batch of {first['batch']}, {first['heads']} heads and "
        f"{first['length']} tokens. {MEDIANS} The error is that of the learned table's gradient against float64.",
        "",
        "| D | score_mod | forward: stock | gradfuse | backward: stock | gradfuse | ratio | deterministic | "
        "error: stock | gradfuse |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for dim in (64, 128):
        for case, peers in by_case(result, dim).items():
            ours, stocks = peers["gradfuse"], peers["stock"]
            errors = [f"{r['error'][-1]:.1e}" if len(r.get("error", ())) > 4 else "–" for r in (stocks, ours)]
            numbers = [cell(r, key) for key in ("forward_ms", "backward_ms") for r in (stocks, ours)]
            numbers += [ratio(ours, stocks, "backward_ms"), cell(peers["gradfuse-deterministic"], "backward_ms")]
            lines.append(f"| {dim} | {case} | {' | '.join([*numbers, *errors])} |")
    return "\n".join(lines)


def flex_sweep_table() -> str:
    result, compiled = load("flex_sweep"), load("flex_compile")
    lines = [
        f"{provenance(result)} D=64, with a batch of 2. Times are in milliseconds.",
        "",
        "| score_mod | tokens | heads | mask | dtype | forward: stock | gradfuse | backward: stock | gradfuse |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for r in result["rows"]:
        heads = f"{r['heads']}/{r['kv_heads']}"
        rows.setdefault((r["case"], r["length"], heads, r["mask"], r["dtype"]), {})[r["peer"]] = r
    for setting, peers in rows.items():
        times = [
            cell(peers[p], key) if p in peers else "–"
            for key in ("forward_ms", "backward_ms")
            for p in ("stock", "gradfuse")
        ]
        lines.append(f"| {' | '.join(map(str, setting))} | {' | '.join(times)} |")
    seconds: dict[str, dict[str, float]] = {}
    for r in compiled["rows"]:
        seconds.setdefault(r["case"], {})[r["peer"]] = r["compile_s"]
    pairs = (f"{case} {s['stock']:.1f} / {s['gradfuse']:.1f}" for case, s in seconds.items())
    return "\n".join([*lines, "", f"Seconds to the first gradient without caches, stock / gradfuse: {', '.join(pairs)}."])


def moe_table() -> str:
    result = load("moe")
    lines = [
        f"{provenance(result)} The operands are bf16 unless the name says otherwise. {BUSY} Short kernels wait for "
        f"this host. The bound is the time to move the bytes of the backward at 4.3 TB/s. {ERRORS} "
        "A forward includes its sort.",
        "",
        "| case | bound | forward: eager | stock | gradfuse | backward: eager | stock | gradfuse | deterministic | "
        "error: eager | stock | gradfuse |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        cases.setdefault(row["case"], {})[row["peer"]] = row
    for case, peers in cases.items():
        moved = peers["gradfuse"]["backward_bytes"]
        cells = [f"{moved / 4.3e9:.2f}" if moved else "–"]
        compared = ("eager", "stock", "gradfuse")
        cells += [both_times(peers[p], "forward") for p in compared]
        cells += [both_times(peers[p], "backward") for p in (*compared, "gradfuse-deterministic")]
        cells += [f"{max(peers[p]['error']):.1e}" for p in compared]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def both_times(row: dict[str, Any], direction: str) -> str:
    return f"{row[f'{direction}_ms']:.2f} ({row[f'{direction}_kernels_ms']:.2f})"


def casts_table() -> str:
    result = load("casts")
    lines = [
        f"{provenance(result)} There are 8192 tokens of width 4096. {MEDIANS} Errors are against float64, in the order "
        "of the parameters. Kernels that only cast, and their bytes, are counted in the code that Inductor wrote.",
        "",
        "| case | | forward | backward | kernels | of them only cast | bytes of these | errors of the gradients |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in result["rows"]:
        errors = ", ".join(f"{e:.1e}" for e in r["error"][1:])
        counts = f"{r['kernels']} | {r['cast_kernels']} | {r['cast_bytes'] / 1e9:.2f} GB"
        lines.append(f"| {r['case']} | {r['peer']} | {r['forward_ms']:.2f} | {r['backward_ms']:.2f} | {counts} | {errors} |")
    return "\n".join(lines)


def mlstm_table() -> str:
    result = load("mlstm")
    lines = [
        f"{provenance(result)} The operands are bf16 with 8 heads, in batches of 4096 tokens or of one sequence, and the "
        f"norm is included. {BUSY} {ERRORS} The peak is that of a step. `triton_limit_chunk` is from mlstm-kernels 2.0.6; "
        "its other kernels make Triton's compiler abort on this machine.",
        "",
        "| tokens, head width | | forward | backward | largest error | peak, MB |",
        "|---|---|---|---|---|---|",
    ]
    for r in result["rows"]:
        if "refused" in r or r["peer"] == "gradfuse, plain form":
            continue
        times = f"{both_times(r, 'forward')} | {both_times(r, 'backward')}"
        case = f"{r['case']} ({r['date']})" if "date" in r else r["case"]
        lines.append(f"| {case} | {r['peer']} | {times} | {max(r['error']):.1e} | {r['step_peak_mb']:.0f} |")
    return "\n".join(lines)


def scan_table() -> str:
    result = load("scan")
    lines = [
        f"{provenance(result)} The cases are the gated recurrence `(a1 a2, x1 a2 + x2)`, the same in log space, and "
        "products of 2 x 2 matrices, real (4 leaves) and complex (8), of which the last leaf is returned. "
        f"{BUSY} {ERRORS} An error of 1 is a gradient of zeros.",
        "",
        "| case | shape, dim | | forward | backward | largest error | peak, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in result["rows"]:
        if "refused" in r:
            continue
        times = f"{both_times(r, 'forward')} | {both_times(r, 'backward')}"
        where = f"{r['shape']}, {r['dim']}, {r['dtype']}"
        lines.append(f"| {r['case']} | {where} | {r['peer']} | {times} | {max(r['error']):.1e} | {r['step_peak_mb']:.0f} |")
    return "\n".join(lines)


def mlstm_plot(path: Path) -> None:
    """Kernel time of a step by length."""
    rows = [r for r in load("mlstm")["rows"] if "refused" not in r and r["width"] == 128]
    figure, axes = new_figure()
    peers = {"stock, plain form": "#b0b0b0", "triton_limit_chunk 64": "#e0a030", "gradfuse": "#2a6fdb"}
    for peer, colour in peers.items():
        own = [r for r in rows if r["peer"] == peer]
        step = [r["forward_kernels_ms"] + r["backward_kernels_ms"] for r in own]
        axes.plot([r["length"] for r in own], step, marker="o", label=peer, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("forward + backward, ms")
    save(figure, axes, path)


def scan_plot(path: Path) -> None:
    """Kernel time of the gated recurrence's backward by length, along dim 1 of [8, length, 512] fp32."""
    rows = [r for r in load("scan")["rows"] if r["case"].startswith("gated") and r["dim"] == 1 and r["dtype"] == "float32"]
    figure, axes = new_figure()
    for peer, colour in {"stock": "#b0b0b0", "stock, generic": "#e0a030", "gradfuse": "#2a6fdb"}.items():
        own = sorted((r["shape"][1], r["backward_kernels_ms"]) for r in rows if r["peer"] == peer)
        axes.plot(*zip(*own, strict=True), marker="o", label=peer, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("length")
    axes.set_ylabel("backward, ms")
    save(figure, axes, path)


def moe_plot(path: Path) -> None:
    """Backward kernel time over the bound, by case."""
    rows = [r for r in load("moe")["rows"] if r["backward_bytes"]]
    cases = list(dict.fromkeys(r["case"] for r in rows))
    figure, axes = new_figure()
    for shift, (peer, colour) in enumerate((("eager", "#dddddd"), ("stock", "#b0b0b0"), ("gradfuse", "#2a6fdb"))):
        own = {r["case"]: r["backward_kernels_ms"] / (r["backward_bytes"] / 4.3e9) for r in rows if r["peer"] == peer}
        bars = axes.bar(
            [i + (shift - 1) * 0.27 for i in range(len(cases))], [own[c] for c in cases], 0.25, label=peer, color=colour
        )
        axes.bar_label(bars, fmt="%.2g", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), [c.replace("-", "\n", 1) for c in cases], fontsize=7)
    axes.set_ylabel("backward / bandwidth bound")
    save(figure, axes, path)


def flex_cpu_table() -> str:
    result = load("flex_cpu")
    lines = [
        f"{provenance(result)} The operands are fp32, with a batch of 1, 8 heads and D=64. {STEP}",
        "",
        "| score_mod | tokens | eager flex_attention (device check lifted) | gradfuse | eager / gradfuse |",
        "|---|---|---|---|---|",
    ]
    for r in result["rows"]:
        lines.append(
            f"| {r['case']} | {r['length']} | {r['eager_step_ms']:.0f} | {r['gradfuse_step_ms']:.0f} | {r['ratio']:.1f}× |"
        )
    return "\n".join(lines)


def mlstm_cpu_table() -> str:
    result = load("mlstm_cpu")
    names = ("gradfuse", "eager op", "stock, plain form")
    lines = [
        f"{provenance(result)} mLSTM with its norm in fp32, with a batch of 1, 4 heads and D=64. {STEP} The number in "
        "brackets is the largest error of output and gradients.",
        "",
        "| tokens | " + " | ".join(names) + " |",
        "|---" * (1 + len(names)) + "|",
    ]
    for r in result["rows"]:
        cells = (f"{r[n]['step_ms']:.0f} ({r[n]['error']:.0e})" if n in r else "" for n in names)
        lines.append(f"| {r['length']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fuzz_table() -> str:
    """Random programs by commit, device and family; ``fuzz.json`` is a list of what the fuzzer wrote with ``--json``."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    for run in json.loads((RESULTS / "fuzz.json").read_text()):
        versions, settings = run["versions"], run["settings"]
        twice = ", each twice and compared bitwise" if settings["deterministic"] else ""
        ways = "op by op" if settings["mode"] == "graphs" else f"compiled{twice}"
        device = "CPU" if settings["device"] == "cpu" else versions["device"]
        where = f"commit {run['commit']}, {device}, torch {versions['torch']}, {run['date'][:10]}, {ways}"
        for family, counts in run["counts"].items():
            totals.setdefault((where, family), Counter()).update(counts)
    lines = ["| where | family | programs | right | wrong | fail here alone | stock fails or is wrong too | not judged |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for (where, family), counts in totals.items():
        numbers = [counts[key] for key in ("ok", "wrong", "crash")]
        also = counts["stock_crashes_too"] + counts["stock_too"]
        cells = [where, family, sum(counts.values()), *numbers, also, counts["discarded"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def sanitizer_table() -> str:
    """What compute-sanitizer said of the kernels of each feature."""
    result = load("sanitizer")
    lines = [provenance(result), "", "| tool | kernels of | errors |", "|---|---|---|"]
    for row in result["rows"]:
        errors = row["summary"] if row["errors"] is None else row["errors"]
        lines.append(f"| {row['tool']} | {row['part']} | {errors} |")
    return "\n".join(lines)


def composition_table() -> str:
    """How many tests of ``tests/composition`` passed, by device and number of processes."""
    lines = ["| where | scenarios | passed | stock fails too | failed |", "|---|---|---|---|---|"]
    for run in composition().values():
        outcomes = [row["outcome"] for row in run["rows"].values()]
        counts = [outcomes.count(o) for o in ("passed", "stock fails too", "failed")]
        lines.append("| " + " | ".join(map(str, [_ran_on(run), len(outcomes), *counts])) + " |")
    return "\n".join(lines)


def composition() -> dict[str, Any]:
    return json.loads((RESULTS / "composition.json").read_text())


def _ran_on(run: dict[str, Any]) -> str:
    e = run["environment"]
    return f"{e['device']}, {e['processes']} process{'es' * (e['processes'] > 1)}, torch {e['torch']}, {e['date']}"


def _outcome(run: dict[str, Any], found: Callable[[str], bool]) -> str:
    """What the rows of a run whose name is ``found`` have in common; "not run" where there is none."""
    outcomes = list(dict.fromkeys(row["outcome"] for name, row in run["rows"].items() if found(name)))
    return ", ".join(outcomes) or "not run"


def scenarios() -> dict[str, str]:
    """The distributed scenarios with the first line of what each says of itself, in the order of the code."""
    found = {}
    for file in ("scenarios.py", "parallel.py"):
        for node in ast.parse((COMPOSITION / file).read_text()).body:
            marks = [d.id for d in getattr(node, "decorator_list", ()) if isinstance(d, ast.Name)]
            if isinstance(node, ast.FunctionDef) and "scenario" in marks:
                found[node.name] = (ast.get_docstring(node) or "").splitlines()[0]
    return found


def several_gpus_table() -> str:
    """Each distributed scenario, and how it went."""
    runs = [run for run in composition().values() if run["environment"]["processes"] > 1]
    lines = ["| scenario | what it is | " + " | ".join(map(_ran_on, runs)) + " |", "|---" * (2 + len(runs)) + "|"]
    for name, what in scenarios().items():
        outcomes = [_outcome(run, lambda row, n=name: row.endswith(f"-{n}]")) for run in runs]
        lines.append(f"| `{name}` | {what} | " + " | ".join(outcomes) + " |")
    return "\n".join(lines)


def one_process_table() -> str:
    """Each test of the composition in one process, and how it went; the tests of our own tools are left out."""
    runs = [run for run in composition().values() if run["environment"]["processes"] == 1]
    names = sorted({name.partition("[")[0] for run in runs for name in run["rows"]})
    lines = ["| subject | scenario | " + " | ".join(map(_ran_on, runs)) + " |", "|---" * (2 + len(runs)) + "|"]
    for name in names:
        subject, _, test = name.partition(": test_")
        if subject == "upstream":
            continue
        outcomes = [_outcome(run, lambda row, n=name: row.partition("[")[0] == n) for run in runs]
        lines.append(f"| {subject} | {test.replace('_', ' ')} | " + " | ".join(outcomes) + " |")
    return "\n".join(lines)


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
)


def wins_table() -> str:
    """Five rows of the tables of ``docs/benchmarks.md``."""
    first = load("flex")["environment"]
    lines = [
        f"Milliseconds on one {first['device']}; the error is the largest of any output or gradient against float64, "
        "where 1 means that a gradient came back as zeros.",
        "",
        "| what is measured | stock Inductor | gradfuse | ratio | error: stock | gradfuse |",
        "|---|---|---|---|---|---|",
    ]
    for win in WINS:
        rows = [r for r in load(win.file)["rows"] if all(r.get(k) == v for k, v in win.where.items())]
        stocks, ours = (next(r for r in rows if r["peer"] == peer) for peer in (win.stock, "gradfuse"))
        times = f"{stocks[win.key]:.2f} | {ours[win.key]:.2f} | {stocks[win.key] / ours[win.key]:.0f}×"
        lines.append(f"| {win.what} | {times} | {max(stocks['error']):.1e} | {max(ours['error']):.1e} |")
    return "\n".join(lines)


def options_table() -> str:
    """gradfuse's own options, as the docstring of ``Options`` describes them."""
    lines = ["| option | type | default | meaning |", "|---|---|---|---|"]
    texts = _described(inspect.getdoc(Options) or "")
    for field in dataclasses.fields(Options):
        default = "none" if field.default in (None, frozenset()) else field.default
        kind = {"frozenset[str]": "list of names", "str | None": "path"}.get(str(field.type), field.type)
        lines.append(f"| `{field.name}` | {kind} | {default} | {texts[field.name]} |")
    return "\n".join(lines)


def _described(docstring: str) -> dict[str, str]:
    """The entries ``name: text`` of a docstring, whose further lines are indented; a sentence each begins in upper case."""
    entries = re.findall(r"^(\w+): (.*(?:\n[ ]+.*)*)", docstring, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("``", "`").strip() for name, text in entries}


def passes_table() -> str:
    """What ``disable`` may name."""
    lines = ["| name | what it does |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {what.replace('|', chr(92) + '|')} |" for name, what in NAMES.items())])


def new_figure() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gradfuse"
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(9, 3.6))


def save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def flex_plot(path: Path) -> None:
    cases = by_case(load("flex"), 64)
    figure, axes = new_figure()
    for shift, (peer, colour) in enumerate((("stock", "#b0b0b0"), ("gradfuse", "#2a6fdb"))):
        offsets = [i + (shift - 0.5) * 0.38 for i, c in enumerate(cases) if "backward_ms" in cases[c][peer]]
        heights = [cases[c][peer]["backward_ms"] for c in cases if "backward_ms" in cases[c][peer]]
        bars = axes.bar(offsets, heights, 0.36, label=peer, color=colour)
        axes.bar_label(bars, fmt=lambda v: f"{v:.3g}", fontsize=7)
    for i, case in enumerate(cases):
        if "refused" in cases[case]["stock"]:
            axes.text(i - 0.19, 0.6, "refused", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.set_yscale("log")
    axes.set_ylim(0.5, 3000)
    axes.set_xticks(range(len(cases)), list(cases))
    axes.set_ylabel("backward, ms (log)")
    save(figure, axes, path)


TABLES: dict[str, Callable[[], str]] = {
    "wins": wins_table,
    "options": options_table,
    "passes": passes_table,
    "flex": flex_table,
    "flex_sweep": flex_sweep_table,
    "flex_cpu": flex_cpu_table,
    "mlstm_cpu": mlstm_cpu_table,
    "moe": moe_table,
    "casts": casts_table,
    "mlstm": mlstm_table,
    "scan": scan_table,
    "fuzz": fuzz_table,
    "sanitizer": sanitizer_table,
    "composition": composition_table,
    "several_gpus": several_gpus_table,
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
    flex_plot(RESULTS / "flex.svg")
    moe_plot(RESULTS / "moe.svg")
    mlstm_plot(RESULTS / "mlstm.svg")
    scan_plot(RESULTS / "scan.svg")


if __name__ == "__main__":
    main()
