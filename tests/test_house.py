"""The rules for imports: which part of the package may import which other part."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import inductor_ext
from inductor_ext.torch_api import versions

PACKAGE = Path(inductor_ext.__file__).parent
FEATURES = ("attention", "gathers", "casts", "scan", "mlstm")
#: The modules that any part may import: the interface to torch, and the options.
FOUNDATION = {"torch_api", "options"}


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


def private_names(path):
    """The names of torch that are not documented API and that a file imports or reaches through ``torch``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            names = []
        yield from (name for name in names if re.fullmatch(r"torch\.([\w.]+\.)?(_(?!_)|fx\.experimental)[\w.]*", name))


def parts(folder):
    return {(path.name, module[0]) for path in (PACKAGE / folder).rglob("*.py") for module in imports(path) if module}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_imports_the_core_and_itself(feature):
    allowed = {feature, "core"} | FOUNDATION
    assert not {(file, part) for file, part in parts(feature) if part not in allowed}


def test_the_core_imports_no_feature():
    assert not {(file, part) for file, part in parts("core") if part not in {"core"} | FOUNDATION}


def test_names_of_torch_that_are_no_api_stay_behind_one_door():
    files = [p for p in PACKAGE.rglob("*.py") if "torch_api" not in p.parts]
    found = {(p.name, name) for p in files for name in private_names(p) if not name.startswith("torch.ops.")}
    assert not found


def test_the_table_of_private_names_is_what_the_door_imports():
    """By module and name; what code reaches as an attribute of an imported module is in the table under that module."""
    imported = {(p.stem, name) for p in (PACKAGE / "torch_api").glob("*.py") for name in private_names(p)}
    listed = {(user, n.where.replace(":", ".")) for n in versions.NAMES for user in n.used_by.split(", ")}
    unlisted = {(user, name) for user, name in imported if not any(u == user and known(n, name) for u, n in listed)}
    assert not unlisted
    # Inductor's IR and ops are handed on as they are; the names in them are used elsewhere.
    everything = "".join(p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "versions.py")
    unused = {n for _, n in listed if not re.search(rf"\b{n.split('.')[-1]}\b", everything)}
    assert not unused


def known(listed, imported):
    return listed == imported or listed.startswith(f"{imported}.") or imported.startswith(f"{listed}.")


def test_this_torch_has_every_name():
    assert versions.missing() == []


def test_a_torch_that_lacks_a_name_is_named_with_what_it_lacks(monkeypatch, capsys):
    monkeypatch.setattr(versions, "NAMES", (*versions.NAMES, versions.PrivateName("torch._inductor:gone", "ir")))
    with pytest.raises(versions.UnsupportedTorchError, match=r"torch\._inductor:gone, used by torch_api/ir\.py") as error:
        versions.check()
    assert [n.where for n in error.value.missing] == ["torch._inductor:gone"]


def test_importing_the_package_is_cheap():
    """No compiler is imported before a model is compiled; torch itself is not counted."""
    code = "import sys, torch; before = set(sys.modules); import inductor_ext; print(len(set(sys.modules) - before))"
    installed = "import importlib.metadata as m; assert m.entry_points(group='torch_dynamo_backends', name='gradfuse')"
    if subprocess.run([sys.executable, "-c", installed], capture_output=True).returncode:
        pytest.skip("run from a source tree, importing registers the backend")
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) < 10


def test_a_warm_start_compiles_no_template():
    """Jinja takes a third of a second for all of them, and code that is in the caches needs none."""
    program = (
        "import inductor_ext.backend\n"
        "from torch._inductor.select_algorithm import TritonTemplate\n"
        "assert TritonTemplate.all_templates\n"
        "print([name for name in TritonTemplate.all_templates if 'gradfuse' in name])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_there_is_a_rule_for_every_part():
    folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert folders == {*FEATURES, "core", "demo", "explanations", "torch_api"}


def test_a_feature_that_imports_another_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "scan").mkdir()
    (tmp_path / "scan" / "bad.py").write_text("from ..mlstm.op import mlstm\nfrom ..torch_api import config\n")
    assert parts("scan") == {("bad.py", "mlstm"), ("bad.py", "torch_api")}
