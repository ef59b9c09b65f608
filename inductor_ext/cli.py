"""The command ``gradfuse``: ``demo`` trains a small model, ``doctor`` checks what works on this machine, ``explain`` shows
the decisions for the graphs that a script compiles, and ``bisect`` finds the pass that makes a script fail.
"""

from __future__ import annotations

import argparse


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="gradfuse", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a byte-level language model with learned attention biases")
    demo.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a CUDA device, otherwise cpu")
    demo.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="parameter dtype")
    demo.add_argument("--steps", type=int, default=200)
    demo.add_argument("--seed", type=int, default=0)
    commands.add_parser("doctor", help="print versions, the device, and what works on this machine")
    explain = commands.add_parser(
        "explain",
        usage="gradfuse explain SCRIPT [ARGS ...] [--html FILE]",
        help="run a script and show the decisions for every graph that it compiles with gradfuse",
    )
    explain.add_argument("--html", metavar="FILE", help="also write them to this file, with pictures of masks and terms")
    explain.add_argument("script")
    explain.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments; an --html after -- is one of them too")
    bisect = commands.add_parser("bisect", help="find the pass and the graph that make a script fail")
    bisect.add_argument("script")
    bisect.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    bisect.add_argument("--repro", default="gradfuse_repro.py", help="the file to write")
    arguments = parser.parse_args(argv)

    if arguments.command == "demo":
        from .demo.train import run

        return run(arguments.device, arguments.dtype, arguments.steps, arguments.seed)
    if arguments.command == "bisect":
        from .bisect import run as bisected

        return bisected(arguments.script, arguments.arguments, arguments.repro)
    if arguments.command == "explain":
        from .explanations.script import run as explained
        from .explanations.script import split_html

        try:
            rest, html = split_html(arguments.arguments)
        except ValueError as error:
            explain.error(str(error))
        return explained(arguments.script, rest, html or arguments.html)
    from .doctor import examine

    return examine()


if __name__ == "__main__":
    raise SystemExit(main())
