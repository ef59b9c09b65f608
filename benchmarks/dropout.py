"""Dropout inside the kernels of attention: what it adds to the forward and the backward, beside SDPA's flash attention.

python -m benchmarks.dropout                  # every case; writes results/dropout.json
python -m benchmarks.dropout --compile-only   # fill the compile cache
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import inductor_ext  # noqa: F401  (registers the backend)
from inductor_ext.attention import dropout

from .flex import CASES
from .runner import Case, gradfuse, run_suite

PROBABILITY = 0.1
SHAPE = (2, 16, 4096)


def attention(name: str, p: float) -> Callable[..., Tensor]:
    """An attention of the main table whose probabilities are dropped with probability ``p``."""
    score_mod = CASES[name][1]

    def function(query: Tensor, key: Tensor, value: Tensor, *tables: Tensor) -> Tensor:
        return flex_attention(query, key, value, score_mod=score_mod(*tables), kernel_options=dropout(p))

    return function


def _flash(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=PROBABILITY)

    return run


def cases() -> Iterator[Case]:
    """Each attention with and without dropout. Tests compare the results with float64; here only time is measured."""
    batch, heads, length = SHAPE
    for dim in (64, 128):
        for name in ("none", "relpos"):
            options = {"device": "cuda", "dtype": torch.bfloat16}
            inputs = [torch.randn(*SHAPE, dim, **options) for _ in range(3)]
            inputs += [torch.randn(shape, **options) for shape in CASES[name][0](batch, heads, length)]
            inputs = [x.requires_grad_() for x in inputs]
            parameters = {"dim": dim, "batch": batch, "heads": heads, "length": length, "dtype": "bfloat16"}
            for p in (0.0, PROBABILITY):
                peers = {"gradfuse": gradfuse}
                if p and name == "none":
                    peers["sdpa-flash"] = _flash
                yield Case(name, parameters | {"p": p}, inputs, attention(name, p), None, peers)


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    run_suite("dropout", cases(), compile_only=given.compile_only, out=given.out)


if __name__ == "__main__":
    main()
