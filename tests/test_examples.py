"""Every example runs, prints that it succeeded, and is short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
#: With an empty cache these have the most C++ to build; tests/mlstm and tests/composition cover what they show.
SLOW = {"fsdp2", "mlstm_block"}


@pytest.mark.breadth(0)
@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=pytest.mark.slow if s.stem in SLOW else (), id=s.stem) for s in SCRIPTS]
)
def test_the_example_runs_as_its_docstring_says(script):
    """Without what this process set for its own kernels (TRITON_INTERPRET); one thread, as other tests run beside it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = TWO_PROCESSES if "torchrun" in script.read_text() else []
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith(f"{script.stem}: "), done.stdout
    assert "left to stock" not in done.stderr, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_example_is_short_and_listed(script):
    text = script.read_text()
    assert len(text.splitlines()) < 60
    assert f"examples/{script.name}\n" in text.split('"""')[1], "the docstring gives the command"
    assert f"`{script.name}`" in (ROOT / "examples" / "README.md").read_text()
