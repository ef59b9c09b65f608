"""How results of benchmarks are kept: a row replaces that of the same case and peer, and rows of other versions go."""

import json

from benchmarks import counters, runner


def rows_after(path, *rows, versions=()):
    """What the file holds after these rows (case, peer, milliseconds) were written."""
    fields = ("case", "peer", "ms")
    runner.write_rows(path, "suite", "case", [dict(zip(fields, row, strict=True)) for row in rows], dict(versions))
    return [tuple(row[field] for field in fields) for row in json.loads(path.read_text())["rows"]]


def test_rows_replace_those_of_the_same_case_and_peer_where_they_stand(tmp_path):
    path = tmp_path / "results.json"
    rows_after(path, ("a", "stock", 1), ("a", "gradfuse", 2), ("b", "stock", 3))
    assert rows_after(path, ("a", "gradfuse", 4), ("c", "stock", 5)) == [
        ("a", "stock", 1),
        ("a", "gradfuse", 4),
        ("b", "stock", 3),
        ("c", "stock", 5),
    ]


def test_rows_of_other_versions_go(tmp_path):
    path = tmp_path / "results.json"
    rows_after(path, ("a", "stock", 1), versions={"torch": "1"})
    assert rows_after(path, ("b", "stock", 2), versions={"torch": "2"}) == [("b", "stock", 2)]


def test_each_row_has_its_day_and_device(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    for day in ("2026-01-01", "2026-01-02"):
        monkeypatch.setattr(runner, "environment", lambda day=day: {"date": day, "device": "H200", "torch": "2"})
        rows_after(path, (day, "stock", 1))
    written = json.loads(path.read_text())
    assert [row["date"] for row in written["rows"]] == ["2026-01-01", "2026-01-02"]
    assert written["environment"] == {"torch": "2"}


def test_counters_of_ncu():
    """ncu prints other lines before the table, numbers with commas, and columns that are not kept."""
    name = "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
    page = f"""==PROF== Connected to process 7
"ID","Kernel Name","gpu__time_duration.sum","{name}","smsp__cycles_active.sum"
"","","us","inst","cycle"
"0","triton_tem_fused_flex_attention_0","1,234.5","1.25","99"
"1","triton_per_fused_zeros_1","3.5","n/a","1"
"""
    first, second = counters.kernels_of(page)
    assert first == {
        "kernel": "triton_tem_fused_flex_attention_0",
        "units": {"gpu__time_duration.sum": "us", name: "inst"},
        "gpu__time_duration.sum": 1234.5,
        name: 1.25,
    }
    assert second[name] == "n/a"
