"""Learned biases of real models in their own shapes: gradfuse, stock Inductor, SDPA with the bias as its mask, and no bias.

python -m benchmarks.biases                        # every case; writes results/biases.json
python -m benchmarks.biases --case swin --compile-only
python -m benchmarks.biases --case swin --profile  # the kernels of a step and their times
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import inductor_ext  # noqa: F401  (registers the backend)

from .flex import ScoreMod, t5_bucket
from .runner import Case, gradfuse, kernels, run_suite, stock

#: Floats that the reference holds at once for each of its tensors of scores.
CHUNK = 2**27
#: The rates of an H200 that the bound of a case is computed with, and one exponential for each score (results per second).
BYTES, FLOPS, EXPONENTIALS = 4.3e12, 650e12, 132 * 16 * 1.755e9


@dataclass
class Bias:
    """A bias of a model.

    shape: B, H, S, D. learned: shapes of the learned tensors. score_mod: from the learned tensors and the others. others:
    tensors of integers, made on a device. mask: a mask_mod of the others. dense: the bias as the model spells it for SDPA,
    if that is faster than reading score_mod's tables at every position.
    """

    shape: tuple[int, int, int, int]
    learned: list[tuple[int, ...]]
    score_mod: Callable[..., ScoreMod]
    others: Callable[[Any], list[Tensor]] = lambda device: []
    mask: Callable[..., Callable[..., Tensor]] | None = None
    dense: Callable[..., Tensor] | None = None


def _random_integers(high: int, *shape: int) -> Callable[[Any], list[Tensor]]:
    return lambda device: [torch.randint(0, high, shape, device=device)]


def _segments(segments: int, *shape: int) -> Callable[[Any], list[Tensor]]:
    """Segments of random lengths that follow each other, as in packed sequences of several modalities."""
    return lambda device: [torch.randint(0, segments, shape, device=device).sort(-1).values]


def _window_index(rows: int, columns: int, extra: bool = False) -> Callable[[Any], list[Tensor]]:
    """The index of a relative position in a window (Swin). With ``extra``, a class token is first, as in BEiT."""

    def make(device: Any) -> list[Tensor]:
        y, x = torch.arange(rows * columns, device=device) // columns, torch.arange(rows * columns, device=device) % columns
        dy, dx = y[:, None] - y[None, :] + rows - 1, x[:, None] - x[None, :] + columns - 1
        index = dy * (2 * columns - 1) + dx
        if not extra:
            return [index]
        count = (2 * rows - 1) * (2 * columns - 1)
        index = torch.nn.functional.pad(index, (1, 0, 1, 0))
        index[0, :], index[:, 0], index[0, 0] = count, count + 1, count + 2
        return [index]

    return make


def _packed(length: int, document: int) -> Callable[[Any], list[Tensor]]:
    """Positions that restart in each document, and the documents."""
    return lambda device: [torch.arange(length, device=device) % document, torch.arange(length, device=device) // document]


_by_index = lambda t, index: lambda s, b, h, q, k: s + t[index[q, k], h]  # noqa: E731
_by_batch_index = lambda t, index: lambda s, b, h, q, k: s + t[index[b, q, k], h]  # noqa: E731

CASES: dict[str, Bias] = {
    "graphormer": Bias((16, 32, 512, 32), [(512, 32)], _by_batch_index, _random_integers(512, 16, 512, 512)),
    "graphormer_long": Bias((2, 16, 4096, 64), [(512, 16)], _by_batch_index, _random_integers(512, 2, 4096, 4096)),
    "t5_packed": Bias(
        (2, 16, 4096, 64),
        [(32, 16)],
        lambda t, position, _: lambda s, b, h, q, k: s + t[t5_bucket(position[k] - position[q]), h],
        _packed(4096, 700),
        lambda _, document: lambda b, h, q, k: document[q] == document[k],
    ),
    "segment_pairs": Bias(
        (4, 12, 2048, 64),
        [(12, 8, 8)],
        lambda t, segment: lambda s, b, h, q, k: s + t[h, segment[b, q], segment[b, k]],
        _segments(8, 4, 2048),
    ),
    "vitdet": Bias(
        (2, 12, 4096, 64),
        [(2, 12, 4096, 64), (2, 12, 4096, 64)],
        lambda y, x: lambda s, b, h, q, k: s + y[b, h, q, k // 64] + x[b, h, q, k % 64],
        dense=lambda y, x: (y[..., :, None] + x[..., None, :]).flatten(-2),
    ),
    "conformer": Bias(
        (16, 8, 1024, 64), [(16, 8, 1024, 2047)], lambda r: lambda s, b, h, q, k: s + r[b, h, q, q - k + 1023]
    ),
    "deberta": Bias(
        (8, 12, 1024, 64),
        [(8, 12, 1024, 512), (8, 12, 1024, 512)],
        lambda a, p: (
            lambda s, b, h, q, k: s + a[b, h, q, (q - k).clamp(-256, 255) + 256] + p[b, h, k, (q - k).clamp(-256, 255) + 256]
        ),
    ),
    "alphafold": Bias((384, 4, 384, 32), [(4, 384, 384)], lambda t: lambda s, b, h, q, k: s + t[h, q, k]),
    "swin": Bias((2048, 4, 49, 32), [(169, 4)], _by_index, _window_index(7, 7)),
    "swin_v2": Bias((256, 8, 256, 32), [(961, 8)], _by_index, _window_index(16, 16)),
    "beit": Bias((128, 12, 197, 64), [(732, 12)], _by_index, _window_index(14, 14, extra=True)),
    "t5_base": Bias((32, 12, 512, 64), [(32, 12)], lambda t: lambda s, b, h, q, k: s + t[t5_bucket(k - q), h]),
    "patches": Bias(
        (2, 16, 4096, 64),
        [(16, 127, 127)],
        lambda t: lambda s, b, h, q, k: s + t[h, q // 64 - k // 64 + 63, q % 64 - k % 64 + 63],
    ),
}


def attention(bias: Bias, others: list[Tensor]) -> Callable[..., Tensor]:
    """The case as flex_attention."""
    length = bias.shape[2]
    block_mask = None
    if bias.mask is not None:
        block_mask = create_block_mask(bias.mask(*others), None, None, length, length, others[0].device)

    def function(query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Tensor:
        score_mod = bias.score_mod(*learned, *others)
        return flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)

    return function


def without_bias(bias: Bias, others: list[Tensor]) -> Callable[..., Callable[..., Tensor]]:
    """The case as stock's flex_attention without the bias: what is left if biases cost nothing."""
    plain = attention(replace(bias, score_mod=lambda *_: None), others)
    return lambda _: stock(plain)


def as_mask(bias: Bias, others: list[Tensor]) -> Callable[..., Callable[..., Tensor]]:
    """The case as SDPA with a mask that holds the bias, compiled by stock."""
    batch, heads, length, _ = bias.shape

    def function(query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Tensor:
        b, h, q, k = _grid((batch, heads, length, length), query.device)
        if bias.dense is not None:
            mask = bias.dense(*learned, *others)
        else:
            mask = bias.score_mod(*learned, *others)(query.new_zeros(()), b, h, q, k)
        if bias.mask is not None:
            mask = mask.masked_fill(~bias.mask(*others)(b, h, q, k), -math.inf)
        mask = mask.expand(batch, heads, length, length)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return lambda _: stock(function)


def _grid(sizes: tuple[int, ...], device: Any) -> list[Tensor]:
    shapes = [[-1 if i == j else 1 for j in range(len(sizes))] for i in range(len(sizes))]
    return [torch.arange(n, device=device).view(shape) for n, shape in zip(sizes, shapes, strict=True)]


def reference(bias: Bias, others: list[Tensor]) -> Callable[..., list[Tensor]]:
    """Output and gradients in float64, for some (batch, head) at a time."""
    batch, heads, length, dim = bias.shape
    at_once = max(1, CHUNK // length**2)

    def function(*arguments: Tensor) -> list[Tensor]:
        *inputs, grad = arguments
        exact = [x.detach().double() for x in inputs]
        grads = [torch.zeros_like(x) for x in exact]
        out = torch.empty(bias.shape, device=grad.device, dtype=torch.float64)
        slices = torch.arange(batch * heads, device=grad.device)
        for chosen in slices.split(at_once):
            b, h = (x[:, None, None] for x in (chosen // heads, chosen % heads))
            q, k = (x[0] for x in _grid((1, length, length), grad.device)[1:])
            tables = [t.clone().requires_grad_() for t in exact[3:]]
            mine = [x.flatten(0, 1)[chosen].requires_grad_() for x in exact[:3]]
            scores = mine[0] @ mine[1].mT / math.sqrt(dim)
            scores = bias.score_mod(*tables, *others)(scores, b, h, q, k)
            if bias.mask is not None:
                scores = scores.masked_fill(~bias.mask(*others)(b, h, q, k), -math.inf)
            result = scores.softmax(-1) @ mine[2]
            out.flatten(0, 1)[chosen] = result.detach()
            pieces = torch.autograd.grad(result, [*mine, *tables], grad.flatten(0, 1)[chosen].double())
            for total, piece in zip(grads[:3], pieces[:3], strict=True):
                total.flatten(0, 1)[chosen] = piece
            for total, piece in zip(grads[3:], pieces[3:], strict=True):
                total += piece
        return [out, *grads]

    return function


def bound(bias: Bias, visible: float) -> dict[str, float]:
    """The least milliseconds of the forward and the backward: bytes, matmuls or exponentials, whichever take longest."""
    batch, heads, length, dim = bias.shape
    scores = batch * heads * length**2 * visible
    operands = 2 * batch * heads * length * dim
    tables = sum(2 * math.prod(shape) for shape in bias.learned)
    exponentials = scores / EXPONENTIALS
    forward = max((4 * operands + tables) / BYTES, 4 * scores * dim / FLOPS, exponentials)
    backward = max((8 * operands + 2 * tables) / BYTES, 10 * scores * dim / FLOPS, exponentials)
    return {"bound_forward_ms": 1e3 * forward, "bound_backward_ms": 1e3 * backward}


def make_case(name: str) -> Case:
    """One case in bf16."""
    torch.manual_seed(0)
    bias = CASES[name]
    batch, heads, length, dim = bias.shape
    others = bias.others("cuda")
    visible = 1.0
    if bias.mask is not None:
        _, _, q, k = _grid((1, 1, length, length), "cuda")
        visible = float(bias.mask(*others)(0, 0, q, k).float().mean())
    options = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = [torch.randn(bias.shape, **options) for _ in range(3)]
    inputs += [torch.randn(shape, **options) * 0.5 for shape in bias.learned]
    parameters = {"batch": batch, "heads": heads, "length": length, "dim": dim, "dtype": "bfloat16", **bound(bias, visible)}
    peers = {
        "no bias": without_bias(bias, others),
        "stock": stock,
        "sdpa-mask": as_mask(bias, others),
        "gradfuse": gradfuse,
    }
    inputs = [x.requires_grad_() for x in inputs]
    made = attention(bias, others), reference(bias, others)
    return Case(name, parameters, inputs, *made, peers, kernels=True, partial=frozenset({"no bias"}))


def profile(name: str, **options: Any) -> dict[str, Any]:
    """The kernels of gradfuse's forward and backward, with the microseconds of each in one step."""
    torch._dynamo.reset()
    case = make_case(name)
    run = torch.compile(case.function, backend="gradfuse", fullgraph=True, options=options)
    leaves = [x for x in case.inputs if x.requires_grad]

    def step() -> None:
        out = run(*case.inputs)
        torch.autograd.grad(out, leaves, out.detach())

    for _ in range(3):
        step()
    found = {name[:90]: [count, round(1e3 * milliseconds, 1)] for name, (count, milliseconds) in kernels(step).items()}
    return {"case": name, "options": options, "kernels": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--peer", action="append", help="only these peers")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = arguments.case or list(CASES)
    if arguments.profile:
        for name in names:
            print(json.dumps(profile(name)), flush=True)
        return

    def chosen(case: Case) -> Case:
        case.peers = {p: prepare for p, prepare in case.peers.items() if not arguments.peer or p in arguments.peer}
        return case

    cases = (chosen(make_case(name)) for name in names)
    run_suite("biases", cases, compile_only=arguments.compile_only, out=arguments.out)


if __name__ == "__main__":
    main()
