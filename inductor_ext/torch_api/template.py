"""Triton templates of Inductor, and the choice of their tiles."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch._inductor import ir as inductor_ir
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, autotune_select_algorithm
from torch._inductor.utils import triton_type
from torch._inductor.virtualized import V

from .ir import as_it_is_now

__all__ = ["SymbolicGridFn", "triton_type"]


class Template:
    """A TritonTemplate of Inductor whose Jinja source is compiled when it is first used.

    A process that finds its kernels in the caches uses none of them.
    """

    def __init__(self, name: str, grid: Callable[..., Any], source: str) -> None:
        self.name = name
        self._arguments = {"name": name, "grid": grid, "source": source}

    def _made(self, **arguments: Any) -> TritonTemplate:
        return TritonTemplate(**arguments)

    @functools.cached_property
    def _compiled(self) -> TritonTemplate:
        """The template. Its input layouts are frozen if this torch has that option."""
        extra = {}
        if "always_freeze_layout" in inspect.signature(TritonTemplate.__init__).parameters:
            extra["always_freeze_layout"] = True
        return self._made(**self._arguments, **extra)

    def maybe_append_choice(self, choices: list[Any], **options: Any) -> None:
        """Append the kernel that these options give to ``choices``, unless they are not possible."""
        for operands in ("input_nodes", "mutated_inputs"):
            options[operands] = [as_it_is_now(x) for x in options[operands]]
        self._compiled.maybe_append_choice(choices, **options)


class GluonTemplate(Template):
    """A template in Gluon."""

    def _made(self, **arguments: Any) -> TritonTemplate:
        from .gluon import GluonKernel, prepare

        prepare()
        template = super()._made(**arguments)
        template.kernel_type = GluonKernel
        return template


_failures: dict[str, str | None] = {}


def build_failure(choice: Any) -> str | None:
    """Return why the kernel of a choice does not build, or None. It is built now, once for each source.

    On a CPU the interpreter runs kernels, and nothing is built.
    """
    source = choice.bmreq.module_cache_key
    if choice.layout.device.type != "cpu" and source not in _failures:
        try:
            with _without_errors_in_the_log():
                choice.precompile()
            _failures[source] = None
        except Exception as error:
            _failures[source] = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[-1][:200]}"
    return _failures.get(source)


@contextlib.contextmanager
def _without_errors_in_the_log() -> Iterator[None]:
    """Keep Inductor from printing a kernel that does not build and all of Triton's errors: the caller reports the reason.

    Other threads, which may compile at the same time, print theirs.
    """
    log, thread = logging.getLogger("torch._inductor.runtime.triton_heuristics"), threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(of_others)
    try:
        yield
    finally:
        log.removeFilter(of_others)


def keep_alone(output: Any) -> None:
    """Let nothing be fused into the kernel that computes this output."""
    V.graph.no_fuse_buffer_names.add(output.get_name())


def autotune(
    name: str,
    choices: list[Any],
    inputs: Sequence[Any],
    layout: Any,
    input_gen_fns: dict[int, Callable[..., Any]],
    subgraph_inputs: Sequence[Any],
    subgraph_outputs: Sequence[Any],
) -> Any:
    """Pick the fastest choice (the only one outside max-autotune) and return its output.

    If ``name`` contains "flex_attention", Inductor writes the times of the choices to the file for which users ask by
    ``TORCHINDUCTOR_FLEX_ATTENTION_LOGGING_FILE``; they are those of the backward if it contains "backward".
    The subgraphs' inputs and outputs are stored on the template buffer, because Inductor looks there for the symbolic
    integers that an inlined subgraph uses.
    """
    nodes = [as_it_is_now(x) for x in inputs if isinstance(x, inductor_ir.IRNode)]
    out = autotune_select_algorithm(name, choices, nodes, layout, input_gen_fns=input_gen_fns)
    if isinstance(out, tuple):
        out = out[0]
    template_buffer = out.data.data
    template_buffer.subgraph_inps = list(subgraph_inputs)
    template_buffer.subgraph_outs = list(subgraph_outputs)
    return out
