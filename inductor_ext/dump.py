"""``options={"dump": DIR}`` writes each graph before and after each pass as readable Python, and the code of Inductor.

    DIR/graph_0/00_dynamo.py  01_dynamo_score_mods.py ...  05_joint.py ...  08_forward.py ...  code_forward.py

A graph that a pass did not change is not written again. The same texts are artifacts of ``trace_structured`` with names
that begin with ``gradfuse_``, so tlparse shows them if ``TORCH_TRACE`` is set.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from .torch_api.tracing import is_traced, trace_artifact


@dataclass
class Dump:
    """Writes the texts of the compilation of one Dynamo graph.

    directory: the directory to which they are written. If it is None, they go to the structured trace only.
    """

    directory: str | None
    number: int
    _last: dict[int, str] = field(default_factory=dict)
    _count: Any = field(default_factory=itertools.count)

    def graph(self, gm: GraphModule, label: str) -> None:
        """Write a graph and the graphs in it, unless its text has not changed since it was last written."""
        if self.directory is None and not is_traced():
            return
        text = gm.print_readable(print_output=False)
        if self._last.get(id(gm)) != text:
            self._last[id(gm)] = text
            self._write(f"{next(self._count):02d}_{label}.py", text)

    def code(self, compiled: Any, label: str) -> None:
        """Write the code, including kernels, that Inductor generated for a graph."""
        source = getattr(compiled, "source_code", None)
        if source and (self.directory is not None or is_traced()):
            self._write(f"code_{label}.py", source)

    def _write(self, name: str, text: str) -> None:
        trace_artifact(f"gradfuse_graph_{self.number}_{re.sub(r'[.]py$', '', name)}", text)
        if self.directory is not None:
            folder = Path(self.directory) / f"graph_{self.number}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
