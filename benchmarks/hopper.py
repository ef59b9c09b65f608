"""The forward in Gluon beside the same attention without it, and beside cuDNN where that computes it.

python -m benchmarks.hopper                             # every case; writes results/hopper.json
python -m benchmarks.hopper --part 0 4 --out part.json  # a fourth of the cases, for one of four GPUs
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.core.report import collect
from inductor_ext.core.table import progress

from .flex import CASES, MASKS
from .runner import RESULTS, _kernel_time, environment

DIM = 128
SCORE_MODS = ("none", "key", "query_gate", "head_scale", "alibi", "twice")
#: B, H and S: the same number of tokens in sequences of several lengths, and few heads.
SHAPES = ((2, 16, 4096), (4, 16, 2048), (8, 16, 1024), (1, 8, 2048), (1, 8, 4096))
ROUNDS = 3


def cases() -> Iterator[tuple[tuple[int, int, int], str, str | None]]:
    """Shape, score_mod and mask."""
    for mask in (None, "causal"):
        yield from ((SHAPES[0], name, mask) for name in SCORE_MODS)
        yield from ((shape, "none", mask) for shape in SHAPES[1:])


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> torch.Tensor:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


def measure(shape: tuple[int, int, int], name: str, mask: str | None) -> list[dict[str, Any]]:
    """A row for each peer: the milliseconds of a forward's kernels, in turns with the other peers."""
    options, length = {"device": "cuda", "dtype": torch.bfloat16}, shape[2]
    tables, score_mod = CASES[name]
    inputs = [torch.randn(*shape, DIM, **options, requires_grad=True) for _ in range(3)]
    score_mod = score_mod(*(torch.randn(t, **options, requires_grad=True) for t in tables(*shape)))
    block_mask = create_block_mask(MASKS[mask](length), None, None, length, length, "cuda") if mask else None
    peers: dict[str, Callable[..., torch.Tensor]] = {}
    kernel = {}
    for peer, disable in (("gluon", []), ("triton", ["gluon"])):
        torch._dynamo.reset()
        function = partial(flex_attention, score_mod=score_mod, block_mask=block_mask)
        peers[peer] = torch.compile(function, backend="gradfuse", fullgraph=True, options={"disable": disable})
        with collect() as report:
            peers[peer](*inputs)
        kernel[peer] = next(d.path for d in report.decisions if d.pass_name == "flex_attention")
    if name == "none":
        peers["cudnn"] = partial(_cudnn, causal=mask is not None)
    times = [{peer: _kernel_time(lambda run=run: run(*inputs)) for peer, run in peers.items()} for _ in range(ROUNDS)]
    shared = {"case": name, "mask": mask, "batch": shape[0], "heads": shape[1], "length": length, "dim": DIM}
    median = {peer: sorted(t[peer] for t in times)[ROUNDS // 2] for peer in peers}
    return [shared | {"peer": p, "kernel": kernel.get(p), "forward_kernels_ms": t} for p, t in median.items()]


def main() -> None:
    """Measure every case, and write the results anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "hopper.json")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="each N-th case, from the I-th on"
    )
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    first, step = given.part
    for case in progress("hopper", "case", of=[*cases()][first::step]):
        rows += measure(*case)
        print(json.dumps(rows[-2:]), flush=True)
        given.out.write_text(json.dumps({"suite": "hopper", "environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
