"""The command ``gradfuse``: ``demo`` trains a small model, ``doctor`` says what works on this machine."""

from __future__ import annotations

import argparse


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="gradfuse", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a byte-level language model with learned attention biases")
    demo.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one, else cpu")
    demo.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of the parameters")
    demo.add_argument("--steps", type=int, default=200)
    demo.add_argument("--seed", type=int, default=0)
    commands.add_parser("doctor", help="print versions, the device, and what is supported here")
    arguments = parser.parse_args(argv)

    if arguments.command == "demo":
        from .demo.train import run

        return run(arguments.device, arguments.dtype, arguments.steps, arguments.seed)
    from .doctor import examine

    return examine()


if __name__ == "__main__":
    raise SystemExit(main())
