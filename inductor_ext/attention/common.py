"""What the forward and the backward lowering of flex_attention share: shapes, kernel options, tile sizes, block masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch

from ..core.kernels import LARGEST_TILE, SUPPORTED_DTYPES, float32_precision, next_power_of_two
from ..core.report import user_line
from ..torch_api.config import uses_triton_on_cpu
from ..torch_api.higher_order import FlexBlockMask
from ..torch_api.lowering import V, empty
from ..torch_api.sizes import FloorDiv, Mod, hint
from .diagonals import ANTIDIAGONAL_OPTION, DIAGONAL_OPTION

#: The sparse block size that flex_attention makes up where there is no block mask.
NO_MASK_BLOCK_SIZE = 1 << 30
_FRONT_END_OPTIONS = ("BACKEND", "WRITE_DQ", "PRESCALE_QK", "BLOCKS_ARE_CONTIGUOUS", "IS_DIVISIBLE", "USE_TMA")
#: Decided by the lowering, whatever the user's kernel_options wish.
_OUR_OPTIONS = ("ONE_PASS", "bwd_ONE_PASS", DIAGONAL_OPTION, ANTIDIAGONAL_OPTION)


#: What a user can do about a score_mod or mask_mod that has no kernel.
ADVICE = "Index captured tensors with one scalar for each of their dims, or compute the expression outside the score_mod."


def why_stock(query: Any, key: Any, value: Any, kernel_options: dict[str, Any]) -> str | None:
    """Why these operands go to stock's lowering, or None where ours takes them."""
    device = query.get_device()
    if device.type != "cuda" and not (device.type == "cpu" and uses_triton_on_cpu()):
        return f"device {device.type!r} has no gradfuse kernel"
    if kernel_options.get("BACKEND", "AUTO") not in ("AUTO", "TRITON"):
        return f"kernel_options ask for BACKEND={kernel_options['BACKEND']!r}"
    dtypes = {x.get_dtype() for x in (query, key, value)}
    if len(dtypes) > 1 or not dtypes <= set(SUPPORTED_DTYPES):
        return f"dtypes {sorted(map(str, dtypes))}"
    return None


def not_scalar(module: torch.fx.GraphModule) -> str | None:
    """Why a score_mod or mask_mod cannot be inlined: the first op whose result is not a scalar, and the user's line."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.dim() > 0:
            what = f"it computes a tensor of shape {tuple(value.shape)} for every score ({node.target})"
            return f"{what} {user_line(node)}".strip()
    return None


def check_head_dims(query: Any, value: Any) -> None:
    """Raise, as stock does, for head dims under 16, which tl.dot does not take."""
    dims = query.get_size()[-1], value.get_size()[-1]
    if any(V.graph.sizevars.evaluate_expr(sympy.Lt(d, 16)) for d in dims):
        raise NotImplementedError(
            f"NYI: embedding dimension of the query, key, and value must be at least 16 but got E={dims[0]} and Ev={dims[1]}"
        )


def _guarded(value: Any) -> Any:
    return V.graph.sizevars.guard_int(value) if isinstance(value, sympy.Expr) else value


def template_options(
    query: Any, key: Any, value: Any, block_mask: FlexBlockMask, scale: float, kernel_options: dict[str, Any]
) -> dict[str, Any]:
    """The options that both templates take, from the operands and from the user's ``kernel_options``."""
    sizevars = V.graph.sizevars
    _, query_heads, query_length, qk_dim = query.get_size()
    _, kv_heads, key_length, v_dim = value.get_size()
    qk_dim, v_dim = sizevars.guard_int(qk_dim), sizevars.guard_int(v_dim)
    query_block, key_block = _guarded(block_mask.query_block_size), _guarded(block_mask.key_block_size)
    dense_queries = sizevars.evaluate_expr(sympy.Le(query_length, query_block))
    dense_keys = sizevars.evaluate_expr(sympy.Le(key_length, key_block))

    def even(length: Any, block: int, dense: bool) -> bool:
        whole = sizevars.statically_known_true(sympy.Eq(Mod(length, LARGEST_TILE), 0))
        return whole and (dense or sizevars.statically_known_true(sympy.Eq(Mod(length, block), 0)))

    options = {k: _guarded(v) for k, v in kernel_options.items() if k not in _FRONT_END_OPTIONS + _OUR_OPTIONS}
    options.setdefault("ROWS_GUARANTEED_SAFE", False)
    options.setdefault("FLOAT32_PRECISION", float32_precision())
    return {
        **options,
        "SM_SCALE": scale,
        "GQA_SHARED_HEADS": sizevars.guard_int(FloorDiv(query_heads, kv_heads)),
        "HAS_FULL_BLOCKS": block_mask.full_kv_num_blocks is not None,
        "DENSE": dense_queries and dense_keys,
        "Q_EVEN": even(query_length, query_block, dense_queries),
        "KV_EVEN": even(key_length, key_block, dense_keys),
        "SPARSE_Q_BLOCK_SIZE": query_block,
        "SPARSE_KV_BLOCK_SIZE": key_block,
        "QK_HEAD_DIM": qk_dim,
        "QK_HEAD_DIM_ROUNDED": next_power_of_two(qk_dim),
        "V_HEAD_DIM": v_dim,
        "V_HEAD_DIM_ROUNDED": next_power_of_two(v_dim),
        "SAFE_HEAD_DIM": next_power_of_two(qk_dim) == qk_dim and next_power_of_two(v_dim) == v_dim,
    }


def tile_choices(
    options: dict[str, Any], direction: str, configs: Sequence[Any], tiles: dict[str, str], tallest: int = LARGEST_TILE
) -> Iterator[dict[str, Any]]:
    """One set of template options for each config whose tiles divide the sparse blocks.

    ``direction`` is "fwd" or "bwd": kernel options with that prefix win, those with the other are dropped. ``tiles`` maps
    the template's tile names to the config's attributes; a name with M tiles queries, one with N keys. Default tiles
    shrink to fit small sparse blocks, and to ``tallest`` queries. Raises ValueError, as stock does, when nothing fits.
    """
    other = {"fwd": "bwd_", "bwd": "fwd_"}[direction]
    base = {k: v for k, v in options.items() if not k.startswith((f"{direction}_", other))}
    base.update({k[4:]: v for k, v in options.items() if k.startswith(f"{direction}_")})
    sparse = {"M": base["SPARSE_Q_BLOCK_SIZE"], "N": base["SPARSE_KV_BLOCK_SIZE"]}
    limits = {axis: _largest_divisor(block) for axis, block in sparse.items()}
    limits["M"] = min(limits["M"], tallest)
    wanted: dict[str, int] = {}
    found = False
    for config in configs:
        wanted = {
            name: base.get(name) or min(getattr(config, attribute), limits[name.split("_")[1][0]])
            for name, attribute in tiles.items()
        }
        if any(sparse[name.split("_")[1][0]] % size for name, size in wanted.items()):
            continue
        found = True
        yield {
            **base,
            **wanted,
            "num_warps": base.get("num_warps", config.num_warps),
            "num_stages": base.get("num_stages", config.num_stages),
        }
    if not found:
        raise ValueError(
            f"Q and KV block size must be divisible by {' and '.join(wanted)}. We got Q_BLOCK_SIZE={sparse['M']} and "
            f"KV_BLOCK_SIZE={sparse['N']} with {wanted}; pass other tile sizes in kernel_options."
        )


def _largest_divisor(block: int) -> int:
    """The largest power of two that divides a sparse block size (at least 16, which tl.dot needs)."""
    return max(block & -block, 16)


def extents(node: torch.fx.Node) -> list[Any]:
    """The lengths of the ranges of b, h, q and k for a flex_attention node (forward or backward)."""
    query, key = (node.args[i].meta["val"] for i in (0, 1))
    return [query.shape[0], query.shape[1], query.shape[2], key.shape[2]]


def is_unmasked(block_mask: FlexBlockMask) -> bool:
    """Whether there is no block mask at all, so that every tile is visited."""
    sizes = (block_mask.query_block_size, block_mask.key_block_size)
    return all(isinstance(n, int) and n >= NO_MASK_BLOCK_SIZE for n in sizes)


def num_blocks_for_autotuning(indices: Any) -> Any:
    """A generator of a representative ``*_num_blocks`` tensor: every block listed."""

    def generate(x: Any) -> torch.Tensor:
        size = [hint(s) for s in x.get_size()]
        return torch.full(size, hint(indices.get_size()[-1]), dtype=x.get_dtype(), device=x.get_device())

    return generate


def indices_for_autotuning(x: Any) -> torch.Tensor:
    """A representative ``*_indices`` tensor: blocks in order."""
    size = [hint(s) for s in x.get_size()]
    return torch.arange(size[-1], dtype=x.get_dtype(), device=x.get_device()).expand(size).contiguous()


def full_block_lists(block_mask: FlexBlockMask, device: torch.device) -> list[Any]:
    """The four full-block operands, or four empty ones where the mask has none (the templates then do not read them)."""
    lists = [
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        block_mask.full_q_num_blocks,
        block_mask.full_q_indices,
    ]
    return [empty(0, device=device) for _ in lists] if lists[0] is None else lists
