"""Functions for both lowerings of flex_attention: checks, template options, tile sizes, and block masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from ..core.fx import fake_tensor
from ..core.kernels import LARGEST_TILE, SUPPORTED_DTYPES, float32_precision, longest_tile, next_power_of_two
from ..core.report import user_line
from ..core.target import Target
from ..core.templates import Listed
from ..torch_api.config import uses_triton_on_cpu
from ..torch_api.higher_order import FlexBlockMask
from ..torch_api.lowering import V
from ..torch_api.sizes import FloorDiv, Mod, hint, known_at_most
from ..torch_api.template import SymbolicGridFn
from . import descriptor, kernel_dropout
from .calls import BackwardCall, ForwardCall

#: The sparse block size that flex_attention uses if there is no block mask.
NO_MASK_BLOCK_SIZE = 1 << 30
_FRONT_END_OPTIONS = ("BACKEND", "WRITE_DQ", "PRESCALE_QK", "BLOCKS_ARE_CONTIGUOUS", "IS_DIVISIBLE", "USE_TMA")
#: The lowering sets these options, so the entries of the user's kernel_options are not passed to the template.
_OUR_OPTIONS = ("ONE_PASS", "bwd_ONE_PASS", descriptor.OPTION, kernel_dropout.OPTION, kernel_dropout.SEED)
_OUR_OPTIONS += ("SLICES", "fwd_SLICES", "bwd_SLICES")


#: The advice for a score_mod or mask_mod for which there is no kernel.
ADVICE = "Index captured tensors with one scalar for each of their dims, or compute the expression outside the score_mod."


@SymbolicGridFn
def grid_of_queries(
    batch: Any, heads: Any, queries: Any, _dim: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]
) -> tuple:
    """Return the grid of the programs that own BLOCK_M queries of SLICES batch elements each."""
    return cdiv(queries, meta["BLOCK_M"]), cdiv(batch, meta["SLICES"]), heads


def why_stock(call: ForwardCall | BackwardCall) -> str | None:
    """Return the reason why a call goes to stock's lowering, or None if ours takes it."""
    device, kernel_options = call.query.get_device(), call.kernel_options
    if device.type != "cuda" and not (device.type == "cpu" and uses_triton_on_cpu()):
        return f"gradfuse has no attention kernel for the device {device.type!r}"
    if kernel_options.get("BACKEND", "AUTO") not in ("AUTO", "TRITON"):
        return f"kernel_options ask for BACKEND={kernel_options['BACKEND']!r}"
    dtypes = {x.get_dtype() for x in (call.query, call.key, call.value)}
    if len(dtypes) > 1 or not dtypes <= set(SUPPORTED_DTYPES):
        found, supported = (sorted(map(str, x)) for x in (dtypes, SUPPORTED_DTYPES))
        return f"query, key and value must have one dtype of {supported}, not {found}"
    return None


def not_scalar(module: torch.fx.GraphModule) -> str | None:
    """Return why a score_mod or mask_mod cannot be inlined, or None.

    The reason is the first op whose result is not a scalar, with the user's line.
    """
    for node in module.graph.nodes:
        value = fake_tensor(node)
        if node.op == "call_function" and value is not None and value.dim() > 0:
            what = f"it computes a tensor of shape {tuple(value.shape)} for every score ({node.target})"
            return f"{what} {user_line(node)}".strip()
    return None


def check_head_dims(query: Any, value: Any) -> None:
    """Raise the error that stock raises for head dims below 16, which tl.dot does not take."""
    dims = query.get_size()[-1], value.get_size()[-1]
    if any(V.graph.sizevars.evaluate_expr(sympy.Lt(d, 16)) for d in dims):
        raise NotImplementedError(
            f"NYI: embedding dimension of the query, key, and value must be at least 16 but got E={dims[0]} and Ev={dims[1]}"
        )


def _guarded(value: Any) -> Any:
    return V.graph.sizevars.guard_int(value) if isinstance(value, sympy.Expr) else value


def template_options(call: ForwardCall | BackwardCall) -> dict[str, Any]:
    """Return the options for both templates, from the operands and from the user's ``kernel_options``."""
    sizevars, block_mask = V.graph.sizevars, call.mask
    _, query_heads, query_length, qk_dim = call.query.get_size()
    _, kv_heads, key_length, v_dim = call.value.get_size()
    qk_dim, v_dim = sizevars.guard_int(qk_dim), sizevars.guard_int(v_dim)
    query_block, key_block = _guarded(block_mask.query_block_size), _guarded(block_mask.key_block_size)
    dense_queries = sizevars.evaluate_expr(sympy.Le(query_length, query_block))
    dense_keys = sizevars.evaluate_expr(sympy.Le(key_length, key_block))

    def even(length: Any, block: int, dense: bool) -> bool:
        whole = sizevars.statically_known_true(sympy.Eq(Mod(length, longest_tile(call.kernel_options)), 0))
        return whole and (dense or sizevars.statically_known_true(sympy.Eq(Mod(length, block), 0)))

    options = {k: _guarded(v) for k, v in call.kernel_options.items() if k not in _FRONT_END_OPTIONS + _OUR_OPTIONS}
    options.setdefault("ROWS_GUARANTEED_SAFE", False)
    options.setdefault("FLOAT32_PRECISION", float32_precision(Target.of(call.query.get_device())))
    return {
        **options,
        "SM_SCALE": call.scale,
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
    options: dict[str, Any], direction: str, configs: Sequence[Any], tiles: dict[str, str], largest: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield one set of template options for each config whose tiles divide the sparse blocks.

    ``direction`` is "fwd" or "bwd". Kernel options with that prefix take precedence, and those with the other prefix are
    dropped. ``tiles`` maps the template's tile names to the config's attributes; a name with M is a number of queries, and
    one with N a number of keys. Default tiles are made smaller to fit small sparse blocks and ``largest``, which
    are the largest numbers of queries ("M") and keys ("N"). Raises ValueError, as stock does, if nothing fits.
    """
    other = {"fwd": "bwd_", "bwd": "fwd_"}[direction]
    base = {k: v for k, v in options.items() if not k.startswith((f"{direction}_", other))}
    base.update({k[4:]: v for k, v in options.items() if k.startswith(f"{direction}_")})
    sparse = {"M": base["SPARSE_Q_BLOCK_SIZE"], "N": base["SPARSE_KV_BLOCK_SIZE"]}
    limits = {axis: min(_largest_divisor(block), largest[axis]) for axis, block in sparse.items()}
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


def largest_tile(call: ForwardCall | BackwardCall, limit: int) -> dict[str, int]:
    """Return the largest useful numbers of queries ("M") and keys ("N") in a tile: short sequences fill no larger one.

    limit: the largest numbers with which the kernel is right.
    """
    lengths = {"M": call.query.get_size()[2], "N": call.key.get_size()[2]}
    return {axis: min(_rounded(length), limit) for axis, length in lengths.items()}


#: Tiles of this length are in use for every head dim and dtype.
SHORT = 64


def in_tiles(call: ForwardCall | BackwardCall, number: int) -> bool:
    """Return whether queries and keys are known to fill at most this number of tiles each."""
    lengths = (call.query.get_size()[2], call.key.get_size()[2])
    return all(isinstance(n, (int, sympy.Integer)) and n <= number * SHORT for n in lengths)


#: The number of programs for each multiprocessor, where a program has several batch elements. With 3, 5 or 6 Swin's windows
#: take up to 40 % more time.
PROGRAMS = 4
#: The widest head of a program with several batch elements. Of wider ones nothing has been timed.
WIDEST_IN_SLICES = 32


def slices(call: ForwardCall | BackwardCall, nothing_hidden: bool) -> int:
    """Return the number of batch elements for one program.

    It is 1 unless queries and keys are in one tile each, so that a program would be short, and there are more batch elements
    and heads than a GPU computes at a time. Grouped heads have a loop of their own.
    """
    batch, heads, _, head_dim = call.query.get_size()
    head_dims = (head_dim, call.value.get_size()[3])
    if not all(isinstance(n, (int, sympy.Integer)) for n in (batch, heads, *head_dims)) or max(head_dims) > WIDEST_IN_SLICES:
        return 1
    if not (nothing_hidden and in_tiles(call, 1)) or heads != call.key.get_size()[1]:
        return 1
    return min(int(batch), -(-int(batch * heads) // (PROGRAMS * Target.of(call.query.get_device()).multiprocessors)))


def with_slices(
    call: ForwardCall | BackwardCall, tiled: dict[str, Any], tile: tuple[str, str], allowed: bool
) -> dict[str, Any]:
    """Return template options with one slice for each program unless all queries and keys are in a tile of this size."""
    lengths = call.query.get_size()[2], call.key.get_size()[2]
    fits = allowed and all(known_at_most(length, tiled[name]) for length, name in zip(lengths, tile, strict=True))
    return {**tiled, "SLICES": tiled["SLICES"] if fits else 1}


def _rounded(length: Any) -> int:
    known = isinstance(length, (int, sympy.Integer))
    return min(max(next_power_of_two(int(length)), 16), LARGEST_TILE) if known else LARGEST_TILE


def _largest_divisor(block: int) -> int:
    """Return the largest power of two that divides a sparse block size, but at least 16, which tl.dot needs."""
    return max(block & -block, 16)


@dataclass(frozen=True)
class MaskOperands:
    """The tensors of a block mask that a kernel reads: none if it hides nothing.

    names: those of the kernel's arguments, for example KV_NUM_BLOCKS and KV_BLOCKS. tensors: the operands of these.
    """

    names: tuple[str, ...]
    tensors: tuple[Any, ...]

    def options(self) -> dict[str, Any]:
        """Return the template options."""
        return {"MASK_ARGUMENTS": Listed(self.names), "NO_MASK": not self.names}

    def generators(self, first: int) -> dict[int, Any]:
        """Return functions that make representative tensors for autotuning. ``first``: the number of the first operand."""
        made = {}
        for i in range(0, len(self.tensors), 2):
            made[first + i] = _all_blocks(self.tensors[i + 1])
            made[first + i + 1] = _blocks_in_order
        return made


def mask_operands(mask: FlexBlockMask, sides: Sequence[str], nothing_hidden: bool) -> MaskOperands:
    """Return the operands for the rows ("KV") and the columns ("Q") of a block mask, as far as ``sides`` has them."""
    lists = {
        "KV": (mask.kv_num_blocks, mask.kv_indices),
        "FULL_KV": (mask.full_kv_num_blocks, mask.full_kv_indices),
        "Q": (mask.q_num_blocks, mask.q_indices),
        "FULL_Q": (mask.full_q_num_blocks, mask.full_q_indices),
    }
    kinds = [full + side for full in ("", "FULL_") for side in sides if lists[full + side][0] is not None]
    kinds = [] if nothing_hidden else kinds
    names = tuple(name for kind in kinds for name in (f"{kind}_NUM_BLOCKS", f"{kind}_BLOCKS"))
    return MaskOperands(names, tuple(tensor for kind in kinds for tensor in lists[kind]))


def _all_blocks(indices: Any) -> Any:
    """Return a function that makes a representative ``*_num_blocks`` tensor, in which every block is listed."""

    def generate(x: Any) -> torch.Tensor:
        size = [hint(s) for s in x.get_size()]
        return torch.full(size, hint(indices.get_size()[-1]), dtype=x.get_dtype(), device=x.get_device())

    return generate


def _blocks_in_order(x: Any) -> torch.Tensor:
    """Return a representative ``*_indices`` tensor, which lists the blocks in order."""
    size = [hint(s) for s in x.get_size()]
    return torch.arange(size[-1], dtype=x.get_dtype(), device=x.get_device()).expand(size).contiguous()
