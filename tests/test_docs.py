"""The documents: links lead somewhere, generated sections are up to date, and what they name exists."""

import ast
import importlib.util
import re
import runpy
from pathlib import Path

import pytest

from benchmarks import report
from inductor_ext.options import OPTIONS
from inductor_ext.registry import NAMES

ROOT = report.ROOT
README = ROOT / "README.md"
PAGES = sorted(
    [
        README,
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "benchmarks" / "NOTES.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
)
STAGES = ROOT / "docs" / "figures" / "stages.py"
_FENCED = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)


def name(page):
    return str(page.relative_to(ROOT))


def prose(page):
    """A page without its code."""
    text = re.sub(_FENCED, "", page.read_text())
    return re.sub(r"`[^`\n]*`", "", text)


def links(page):
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not re.match(r"https?:|mailto:", target)]


def anchors(page):
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(_FENCED, "", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    missing = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            missing.append(target)
    assert not missing


def test_every_page_is_linked():
    linked = {(page.parent / target.partition("#")[0]).resolve() for page in PAGES for target in links(page)}
    alone = [name(page) for page in (ROOT / "docs").rglob("*.md") if page.resolve() not in linked]
    assert not alone


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 180


@pytest.mark.parametrize("page", list(report.documents()), ids=name)
def test_generated_sections_are_up_to_date(page):
    text = page.read_text()
    assert text == report.rendered(text), "python -m benchmarks.report writes what this page should hold"


def test_every_section_stands_on_one_page():
    begun = [section for page in report.documents() for section in re.findall(r"<!-- begin (\w+) -->", page.read_text())]
    assert sorted(begun) == sorted(report.TABLES)


def test_a_stale_section_is_seen():
    page = ROOT / "docs" / "options.md"
    changed = page.read_text().replace("| `strict` |", "| `strickt` |")
    assert changed != report.rendered(changed) == page.read_text()


def test_a_section_of_an_unknown_name_is_an_error():
    with pytest.raises(KeyError):
        report.rendered("<!-- begin nothing -->\n<!-- end nothing -->")


def test_options_and_passes_are_all_described():
    options, readme = (ROOT / "docs" / "options.md").read_text(), README.read_text()
    for option in OPTIONS:
        assert options.count(f"\n| `{option}` |") == readme.count(f"\n| `{option}` |") == 1, option
    for each in NAMES:
        assert f"| `{each}` |" in options, each


def test_the_picture_of_the_stages():
    drawn = runpy.run_path(str(STAGES))
    assert STAGES.with_suffix(".svg").read_text() == drawn["draw"](), "python docs/figures/stages.py draws it anew"
    assert {p for stage in drawn["STAGES"] for p in stage.passes} == set(NAMES)


def test_the_readmes_test_command_is_what_ci_runs():
    assert "pip install -e '.[test]' && pytest" in README.read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    assert "-e '.[test]'" in ci and re.search(r"^ *pytest\b", ci, re.MULTILINE)


def test_the_readmes_python_is_python():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        ast.parse(block)


def test_modules_that_are_called_exist():
    called = {
        module
        for page in PAGES
        for module in re.findall(r"python -m ((?:benchmarks|tests)(?:\.\w+)*)\b(?!\.)", page.read_text())
    }
    assert called
    assert not {module for module in called if importlib.util.find_spec(module) is None}


def test_files_that_are_named_exist():
    """Paths of the repository between backticks."""
    for page in PAGES:
        for path in re.findall(r"`((?:tests|benchmarks|docs|examples|inductor_ext|templates)/[\w./-]+)`", page.read_text()):
            assert Path(ROOT / path).exists(), f"{name(page)} names {path}"
