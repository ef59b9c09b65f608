"""The chunkwise form of mLSTM: its cost is linear in the length.

The length is cut into chunks. Within a chunk the rows meet the columns in tiles, as in the parallel form. All the columns
of earlier chunks act on a row through one matrix, and all the rows of later chunks on a column through another. With ``r_c``
the maximum M at the last position before chunk c,

    before_c = sum_{s before chunk c} exp(g_s - r_c)           k_s (v_s, 1)^T        [D, Dv + 1]
    after_c  = sum_{t after chunk c}  exp(r_{c+1} - log_row_t) q_t (grad_t, term_t)^T   [D, Dv + 1]

A row t of chunk c gets ``scale exp(r_c - M_t) q_t before_c`` of the sums over its columns. Since M never decreases, no
exponent is positive. Each of the two is a linear recurrence over the chunks, of sums that are taken in parallel.

The gradient of the log weights is needed as a sum over all pairs of a row and a column with a given position between them.
Where the position is the start of chunk c + 1, the pairs from before chunk c to after it give
``scale exp(r_c - r_{c+1}) <before_c, after_c>``. So no sum runs over more than a chunk, and errors do not add up over the
length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.fx import working_dtype
from ..core.linear_scan import linear_scan
from ..core.target import Target

#: The number of positions in a chunk. Tiles divide it.
CHUNK = 128
#: Larger than any gate.
LARGE = 1e30
#: The widest head of queries, keys or values. The kernels of wider ones spill registers (built for sm_90).
WIDEST = {torch.float32: 64, torch.bfloat16: 128}
#: The fewest positions for which the chunkwise form is used. The kernels have not been timed on a GPU yet.
FEWEST_POSITIONS: int | None = None


def chunk_size(query: Tensor, value: Tensor) -> int:
    """The number of positions in a chunk for a query [B, N, S, D] and a value [B, N, S, Dv], or 0 for the parallel form.

    The sums in a state may be larger than float16 can hold.
    """
    fits = max(query.shape[-1], value.shape[-1]) <= WIDEST.get(query.dtype, 0)
    if FEWEST_POSITIONS is None or not fits or not Target.of(query.device).triton:
        return 0
    return CHUNK if query.shape[2] >= FEWEST_POSITIONS else 0


def count(length: int, chunk: int) -> int:
    """The number of chunks."""
    return (length + chunk - 1) // chunk


def references(log_max: Tensor, chunk: int) -> Tensor:
    """``r`` [B, N, chunks + 1] for M [B, N, S].

    Nothing is before the first chunk, and r_0 is the first M, so that no exponent is positive. M is -inf where every gate so
    far is. There r is finite, so that whatever it weighs gets the weight 0.
    """
    length = log_max.shape[2]
    edges = torch.arange(0, count(length, chunk) + 1, device=log_max.device) * chunk - 1
    return log_max[..., edges.clamp(min=0, max=length - 1)].clamp(min=-LARGE)


def states(
    left: Tensor, right: Tensor, column: Tensor | None, log_weight: Tensor, reference: Tensor, chunk: int, after: bool
) -> Tensor:
    """``before`` or, with ``after`` set, ``after``: [B, N, chunks, D * (Dv + 1)] in fp32 (float64 for float64).

    left: k or q. right: v or grad. column: the last column, ones if None. log_weight: g or -log_row. reference: ``r`` or -r.
    A state is the matrix [D, Dv], and then the vector [D].
    """
    sums = mlstm_chunk_sums(left, right, column, log_weight, reference, chunk, after)
    decay = (reference[..., :-2] - reference[..., 1:-1]) if not after else (reference[..., 2:] - reference[..., 1:-1])
    decay = decay.exp().to(sums.dtype).flatten(0, 1)[..., None].expand(-1, -1, sums.shape[-1])
    flat = sums.flatten(0, 1)
    return linear_scan(decay, flat, list(sums.shape), 2, after, sums.dtype) if flat.shape[1] > 1 else sums


def parts(states: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The matrices [..., D, width] and the vectors [..., D] of states [..., D * (width + 1)]."""
    rows = states.shape[-1] // (width + 1)
    return states[..., : rows * width].unflatten(-1, (rows, width)), states[..., rows * width :]


def across(before: Tensor, after: Tensor, reference: Tensor, scale: float) -> Tensor:
    """The sums of the gradient of log C over all rows after a chunk and all columns before it: [B, N, chunks]."""
    return scale * (reference[..., :-1] - reference[..., 1:]).exp().to(before.dtype) * (before * after).sum(-1)


def sums_across_positions(of_rows: Tensor, of_columns: Tensor, of_later: Tensor, across: Tensor, chunk: int) -> Tensor:
    """For every position, the sum of the gradient of log C over rows from there on and columns before it, in float64.

    of_rows: the sums over all columns of each row. of_columns: those over the rows in the same chunk of each column.
    of_later: those over the rows of later chunks. All are [B, N, S]. across: as ``across`` returns it.
    """
    length = of_rows.shape[2]
    padding = (0, count(length, chunk) * chunk - length)
    from_here, to_later = (
        F.pad(x, padding).unflatten(-1, (-1, chunk)) for x in (of_rows.double() - of_columns, of_later.double())
    )
    within = from_here.flip(-1).cumsum(-1).flip(-1) + to_later.cumsum(-1) - to_later + across[..., None]
    return within.flatten(-2)[..., :length]


@torch.library.custom_op("gradfuse::mlstm_chunk_sums", mutates_args=())
def mlstm_chunk_sums(
    left: Tensor, right: Tensor, column: Tensor | None, log_weight: Tensor, reference: Tensor, chunk: int, after: bool
) -> Tensor:
    """What each chunk adds to the state of its neighbour, [B, N, chunks, D * (Dv + 1)]; operands as in ``states``.

    The sum over chunk c, with the weights ``exp(log_weight - reference_{c+1})``, is at c + 1, and the first is zero. With
    ``after`` set, the sum with the weights ``exp(log_weight - reference_c)`` is at c - 1, and the last is zero.
    """
    kind = working_dtype(left.dtype)
    batch, heads, length, width = left.shape
    chunks = count(length, chunk)
    out = torch.zeros(batch, heads, chunks, width * (right.shape[-1] + 1), dtype=kind, device=left.device)
    for c in range(1, chunks) if after else range(chunks - 1):
        at = slice(c * chunk, min((c + 1) * chunk, length))
        edge = reference[..., c if after else c + 1, None]
        weighted = left[:, :, at].to(kind) * torch.exp(log_weight[..., at] - edge).to(kind)[..., None]
        ones = torch.ones_like(weighted[..., 0]) if column is None else column[..., at].to(kind)
        matrix = weighted.mT @ right[:, :, at].to(kind)
        vector = (weighted * ones[..., None]).sum(2)
        out[:, :, c - 1 if after else c + 1] = torch.cat([matrix.flatten(2), vector], -1)
    return out


@mlstm_chunk_sums.register_fake
def _(
    left: Tensor, right: Tensor, column: Tensor | None, log_weight: Tensor, reference: Tensor, chunk: int, after: bool
) -> Tensor:
    batch, heads, length, width = left.shape
    size = (batch, heads, count(length, chunk), width * (right.shape[-1] + 1))
    return left.new_empty(size, dtype=working_dtype(left.dtype))
