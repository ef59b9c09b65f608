"""flex_attention with learned biases: forward and backward, gradfuse against stock Inductor and SDPA.

python -m benchmarks.flex                     # every case; writes results/flex.json
python -m benchmarks.flex --case relpos --dim 64 --compile-only   # fill the compile cache, in parallel with others
python -m benchmarks.flex --sweep             # lengths, masks, grouped heads, fp16; writes results/flex_sweep.json
python -m benchmarks.flex --compile-time      # seconds to the first gradient, no caches; writes results/flex_compile.json
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import inductor_ext  # noqa: F401  (registers the backend)

from .runner import Case, deterministic, gradfuse, run_suite, stock, time_compilation

ScoreMod = Callable[..., Tensor]

#: Cases whose compile time is measured, with the mode of torch.compile.
COMPILE_TIMED = [(name, "default") for name in ("none", "key", "relpos", "pair_batch")]
COMPILE_TIMED += [("relpos", "max-autotune-no-cudagraphs")]


def t5_bucket(distance: Tensor, buckets: int = 32, furthest: int = 128) -> Tensor:
    """T5's bidirectional bucket of ``k - q`` (Raffel et al., 2020): exact up to buckets/4, then logarithmic."""
    half = buckets // 2
    exact = half // 2
    magnitude = distance.abs()
    ratio = torch.log(magnitude.clamp(min=1).float() / exact) / math.log(furthest / exact)
    far = (exact + (ratio * (half - exact)).to(torch.int32)).clamp(max=half - 1)
    return torch.where(distance > 0, half, 0) + torch.where(magnitude < exact, magnitude, far)


#: name -> (shapes of the learned tables for batch B, heads H, length S; score_mod of the tables)
CASES: dict[str, tuple[Callable[[int, int, int], list[tuple[int, ...]]], Callable[..., ScoreMod]]] = {
    "none": (lambda B, H, S: [], lambda: lambda s, b, h, q, k: s),
    "head_scale": (lambda B, H, S: [(H,)], lambda t: lambda s, b, h, q, k: s * t[h]),
    "query_gate": (lambda B, H, S: [(H, S)], lambda t: lambda s, b, h, q, k: s * t[h, q]),
    "offset": (lambda B, H, S: [(S,)], lambda t: lambda s, b, h, q, k: s + t[(7 * q) % t.shape[0]]),
    "alibi": (lambda B, H, S: [(H,)], lambda t: lambda s, b, h, q, k: s - t[h] * (q - k).abs() / 1024),
    "key": (lambda B, H, S: [(H, S)], lambda t: lambda s, b, h, q, k: s + t[h, k]),
    "relpos": (lambda B, H, S: [(H, 2 * S)], lambda t: lambda s, b, h, q, k: s + t[h, q - k + t.shape[1] // 2]),
    "t5": (lambda B, H, S: [(32, H)], lambda t: lambda s, b, h, q, k: s + t[t5_bucket(k - q), h]),
    "pair": (lambda B, H, S: [(H, S, S)], lambda t: lambda s, b, h, q, k: s + t[h, q, k]),
    "pair_batch": (lambda B, H, S: [(B, H, S, S)], lambda t: lambda s, b, h, q, k: s + t[b, h, q, k]),
    "swin": (
        lambda B, H, S: [(H, 127, 127)],
        lambda t: lambda s, b, h, q, k: s + t[h, q // 64 - k // 64 + 63, q % 64 - k % 64 + 63],
    ),
    "twice": (lambda B, H, S: [(H, S)], lambda t: lambda s, b, h, q, k: s + t[h, q] + t[h, k]),
}


#: Block masks: name -> mask_mod for length S. Documents have S / 8 tokens each.
MASKS: dict[str, Callable[[int], Callable[..., Tensor]]] = {
    "causal": lambda S: lambda b, h, q, k: q >= k,
    "document": lambda S: lambda b, h, q, k: q // (S // 8) == k // (S // 8),
}


def attention(score_mod: Callable[..., ScoreMod], block_mask: BlockMask | None = None) -> Callable[..., Tensor]:
    def function(query: Tensor, key: Tensor, value: Tensor, *tables: Tensor) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        return flex_attention(query, key, value, score_mod=score_mod(*tables), block_mask=block_mask, enable_gqa=grouped)

    return function


def reference(score_mod: Callable[..., ScoreMod]) -> Callable[..., list[Tensor]]:
    """Output and gradients in float64, one (batch, head) at a time so that an S×S matrix is all it holds."""

    def function(*arguments: Tensor) -> list[Tensor]:
        *inputs, grad = arguments
        exact = [x.detach().double() for x in inputs]
        grads = [torch.zeros_like(x) for x in exact]
        out = torch.empty_like(grad, dtype=torch.float64)
        positions = torch.arange(grad.shape[2], device=grad.device)
        for b in range(grad.shape[0]):
            for h in range(grad.shape[1]):
                tables = [t.clone().requires_grad_() for t in exact[3:]]
                q, k, v = (x[b, h].clone().requires_grad_() for x in exact[:3])
                batch, head = (torch.tensor(i, device=grad.device) for i in (b, h))
                scores = q @ k.T / math.sqrt(q.shape[-1])
                scores = score_mod(*tables)(scores, batch, head, positions[:, None], positions[None, :])
                o = scores.softmax(-1) @ v
                out[b, h] = o.detach()
                pieces = torch.autograd.grad(o, [q, k, v, *tables], grad[b, h].double())
                for g, piece in zip(grads[:3], pieces[:3], strict=True):
                    g[b, h] = piece
                for g, piece in zip(grads[3:], pieces[3:], strict=True):
                    g += piece
        return [out, *grads]

    return function


def sdpa(backend: SDPBackend) -> Callable[..., Callable[..., Tensor]]:
    def prepare(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(query: Tensor, key: Tensor, value: Tensor, *tables: Tensor) -> Tensor:
            bias = tables[0].expand(query.shape[0], -1, -1, -1) if tables else None
            with sdpa_kernel([backend]):
                return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)

        return run

    return prepare


def make_case(name: str, dim: int, batch: int = 2, heads: int = 16, length: int = 4096) -> Case:
    torch.manual_seed(0)
    shapes, score_mod = CASES[name]
    options = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = [torch.randn(batch, heads, length, dim, **options) for _ in range(3)]
    inputs += [torch.randn(shape, **options) * 0.5 for shape in shapes(batch, heads, length)]
    peers = {"stock": stock, "gradfuse": gradfuse, "gradfuse-deterministic": deterministic}
    if name in ("none", "pair", "pair_batch"):
        for backend in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION", *(["FLASH_ATTENTION"] if name == "none" else [])):
            peers[f"sdpa-{backend.split('_')[0].lower()}"] = sdpa(getattr(SDPBackend, backend))
    return Case(
        name,
        {"dim": dim, "batch": batch, "heads": heads, "length": length, "dtype": "bfloat16"},
        [x.requires_grad_() for x in inputs],
        attention(score_mod),
        reference(score_mod),
        peers,
    )


def make_variant(
    name: str, length: int = 4096, *, heads: int = 16, kv_heads: int = 16, dtype: str = "bfloat16", mask: str = "none"
) -> Case:
    """A case away from the main table's setting (D=64, batch 2), stock against gradfuse, without errors."""
    torch.manual_seed(0)
    shapes, score_mod = CASES[name]
    options = {"device": "cuda", "dtype": getattr(torch, dtype)}
    inputs = [torch.randn(2, n, length, 64, **options) for n in (heads, kv_heads, kv_heads)]
    inputs += [torch.randn(shape, **options) * 0.5 for shape in shapes(2, heads, length)]
    block_mask = None if mask == "none" else create_block_mask(MASKS[mask](length), None, None, length, length, "cuda")
    peers = {"stock": stock, "gradfuse": gradfuse}
    if name == "t5" and length > 8192:
        del peers["stock"]  # seven seconds a backward
    parameters = {
        "dim": 64,
        "batch": 2,
        "heads": heads,
        "kv_heads": kv_heads,
        "length": length,
        "dtype": dtype,
        "mask": mask,
    }
    return Case(name, parameters, [x.requires_grad_() for x in inputs], attention(score_mod, block_mask), None, peers)


def sweep() -> Iterator[Case]:
    for name in ("key", "relpos", "t5", "pair"):
        for length in (512, 1024, 2048, 8192, 16384):
            if name != "pair" or length <= 8192:
                yield make_variant(name, length)
    for name in ("none", "key", "relpos"):
        for mask in MASKS:
            yield make_variant(name, mask=mask)
        yield make_variant(name, heads=32, kv_heads=8)
        yield make_variant(name, dtype="float16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--dim", action="append", type=int)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile-time", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    def cases() -> Iterator[Case]:
        for dim in arguments.dim or (64, 128):
            for name in arguments.case or CASES:
                yield make_case(name, dim)

    if arguments.compile_time:
        warm_up = make_case("none", 32, length=128)
        timed = ((make_case(name, 64), mode) for name, mode in COMPILE_TIMED)
        time_compilation("flex_compile", warm_up, timed, out=arguments.out)
    elif arguments.sweep:
        run_suite("flex_sweep", sweep(), compile_only=arguments.compile_only, out=arguments.out)
    else:
        run_suite("flex", cases(), compile_only=arguments.compile_only, out=arguments.out)


if __name__ == "__main__":
    main()
