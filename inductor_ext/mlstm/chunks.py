"""The chunkwise form of mLSTM: its cost is linear in the length.

The length is cut into chunks. Within a chunk the rows meet the columns in tiles, as in the parallel form. All the columns
of earlier chunks act on a row through one matrix, and all the rows of later chunks on a column through another. Edge e is
the one before chunk e, and the last edge is the end. With ``r_e`` the maximum M at the last position before edge e,

    before_e = sum_{s before edge e} exp(g_s - r_e)       k_s (v_s, 1)^T        [D, Dv + 1]
    after_e  = sum_{t after edge e}  exp(r_e - log_row_t) q_t (grad_t, term_t)^T   [D, Dv + 1]

A row t of chunk c gets ``scale exp(r_c - M_t) q_t before_c`` of the sums over its columns. Since M never decreases, no
exponent is positive. Each of the two is a linear recurrence over the edges, of sums that are taken in parallel.

The state of the cell (C, n, m) before a sequence is ``before_0``, with r_0 = m, and the state after it is ``before`` at the
last edge, with m = r + F there. So a sequence may begin with the state in which another has ended. The gradient of the last
state, divided by scale, is ``after`` at the last edge, and ``scale after_0`` is the gradient of the first.

The gradient of the log weights is needed as a sum over all pairs of a row and a column with a given position between them.
Where the position is in chunk c, the pairs from before chunk c to after it give
``scale exp(r_c - r_{c+1}) <before_c, after_{c+1}>``. So no sum runs over more than a chunk, and errors do not add up over
the length.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.fx import working_dtype
from ..core.linear_scan import linear_scan
from ..core.target import Target

#: The number of positions in a chunk, of kernels and elsewhere. The tiles of kernels divide it.
CHUNK_IN_KERNELS, CHUNK = 256, 128
#: Larger than any gate.
LARGE = 1e30
#: The widest head of queries, keys or values in the kernels, and where the backward of 256 would spill 450 bytes (built for
#: sm_80 and sm_120).
WIDEST = {torch.float32: 64, torch.bfloat16: 256}
WIDEST_ELSEWHERE = {torch.float32: 64, torch.bfloat16: 128}
#: GPUs use the chunkwise form for sequences of at least FEWEST_POSITIONS, if all heads of all sequences together have at
#: least FEWEST_ROWS rows. With fewer, its thirteen more launches take longer than it saves (docs/notes/mlstm.md). The rows
#: of heads wider than WIDTH count for more, because the parallel form takes longer for each. Both directions have the same
#: form, because the backward has the states from the forward.
FEWEST_POSITIONS, FEWEST_ROWS, WIDTH = 4096, 65536, 128
#: CPUs use it from the larger of two lengths on: FEWEST_ON_CPU, and FEWEST_FOR_WIDTH_ON_CPU times the width of the widest
#: head, because a state has as many elements as the square of the width.
FEWEST_ON_CPU, FEWEST_FOR_WIDTH_ON_CPU = 512, 4


def chunk_size(query: Tensor, value: Tensor, with_states: bool = False) -> int:
    """The number of positions in a chunk for a query [B, N, S, D] and a value [B, N, S, Dv], or 0 for the parallel form.

    with_states: whether a state is given or wanted, for which there is no parallel form.
    """
    batch, heads, length, _ = query.shape
    widths = (query.shape[-1], value.shape[-1])
    runs_kernels = Target.of(query.device).triton
    has_kernels = runs_kernels and fits(query.device, query.dtype, *widths)
    if with_states:
        if has_kernels:
            return CHUNK_IN_KERNELS
        return min(CHUNK, length) if isinstance(length, int) else CHUNK
    if not runs_kernels:
        return CHUNK if length >= max(FEWEST_ON_CPU, FEWEST_FOR_WIDTH_ON_CPU * max(widths)) else 0
    rows = batch * heads * length * max(*widths, WIDTH) // WIDTH
    long = has_kernels and length >= FEWEST_POSITIONS and rows >= FEWEST_ROWS
    return CHUNK_IN_KERNELS if long else 0


def fits(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether the kernels take heads of these widths in chunks. The sums in a state may be larger than float16 can hold."""
    widest = WIDEST if Target.of(device).family in ("hopper", "blackwell") else WIDEST_ELSEWHERE
    return max(widths) <= widest.get(dtype, 0)


def count(length: int, chunk: int) -> int:
    """The number of chunks."""
    return (length + chunk - 1) // chunk


def cut(x: Tensor, chunk: int, padding: float = 0.0) -> Tensor:
    """``x`` [B, N, S, ...] in chunks: [B, N, chunks, chunk, ...]. What is past the end is ``padding``."""
    # The padding is never empty, whatever a symbolic length is.
    padded = F.pad(x, [0, 0] * (x.dim() - 3) + [0, chunk], value=padding)
    return padded[:, :, : count(x.shape[2], chunk) * chunk].unflatten(2, (-1, chunk))


def join(x: Tensor, length: int) -> Tensor:
    """The inverse of ``cut``."""
    return x.flatten(2, 3)[:, :, :length].contiguous()


def references(log_max: Tensor, chunk: int, first: Tensor | None = None) -> Tensor:
    """``r`` [B, N, chunks + 1] for M [B, N, S]. first: m of the first state [B, N], if there is one.

    Without a first state nothing is before the first chunk, and r_0 is the first M, so that no exponent is positive. M is
    -inf where every gate so far is. There r is finite, so that whatever it weighs gets the weight 0.
    """
    first = log_max[..., 0] if first is None else first
    # M never decreases, so that its last value in a chunk is the largest. (An index that is clamped to the length would say
    # it, too, but Inductor 2.11 cannot fuse a loop with such an index on a GPU.)
    last = cut(log_max, chunk, -torch.inf).amax(-1)
    return torch.cat([first[..., None], last], -1).clamp(min=-LARGE)


def states(
    left: Tensor,
    right: Tensor,
    column: Tensor | None,
    log_weight: Tensor,
    reference: Tensor,
    outer: Tensor | None,
    chunk: int,
    after: bool,
) -> Tensor:
    """``before`` or, with ``after`` set, ``after``: [B, N, chunks + 1, D * (Dv + 1)] in fp32 (float64 for float64).

    left: k or q. right: v or grad. column: the last column, ones if None. log_weight: g or -log_row. reference: ``r`` or -r.
    outer: the state at the edge from which the recurrence starts, [B, N, D * (Dv + 1)]; zeros if None. A state is the matrix
    [D, Dv], and then the vector [D].
    """
    sums = mlstm_chunk_sums(left, right, column, log_weight, reference, outer, chunk, after)
    decay = (reference[..., :-1] - reference[..., 1:]) * (-1 if after else 1)
    decay = decay.exp().to(sums.dtype).flatten(0, 1)[..., None].expand(-1, -1, sums.shape[-1])
    return linear_scan(decay, sums.flatten(0, 1), list(sums.shape), 2, after, sums.dtype)


def pack(matrix: Tensor, vector: Tensor, dtype: torch.dtype) -> Tensor:
    """The state [..., D * (Dv + 1)] of a matrix [..., D, Dv] and a vector [..., D]."""
    return torch.cat([matrix.to(dtype).flatten(-2), vector.to(dtype)], -1)


def parts(states: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The matrices [..., D, width] and the vectors [..., D] of states [..., D * (width + 1)]."""
    rows = states.shape[-1] // (width + 1)
    return states[..., : rows * width].unflatten(-1, (rows, width)), states[..., rows * width :]


def across(before: Tensor, after: Tensor, reference: Tensor, scale: float) -> Tensor:
    """The sums of the gradient of log C over all rows after a chunk and all columns before it: [B, N, chunks]."""
    decay = (reference[..., :-1] - reference[..., 1:]).exp().to(before.dtype)
    return scale * decay * (before[:, :, :-1] * after[:, :, 1:]).sum(-1)


def sums_across_positions(of_rows: Tensor, of_columns: Tensor, of_later: Tensor, across: Tensor, chunk: int) -> Tensor:
    """For every position, the sum of the gradient of log C over rows from there on and columns before it, in float64.

    of_rows: the sums over all columns of each row. of_columns: those over the rows in the same chunk of each column.
    of_later: those over the rows of later chunks. All are [B, N, S]. across: as ``across`` returns it.
    """
    from_here, to_later = (cut(x, chunk) for x in (of_rows.double() - of_columns, of_later.double()))
    within = from_here.flip(-1).cumsum(-1).flip(-1) + to_later.cumsum(-1) - to_later + across[..., None]
    return join(within, of_rows.shape[2])


@torch.library.custom_op("gradfuse::mlstm_chunk_sums", mutates_args=())
def mlstm_chunk_sums(
    left: Tensor,
    right: Tensor,
    column: Tensor | None,
    log_weight: Tensor,
    reference: Tensor,
    outer: Tensor | None,
    chunk: int,
    after: bool,
) -> Tensor:
    """What each chunk adds to the state at its next edge, [B, N, chunks + 1, D * (Dv + 1)]; operands as in ``states``.

    The sum over chunk c, with the weights ``exp(log_weight - reference_{c+1})``, is at edge c + 1, and ``outer`` is at edge
    0. With ``after`` set, the sum with the weights ``exp(log_weight - reference_c)`` is at edge c, and ``outer`` is at the
    last edge.
    """
    kind = working_dtype(left.dtype)
    edges = (reference[..., :-1] if after else reference[..., 1:])[..., None]
    weights = torch.exp(cut(log_weight, chunk, -2 * LARGE) - edges).to(kind)
    weighted = cut(left.to(kind), chunk) * weights[..., None]
    ones = weighted if column is None else weighted * cut(column.to(kind), chunk)[..., None]
    sums = pack(weighted.mT @ cut(right.to(kind), chunk), ones.sum(-2), kind)
    outer = torch.zeros_like(sums[:, :, 0]) if outer is None else outer.to(kind)
    return torch.cat([sums, outer[:, :, None]] if after else [outer[:, :, None], sums], 2)


@mlstm_chunk_sums.register_fake
def _(left: Tensor, right: Tensor, column: Any, log_weight: Any, reference: Tensor, *_: Any) -> Tensor:
    size = (*reference.shape, left.shape[-1] * (right.shape[-1] + 1))
    return left.new_empty(size, dtype=working_dtype(left.dtype))
