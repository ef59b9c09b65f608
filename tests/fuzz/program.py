"""A random program: readable source that is made from a seed, and that a person can paste and run."""

from __future__ import annotations

import itertools
import linecache
import random
import re
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_modules = itertools.count()

#: This text follows the source when a program is printed.
_REPRODUCE = """
if __name__ == "__main__":
    import inductor_ext  # registers the backend

    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    from tests.fuzz.judge import judge
    from tests.fuzz.program import Program

    # What the fuzzer does: run, compare with float64 and print the errors of the outputs and gradients.
    source = open(__file__).read().split('if __name__ ==')[0]
    print(judge(Program({fields}, source=source), mode="graphs", device="cpu"))
"""


@dataclass
class Program:
    """``source`` defines ``make(g, device)``, which returns the arguments, and ``program(*arguments)``.

    exact: the program only moves and casts values, so its result is bitwise equal to that of eager mode.
    strides: strides, aliasing and mutations of inputs are compared too, and the reference is eager mode.
    overwrites: which of the tensors outside, results and inputs, is overwritten between forward and backward; -1 for none.
    """

    family: str
    seed: int
    source: str
    dtype: str = "float32"
    dynamic: bool | None = None
    exact: bool = False
    strides: bool = False
    overwrites: int = -1

    @property
    def name(self) -> str:
        return f"{self.family}:{self.seed}"

    def show(self) -> str:
        """The source, and code that runs it."""
        names = ("family", "seed", "dtype", "dynamic", "exact", "strides", "overwrites")
        fields = ", ".join(f"{n}={getattr(self, n)!r}" for n in names)
        return f"# {self.name}\n{self.source}\n{_REPRODUCE.replace('{fields}', fields)}"

    def load(self, **replaced: Any) -> types.ModuleType:
        """Load the source as a new module, whose lines tracebacks and Dynamo can find. ``replaced`` overrides names."""
        name = f"fuzz_{self.family}_{abs(self.seed)}_{next(_modules)}"
        file = f"<{name}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        module = types.ModuleType(name)
        module.__file__ = file
        sys.modules[name] = module
        exec(compile(self.source, file, "exec"), module.__dict__)
        for key, value in replaced.items():
            if hasattr(module, key):
                setattr(module, key, value)
        return module


def unload(module: types.ModuleType) -> None:
    """Forget a module made by ``Program.load``."""
    sys.modules.pop(module.__name__, None)
    linecache.cache.pop(module.__file__, None)


def render(
    inputs: list[tuple[str, str]], body: list[str], imports: list[str] | None = None, before: list[str] | None = None
) -> str:
    """The source of a program. Each of ``inputs`` is a name and an expression of g and device."""
    names = ", ".join(name for name, _ in inputs)
    lines = ["import torch", "import torch.nn.functional as F", *(imports or []), "", *(before or [])]
    lines += ["", "def make(g, device):", *(f"    {name} = {text}" for name, text in inputs), f"    return [{names}]", ""]
    return "\n".join([*lines, "", f"def program({names}):", *("    " + line for line in body), ""])


@dataclass
class Writer:
    """Writes a program. Each statement runs as soon as it is written, so shapes, ranges and errors are known.

    A statement that raises is not kept.
    """

    rng: random.Random
    inputs: list[tuple[str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.scope = {"torch": torch, "F": F, "g": self.generator, "device": "cpu"}

    def input(self, expression: str, prefix: str = "x") -> str:
        name = f"{prefix}{len(self.inputs)}"
        self.inputs.append((name, expression))
        self.scope[name] = self.values[name] = eval(expression, self.scope)
        return name

    def add(self, expression: str, prefix: str = "v") -> str | None:
        """Add ``name = expression``. Return the name, or None if the expression raises."""
        name = f"{prefix}{len(self.lines)}"
        try:
            value = eval(expression, self.scope)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            return None
        if isinstance(value, Tensor) and value.numel() == 0:
            return None
        self.scope[name] = self.values[name] = value
        self.lines.append(f"{name} = {expression}")
        return name

    def statement(self, text: str) -> bool:
        """Add a statement that works in place."""
        try:
            exec(text, self.scope)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            return False
        self.lines.append(text)
        return True

    def source(self, returned: list[str], effects: bool = False) -> str:
        """The source, with only the statements that lead to ``returned`` or, with ``effects``, to an in-place statement."""
        needed = set(returned)
        kept: set[int] = set()
        while True:
            before = len(kept)
            for at, line in enumerate(self.lines):
                names = set(re.findall(r"\b[a-z]+\d+\b", line))
                defined = line.split(" = ")[0] if re.match(r"[a-z]+\d+ = ", line) else None
                if (defined in needed) if defined else (effects or names & needed):
                    needed |= names
                    kept.add(at)
            if len(kept) == before:
                break
        body = [*(self.lines[at] for at in sorted(kept)), f"return {', '.join(returned)}"]
        inputs = [(name, text) for name, text in self.inputs if name in needed]
        return render(inputs, body)
