"""``gradfuse explain SCRIPT`` runs a script, and shows the decisions for every graph that gradfuse compiles in it."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from ..core.report import Report, collect
from ..core.table import wrapped
from ..torch_api.config import without_caches
from .html import lines, page

#: The exit code of the process if Python is interrupted.
INTERRUPTED = 130


def split_html(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return a script's arguments without ``--html FILE`` or ``--html=FILE``, and FILE.

    All arguments after ``--`` belong to the script. Raises ValueError if ``--html`` comes without a file.
    """
    kept, html = [], None
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*kept, *rest], html
        if argument == "--html":
            html = next(rest, None)
            if html is None:
                raise ValueError("--html needs the name of a file")
        elif argument.startswith("--html="):
            html = argument.removeprefix("--html=")
        else:
            kept.append(argument)
    return kept, html


def run(script: str, arguments: Sequence[str] = (), html: str | None = None) -> int:
    """Run ``script`` as the main module and print the decisions; write them, with pictures, to ``html`` if given.

    Returns the exit code of the script if the script fails (1 if it raises; its traceback is then printed). If it succeeds,
    returns 0, or 1 if it compiled no graph with gradfuse. Every graph is compiled from scratch.
    """
    if not Path(script).is_file():
        print(f"gradfuse explain: there is no file {script!r}", file=sys.stderr)
        return 2
    with collect(pictures=html is not None) as report, without_caches():
        code, error = _run(script, arguments)
    _show(report, script)
    if html is not None and report.graphs:
        Path(html).write_text(page(report, f"gradfuse explain {script}"), encoding="utf-8")
        print(f"{html} shows these decisions with pictures of the masks and of the learned terms.")
    sys.stdout.flush()
    if error is not None:
        traceback.print_exception(error.with_traceback(_in_script(error, script)))
    return code or (0 if report.graphs else 1)


def _run(script: str, arguments: Sequence[str]) -> tuple[int, BaseException | None]:
    """Run a script as ``python SCRIPT ...`` would. Returns its exit code and its exception, if there is one."""
    before = sys.argv[:], sys.path[:]
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
        return 0, None
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None), None
    except KeyboardInterrupt as error:
        return INTERRUPTED, error
    except Exception as error:
        return 1, error
    finally:
        sys.argv[:], sys.path[:] = before


def _show(report: Report, script: str) -> None:
    if not report.graphs:
        text = f"gradfuse explain: {script} compiled no graph with gradfuse."
        print(wrapped(f'{text} Compile the model with torch.compile(model, backend="gradfuse") and call it in the script.'))
        return
    print("\n".join(lines(report)))


def _in_script(error: BaseException, script: str) -> object:
    """Return the traceback from the first line of the script on, or all of it if the script is not in it."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename != script:
        at = at.tb_next
    return at or error.__traceback__
