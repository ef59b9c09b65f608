"""Tables as wide as the terminal, short paths, bars for what is slow."""

import contextlib
import io
import os

import pytest

from inductor_ext.core.report import collect, compiling, record
from inductor_ext.core.table import progress, short_path


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_table_is_as_wide_as_the_terminal(width, monkeypatch):
    with collect() as report, compiling(0, "somewhere.py:1: x"):
        record(
            "hoisting",
            "flex_attention",
            "table",
            "t[clamp(q - k, 0, 31), h]: a long reason, " * 8,
            "file.py:3: " + "code " * 60,
        )
        record("a_pass", "an_op", "stock", "z" * 300, "")
    assert max(map(len, report.text(width).splitlines())) <= width
    monkeypatch.setenv("COLUMNS", str(width))
    assert str(report) == report.text(width)
    # Words are cut only where they do not fit, and nothing is left out.
    assert "-> table" in str(report) and str(report).count("z") == 300 and str(report).count("reason,") == 8


def test_a_table_without_a_terminal_has_100_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    with collect() as report:
        record("a_pass", "an_op", "a_path", "why " * 100)
    with contextlib.redirect_stdout(io.StringIO()):
        assert max(map(len, str(report).splitlines())) <= 100


def test_paths_are_short():
    here = os.getcwd()
    assert short_path(f"{here}/models/layer.py") == "models/layer.py"
    assert short_path("/usr/lib/python3/site-packages/transformers/models/t5.py") == "transformers/models/t5.py"
    assert short_path(os.path.expanduser("~/elsewhere/a.py")) == "~/elsewhere/a.py"
    assert short_path("/nowhere/else/a.py") == "/nowhere/else/a.py"


# ---------------------------------------------------------------- progress


class Screen(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize(("terminal", "patience", "shown"), [(True, 0.0, True), (False, 0.0, False), (True, 60.0, False)])
def test_a_bar_is_for_terminals_and_for_what_is_slow(monkeypatch, terminal, patience, shown):
    screen = Screen(terminal)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("inductor_ext.core.table.PATIENCE", patience)
    assert list(progress("counting", "number", of=range(3))) == [0, 1, 2]
    assert ("counting" in screen.getvalue()) == shown
