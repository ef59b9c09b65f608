"""The rules of the house: which part of the package may import which."""

import ast
from pathlib import Path

import pytest

import inductor_ext

PACKAGE = Path(inductor_ext.__file__).parent
FEATURES = ("attention", "gathers", "casts", "scan", "mlstm")
#: What any part may import: the door to torch, and the options as the user wrote them.
FOUNDATION = {"compat", "options"}


def imports(path):
    """The modules of inductor_ext that a file imports, as parts of their names: ("core", "report")."""
    here = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(a.name.split("."))[1:] for a in node.names if a.name.split(".")[0] == "inductor_ext")
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "inductor_ext"):
            base = here[: len(here) - node.level + 1] if node.level else ()
            module = tuple((node.module or "").split(".")) if node.module else ()
            module = base + (module if node.level else module[1:])
            yield from ((*module, a.name) for a in node.names) if not module else (module,)


def parts(folder):
    return {(path.name, module[0]) for path in (PACKAGE / folder).rglob("*.py") for module in imports(path) if module}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_imports_the_core_and_itself(feature):
    allowed = {feature, "core"} | FOUNDATION
    assert not {(file, part) for file, part in parts(feature) if part not in allowed}


def test_the_core_imports_no_feature():
    assert not {(file, part) for file, part in parts("core") if part not in {"core"} | FOUNDATION}


def test_there_is_a_rule_for_every_part():
    folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert folders == {*FEATURES, "core", "demo"}


def test_a_feature_that_imports_another_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "scan").mkdir()
    (tmp_path / "scan" / "bad.py").write_text("from ..mlstm.op import mlstm\nfrom .. import compat\n")
    assert parts("scan") == {("bad.py", "mlstm"), ("bad.py", "compat")}
