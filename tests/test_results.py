"""How results of benchmarks are kept: a row replaces that of the same case and peer, and rows of other versions go."""

import json

from benchmarks import runner


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
