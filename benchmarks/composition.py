"""The tables of ``tests/composition``: gradfuse together with the rest of PyTorch, on one GPU and on several."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pandas as pd

from .rows import load, markdown, measured
from .runner import RESULTS

COMPOSITION = Path(__file__).parent.parent / "tests" / "composition"


def composition() -> pd.DataFrame:
    """The tests of ``tests/composition``: a row for each test and run, and where it ran."""
    return pd.DataFrame(
        {"where": _ran_on(run["environment"]), "processes": run["environment"]["processes"], "name": name, **row}
        for run in json.loads((RESULTS / "composition.json").read_text()).values()
        for name, row in run["rows"].items()
    )


def _ran_on(e: dict[str, Any]) -> str:
    return f"{e['device']}, {e['processes']} process{'es' * (e['processes'] > 1)}, torch {e['torch']}, {e['date']}"


def composition_table() -> str:
    """How many tests of ``tests/composition`` passed, by device and number of processes."""
    rows = composition()
    counts = pd.crosstab(rows["where"], rows.outcome).reindex(index=rows["where"].unique())
    counts = counts.reindex(columns=["passed", "stock fails too", "failed"], fill_value=0)
    counts.insert(0, "scenarios", rows["where"].value_counts())
    return markdown(" | ".join(["where", *counts]), counts.reset_index().to_numpy())


def outcomes(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """One line for each value of the column ``name``: the outcomes of its rows where they ran."""
    joined = rows.groupby([name, "where"]).outcome.agg(lambda found: ", ".join(found.unique())).unstack()
    return joined[rows["where"].unique()].fillna("not run")


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
    rows = composition().query("processes > 1")
    wide = outcomes(rows.assign(scenario=rows.name.str.extract(r"-(\w+)\]$")[0]), "scenario")
    wide = wide.reindex(scenarios(), fill_value="not run")
    lines = ([f"`{name}`", what, *wide.loc[name]] for name, what in scenarios().items())
    return markdown(" | ".join(["scenario", "what it is", *wide]), lines)


def scaling_table() -> str:
    """The layers of ``scaling.py`` on several GPUs. The ideal is the shortest time on one GPU divided by their number."""
    result = load("scaling")
    rows = measured(result)
    layer = rows.case.str.split().str[0]
    alone = rows[rows.gpus == 1].groupby(layer).step_ms.min()
    ideal = layer.map(alone) / rows.gpus
    of_ideal = (ideal / rows.step_ms).map("{:.0%}".format)
    step, peak = rows.step_ms.map("{:.1f}".format), (rows.peak_mb / 1024).map("{:.1f}".format)
    dates = rows.get("date", pd.Series(index=rows.index, dtype=object))
    cases = rows.case + (" (" + dates + ")").fillna("")
    columns = [cases, rows.tokens, rows.gpus, step, of_ideal]
    header = "layer | tokens | GPUs | step, ms | of the ideal"
    if "exchanges_ms" in rows:
        columns += [rows.compute_ms.map("{:.1f}".format, "ignore"), rows.exchanges_ms.map("{:.1f}".format, "ignore")]
        header += " | kernels of a GPU, ms | exchanges, ms"
    e = result["environment"]
    cells = zip(*columns, peak, strict=True)
    return f"Measured {e['date']} on {e['device']}, torch {e['torch']}.\n\n" + markdown(
        f"{header} | peak of a GPU, GB", cells
    )


def one_process_table() -> str:
    """Each test of the composition in one process, and how it went; the tests of our own tools are left out."""
    rows = composition().query("processes == 1 and not name.str.startswith('upstream')")
    wide = outcomes(rows.assign(test=rows.name.str.partition("[")[0]), "test")
    names = (name.partition(": test_") for name in wide.index)
    lines = ([subject, test.replace("_", " "), *row] for (subject, _, test), row in zip(names, wide.to_numpy(), strict=True))
    return markdown(" | ".join(["subject", "scenario", *wide]), lines)
