"""Cases of flex_attention with captured tensors, each with a score_mod as a user writes it and the same as dense math.

The same cases run on the CPU path, in the interpreter and on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .case import Case


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 24)


def _nothing_for_row_5(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q != 5) & (k >= 0)


def _bucket(d: Tensor) -> Tensor:
    return torch.where(d > 0, 8, 0) + d.abs().clamp(max=7)


def _clamped(d: Tensor) -> Tensor:
    return d.clamp(-8, 7) + 8


#: The default numbers of positions and heads of a case.
S, H = 80, Case.heads
IDENTITY = ({}, lambda t: lambda s, b, h, q, k: s, lambda t: lambda s, b, h, q, k: s)
_relative = lambda t: lambda s, b, h, q, k: s + t["t"][h, q - k + S]  # noqa: E731
RELPOS = ({"t": (H, 2 * S)}, _relative, _relative)
RELPOS_OF_FOUR_HEADS = ({"t": (4, 2 * S)}, _relative, _relative)

#: Shapes, dtypes, layouts and masks.
FEATURES = [
    Case("plain", *IDENTITY),
    Case("one_query_one_key", *IDENTITY, length=1),
    Case("one_query", *RELPOS, length=1, kv_length=70),
    Case("odd_length", *RELPOS, length=77),
    Case("longer_keys", *RELPOS, length=33, kv_length=80),
    Case("longer_queries", *RELPOS, length=80, kv_length=17),
    Case("two_blocks", *IDENTITY, length=200, batch=1),
    Case("head_dim_40", *RELPOS, dim=40),
    Case("head_dim_80_value_64", *RELPOS, dim=80, v_dim=64, length=40),
    Case("head_dim_128", *RELPOS, dim=128, length=40),
    Case("head_dim_256", *RELPOS, dim=256, length=40, batch=1),
    Case("gqa", *RELPOS_OF_FOUR_HEADS, heads=4, kv_heads=2),
    Case("gqa_one_kv_head", *RELPOS_OF_FOUR_HEADS, heads=4, kv_heads=1),
    Case("kv_batch_1", *RELPOS, kv_batch=1, mask=_causal),
    Case("transposed", *RELPOS, layout="transposed"),
    Case("expanded", *RELPOS, layout="expanded"),
    Case("causal", *IDENTITY, mask=_causal),
    Case("causal_small_blocks", *RELPOS, mask=_causal, block_size=32),
    Case(
        "window_reads_out_of_range",
        {"t": (H, 24)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q - k],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, (q - k).clamp(0, 23)],
        mask=_window,
    ),
    Case("empty_row", *RELPOS, mask=_nothing_for_row_5),
    Case("bfloat16", *RELPOS, dtype=torch.bfloat16),
    Case("float16", *RELPOS, dtype=torch.float16, mask=_causal),
]

#: Footprints of a captured tensor.
BIASES = [
    Case(
        "head_scale",
        {"t": (H,)},
        lambda t: lambda s, b, h, q, k: s * t["t"][h],
        lambda t: lambda s, b, h, q, k: s * t["t"][h],
    ),
    Case(
        "head_bias",
        {"t": (H,)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h],
        lambda t: lambda s, b, h, q, k: s + t["t"][h],
        zero=("t",),
    ),
    Case(
        "key_bias",
        {"t": (H, S)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k],
    ),
    Case(
        "query_scale",
        {"t": (H, S)},
        lambda t: lambda s, b, h, q, k: s * t["t"][h, q],
        lambda t: lambda s, b, h, q, k: s * t["t"][h, q],
    ),
    Case(
        "negative_index",
        {"t": (H, S)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, -1 - k],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, -1 - k],
    ),
    Case(
        "buckets",
        {"t": (16, H)},
        lambda t: lambda s, b, h, q, k: s + t["t"][_bucket(k - q), h],
        lambda t: lambda s, b, h, q, k: s + t["t"][_bucket(k - q), h],
    ),
    Case(
        "antidiagonal",
        {"t": (H, 2 * S)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q + k],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q + k],
    ),
    Case(
        "diagonals_merged",
        {"t": (2, 2 * S), "u": (2 * S,), "w": (H,)},
        lambda t: lambda s, b, h, q, k: s + t["t"][b, q - k + S] + t["u"][k - q + S].tanh() - t["w"][h] * t["u"][q - k + S],
        lambda t: lambda s, b, h, q, k: s + t["t"][b, q - k + S] + t["u"][k - q + S].tanh() - t["w"][h] * t["u"][q - k + S],
    ),
    Case(
        "row_and_column_gates",
        {"t": (H, S), "u": (2, S), "w": (S,)},
        lambda t: lambda s, b, h, q, k: s * t["t"][h, q].sigmoid() * t["w"][k // 2].exp() + t["u"][b, k] + t["w"][k],
        lambda t: lambda s, b, h, q, k: s * t["t"][h, q].sigmoid() * t["w"][k // 2].exp() + t["u"][b, k] + t["w"][k],
    ),
    Case(
        "pair",
        {"t": (H, S, S)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q, k],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q, k],
    ),
    Case(
        "pair_batch",
        {"t": (2, H, S, S)},
        lambda t: lambda s, b, h, q, k: s + t["t"][b, h, q, k],
        lambda t: lambda s, b, h, q, k: s + t["t"][b, h, q, k],
        mask=_causal,
    ),
    Case(
        "alibi",
        {"t": (H,)},
        lambda t: lambda s, b, h, q, k: s - torch.exp(t["t"][h]) * (q - k).abs(),
        lambda t: lambda s, b, h, q, k: s - torch.exp(t["t"][h]) * (q - k).abs(),
    ),
    Case(
        "softcap",
        {"t": (H,)},
        lambda t: lambda s, b, h, q, k: 5 * torch.tanh(s * t["t"][h] / 5),
        lambda t: lambda s, b, h, q, k: 5 * torch.tanh(s * t["t"][h] / 5),
    ),
    Case(
        "swin",
        {"t": (H, 17, 19)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q // 10 - k // 10 + 8, q % 10 - k % 10 + 9],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q // 10 - k // 10 + 8, q % 10 - k % 10 + 9],
    ),
    # Scores of a tile that share entries: one for each query or key, a few in the whole tile, or none.
    Case(
        "clamped_distance",
        {"a": (2, H, S, 16), "p": (2, H, S, 16)},
        lambda t: lambda s, b, h, q, k: s + t["a"][b, h, q, _clamped(q - k)] + t["p"][b, h, k, _clamped(q - k)],
        lambda t: lambda s, b, h, q, k: s + t["a"][b, h, q, _clamped(q - k)] + t["p"][b, h, k, _clamped(q - k)],
    ),
    Case(
        "packed_buckets",
        {"t": (16, H)},
        lambda t: lambda s, b, h, q, k: s + t["t"][_bucket(k % 30 - q % 30), h],
        lambda t: lambda s, b, h, q, k: s + t["t"][_bucket(k % 30 - q % 30), h],
        mask=lambda b, h, q, k: q // 30 == k // 30,
    ),
    Case(
        "segments",
        {"t": (3, H, 5, 2)},
        lambda t: lambda s, b, h, q, k: s + t["t"][k // 30, h, q // 20, 1],
        lambda t: lambda s, b, h, q, k: s + t["t"][k // 30, h, q // 20, 1],
    ),
    Case(
        "places_of_an_image",
        {"t": (H, 5, 127)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k // 64 - q // 64 + 2, q % 64 - k % 64 + 63],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k // 64 - q // 64 + 2, q % 64 - k % 64 + 63],
        length=150,
        kv_length=130,
    ),
    Case(
        "places_of_an_image_without_heads",
        {"t": (3 * 300,)},
        lambda t: lambda s, b, h, q, k: s + t["t"][(q // 128 - k // 128 + 1) * 300 + (q - q // 128 * 128) - k % 128 + 128],
        lambda t: lambda s, b, h, q, k: s + t["t"][(q // 128 - k // 128 + 1) * 300 + q % 128 - k % 128 + 128],
        mask=lambda b, h, q, k: (q >= k) | (q // 64 == k // 64 + 1),
        batch=1,
        length=200,
    ),
    Case(
        "rows_and_columns_of_an_image",
        {"y": (2, H, S, 5), "x": (2, H, S, 16)},
        lambda t: lambda s, b, h, q, k: s + t["y"][b, h, q, k // 16] + t["x"][b, h, q, k % 16],
        lambda t: lambda s, b, h, q, k: s + t["y"][b, h, q, k // 16] + t["x"][b, h, q, k % 16],
    ),
    Case(
        "very_many_entries",
        {"t": (H, 100, 100)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, (7 * q + k) % 100, (3 * k) % 100],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, (7 * q + k) % 100, (3 * k) % 100],
    ),
    Case(
        # The offsets of sums along the keys and along the queries have coordinates too.
        "sums_at_coordinates",
        {"t": (H, 5), "u": (16,), "w": (H, S, 5)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q // 16] * t["u"][k % 16] + t["w"][h, q, k // 16 % 5],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q // 16] * t["u"][k % 16] + t["w"][h, q, k // 16 % 5],
    ),
    Case(
        # score_mods:900157: one use of the table is hoisted, and the other has no gradient.
        "detached_in_one_of_two_reads",
        {"t": (H, 33)},
        lambda t: lambda s, b, h, q, k: s * (t["t"][h, k // 4] + t["t"][h, (q - k) * (q - k) % 33].detach()),
        lambda t: lambda s, b, h, q, k: s * (t["t"][h, k // 4] + t["t"][h, (q - k) * (q - k) % 33].detach()),
    ),
    # One writer for each element, although not every element has one.
    Case(
        "relative_shift",
        {"r": (2, H, S, 2 * S - 1)},
        lambda t: lambda s, b, h, q, k: s + t["r"][b, h, q, q - k + S - 1],
        lambda t: lambda s, b, h, q, k: s + t["r"][b, h, q, q - k + S - 1],
    ),
    Case(
        "relative_shift_of_keys",
        {"r": (2, H, 2 * S - 1, S)},
        lambda t: lambda s, b, h, q, k: s * t["r"][b, h, k - q, k],
        lambda t: lambda s, b, h, q, k: s * t["r"][b, h, k - q, k],
        mask=lambda b, h, q, k: (q - k).abs() < 20,
    ),
    Case(
        "larger_pair",
        {"t": (3, H, S + 9, S + 16)},
        lambda t: lambda s, b, h, q, k: s + t["t"][b, h, q, k],
        lambda t: lambda s, b, h, q, k: s + t["t"][b, h, q, k],
    ),
    Case(
        # Two keys share an element, since the size of the last dim is not that of the range of q - k.
        "relative_shift_that_wraps",
        {"r": (2, H, S, S + 3)},
        lambda t: lambda s, b, h, q, k: s + t["r"][b, h, q, (q - k) % (S + 3)] + t["r"][b, h, q, 0],
        lambda t: lambda s, b, h, q, k: s + t["r"][b, h, q, (q - k) % (S + 3)] + t["r"][b, h, q, 0],
    ),
    Case(
        "half_of_the_distance",
        {"r": (2, H, S, 2 * S)},
        lambda t: lambda s, b, h, q, k: s + t["r"][b, h, q, (2 * q - 2 * k) - (q - k)],
        lambda t: lambda s, b, h, q, k: s + t["r"][b, h, q, q - k],
    ),
    Case(
        # Outside of the mask the index is out of bounds, and there it is that of other entries.
        "shared_and_out_of_bounds",
        {"t": (H, 5)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, (q - 2 * k) // 16],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, ((q - 2 * k) // 16).clamp(-5, 4)],
        mask=lambda b, h, q, k: q >= 2 * k,
    ),
    Case(
        # Inductor pads strides above 1024 elements of buffers whose layout it may choose; an accumulator's is fixed.
        "odd_strides_above_1024",
        {"t": (H, 41, 41)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q // 2, k // 2],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q // 2, k // 2],
    ),
    Case(
        "value_out_of_bounds_is_not_written",
        {"t": (H, 8)},
        lambda t: lambda s, b, h, q, k: s + torch.where(k < 8, t["t"][h, torch.where(k < 8, k, 7)], 0.0),
        lambda t: lambda s, b, h, q, k: s + torch.where(k < 8, t["t"][h, torch.where(k < 8, k, 7)], 0.0),
    ),
]


def _document(t: dict[str, Tensor]) -> Callable[..., Tensor]:
    document = torch.arange(S, device=t["t"].device) // 30
    return lambda s, b, h, q, k: s + t["t"][h, document[q], document[k]]


#: What stock Inductor refuses (facts-flex.md, section 1), and the upstream reports.
REFUSED = [
    Case(
        "twice",
        {"t": (H, S)},
        lambda t: lambda s, b, h, q, k: s * t["t"][h, q] + t["t"][h, k],
        lambda t: lambda s, b, h, q, k: s * t["t"][h, q] + t["t"][h, k],
    ),
    Case(
        "thrice",
        {"t": (S,)},
        lambda t: lambda s, b, h, q, k: t["t"][0] * s * t["t"][q] + t["t"][k],
        lambda t: lambda s, b, h, q, k: t["t"][0] * s * t["t"][q] + t["t"][k],
    ),
    Case(
        "zero_dim_temperature",
        {"t": ()},
        lambda t: lambda s, b, h, q, k: s * t["t"],
        lambda t: lambda s, b, h, q, k: s * t["t"],
    ),
    Case(
        "zero_dim_and_bias",
        {"t": (), "u": (H, S)},
        lambda t: lambda s, b, h, q, k: s / (1 + t["t"] * t["t"]) + u(t)[h, k],
        lambda t: lambda s, b, h, q, k: s / (1 + t["t"] * t["t"]) + u(t)[h, k],
    ),
    Case(
        "nested_indexing",
        {"t": (S, 3)},
        lambda t: lambda s, b, h, q, k: s + t["t"][k][0],
        lambda t: lambda s, b, h, q, k: s + t["t"][k, 0],
    ),
    Case(
        "nested_four_deep",
        {"t": (2, H, S, S)},
        lambda t: lambda s, b, h, q, k: s + t["t"][b][h][q][k],
        lambda t: lambda s, b, h, q, k: s + t["t"][b, h, q, k],
    ),
    Case(
        "constant_indices",
        {"t": (3,)},
        lambda t: lambda s, b, h, q, k: s * t["t"][1] + t["t"][2] * (q - k) / 80,
        lambda t: lambda s, b, h, q, k: s * t["t"][1] + t["t"][2] * (q - k) / 80,
    ),
    Case(
        "constant_and_variable_index",
        {"t": (H, 3)},
        lambda t: lambda s, b, h, q, k: s * t["t"][h, 2],
        lambda t: lambda s, b, h, q, k: s * t["t"][h, 2],
    ),
    Case(
        "only_the_captured_tensor_needs_grad",
        {"t": (H, S)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k],
        inputs_need_grad=False,
    ),
    Case(
        "output_without_score",
        {"t": (H, S, S)},
        lambda t: lambda s, b, h, q, k: t["t"][h, q, k],
        lambda t: lambda s, b, h, q, k: t["t"][h, q, k],
    ),
    Case(
        "output_needs_no_grad",
        {"t": (H, S, S)},
        lambda t: lambda s, b, h, q, k: t["t"][h, q, k],
        lambda t: lambda s, b, h, q, k: t["t"][h, q, k],
        frozen=("t",),
    ),
    Case(
        "several_dtypes",
        {"t": (H, S), "u": (H, 2 * S), "f": (H,), "g": (S,)},
        lambda t: lambda s, b, h, q, k: s * t["f"][h] + t["t"][h, k] + t["u"][h, q - k + S] + t["g"][k],
        lambda t: lambda s, b, h, q, k: s * t["f"][h] + t["t"][h, k] + t["u"][h, q - k + S] + t["g"][k],
        frozen=("g",),
        dtypes={"t": torch.bfloat16, "f": torch.float16},
    ),
    Case(
        "expanded_view",
        {"t": (1, S)},
        lambda t: (lambda e: lambda s, b, h, q, k: s + e[h, k])(t["t"].expand(H, S)),
        lambda t: lambda s, b, h, q, k: s + t["t"][0, k],
    ),
    Case(
        "never_used",
        {"t": (H,), "u": (H, S)},
        lambda t: lambda s, b, h, q, k: (t["t"][h], s + t["u"][h, k])[1],
        lambda t: lambda s, b, h, q, k: s + t["u"][h, k],
    ),
    Case(
        "whole_table_transformed",
        {"t": (H, S)},
        lambda t: lambda s, b, h, q, k: s + torch.nn.functional.softplus(t["t"])[h, k],
        lambda t: lambda s, b, h, q, k: s + torch.nn.functional.softplus(t["t"])[h, k],
    ),
    Case("data_dependent_pair", {"t": (H, 3, 3)}, _document, _document),
]

LONGEST = 1000
#: For any length up to LONGEST, on a GPU.
LONG = [
    Case(
        "gqa_causal_relpos",
        {"t": (4, 2 * LONGEST)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q - k + LONGEST],
        lambda t: lambda s, b, h, q, k: s + t["t"][h, q - k + LONGEST],
        mask=_causal,
        heads=4,
        kv_heads=2,
    ),
    Case(
        "scale_and_key",
        {"t": (4,), "u": (4, LONGEST)},
        lambda t: lambda s, b, h, q, k: s * t["t"][h] + t["u"][h, k],
        lambda t: lambda s, b, h, q, k: s * t["t"][h] + t["u"][h, k],
        heads=4,
        layout="transposed",
    ),
]


def u(t: dict[str, Tensor]) -> Tensor:
    return t["u"]
