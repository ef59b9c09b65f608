"""Attention with learned biases as models spell it. The models are named; the sizes are small."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

B, H, S, D = 2, 3, 32, 16
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Spelling:
    """function: of the tensors in ``shapes`` (learned ones by shape). reads: a part of what the report says of its score_mod."""

    function: Callable[..., torch.Tensor]
    shapes: tuple[Any, ...]
    reads: str = ""

    def inputs(self):
        generator = torch.Generator().manual_seed(0)
        make = lambda shape: torch.randn(shape, generator=generator, requires_grad=True)  # noqa: E731
        return [x if isinstance(x, torch.Tensor) else make(x) for x in self.shapes]


HEADS = ((B, H, S, D),) * 3


def padding(rows=()):
    """Keys that exist: the last ones of the first sequence do not, nor any key of the sequences ``rows``."""
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[0, 20:] = False
    mask[list(rows)] = False
    return mask


def relative_position_index(window):
    """The index buffer of Swin."""
    rows, columns = (torch.arange(window * window) // window, torch.arange(window * window) % window)
    dy, dx = (x[:, None] - x[None, :] + window - 1 for x in (rows, columns))
    return dy * (2 * window - 1) + dx


def t5_bias(table):
    position = torch.arange(S)
    relative = position[None, :] - position[:, None]
    bucket = 0 + (relative > 0).to(torch.long) * 4
    distance = relative.abs()
    small = distance < 2
    large = 2 + (torch.log(distance.float() / 2) / math.log(8) * 2).to(torch.long)
    large = torch.min(large, torch.full_like(large, 3))
    bucket += torch.where(small, distance, large)
    return F.embedding(bucket, table).permute(2, 0, 1).unsqueeze(0)


def t5_eager(q, k, v, table, exists):
    mask = torch.where(exists[:, None, None, :].expand(B, 1, S, S), torch.zeros(()), LOWEST)
    scores = torch.matmul(q, k.transpose(2, 3)) * 1.0
    scores = scores + t5_bias(table)
    scores = scores + mask
    probabilities = F.dropout(F.softmax(scores, -1), p=0.0, training=True)
    return torch.matmul(probabilities, v).transpose(1, 2).contiguous().reshape(B, S, -1).contiguous()


def t5_sdpa(q, k, v, table, exists):
    """Two layers that share the bias."""
    bias = t5_bias(table)
    for _ in range(2):
        mask = torch.where(exists[:, None, None, :].expand(B, 1, S, S), bias, LOWEST).contiguous()
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    return q


def t5_decoder(q, k, v, table):
    position = torch.arange(S)
    causal = torch.ge(position[:, None], position[None, :]).view(1, 1, S, S)
    mask = torch.where(causal, t5_bias(table), LOWEST)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)


def mpnet(q, k, v, table, exists):
    bias = t5_bias(table).expand(B, -1, S, S).contiguous()
    scores = torch.matmul(q, k.transpose(-1, -2)) / 4.0
    scores += bias
    scores = scores + torch.where(exists[:, None, None, :], 0.0, LOWEST)
    return (F.softmax(scores, dim=-1) @ v).permute(0, 2, 1, 3).contiguous().view(B, S, H * D)


WINDOW = 7
NW = 4
WINDOWS = ((B * NW, H, WINDOW * WINDOW, D),) * 3
TABLE = ((2 * WINDOW - 1) ** 2, H)


def shifted_mask(region):
    mask = region.unsqueeze(1) - region.unsqueeze(2)
    return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)


def swin(q, k, v, table, index):
    n = WINDOW * WINDOW
    bias = table[index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.25)


def swin_shifted(q, k, v, table, index, region):
    n = WINDOW * WINDOW
    bias = table[index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
    mask = shifted_mask(region).unsqueeze(1).unsqueeze(0).expand(B, -1, -1, -1, -1).reshape(-1, 1, n, n)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias + mask)


def swin_v2(q, k, v, logit_scale, table, index, region):
    n = WINDOW * WINDOW
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    scores = scores * torch.clamp(logit_scale, max=math.log(100.0)).exp()
    bias = 16 * torch.sigmoid(table[index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous())
    scores = scores + bias.unsqueeze(0)
    mask = shifted_mask(region)
    scores = scores.view(B, NW, H, n, n) + mask.unsqueeze(1).unsqueeze(0)
    scores = scores + mask.unsqueeze(1).unsqueeze(0)
    probabilities = F.dropout(F.softmax(scores.view(-1, H, n, n), dim=-1), 0.0, True, False)
    return (probabilities @ v).permute(0, 2, 1, 3).contiguous().view(B * NW, n, -1)


def beit(q, k, v, table):
    """The index is written by assignment, with three special entries for the class token."""
    w = 5
    grid = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")).flatten(1)
    relative = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0).contiguous()
    relative[:, :, 0] += w - 1
    relative[:, :, 1] += w - 1
    relative[:, :, 0] *= 2 * w - 1
    index = torch.zeros((w * w + 1, w * w + 1), dtype=torch.int64)
    index[1:, 1:] = relative.sum(-1)
    index[0, 0:] = 81
    index[0:, 0] = 82
    index[0, 0] = 83
    bias = table[index.view(-1)].view(26, 26, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=0.0, scale=0.25)


SIDE = 8
IMAGE = ((B * H, SIDE * SIDE, D),) * 3 + ((2 * SIDE - 1, D),) * 2


def decomposed(q, rows, columns):
    i = torch.arange(SIDE)
    relative = ((i[:, None] * 1.0 - i[None, :] * 1.0) + (SIDE - 1.0)).long()
    grid = q.reshape(B * H, SIDE, SIDE, D)
    by_row = torch.einsum("bhwc,hkc->bhwk", grid, rows[relative])
    return by_row, torch.einsum("bhwc,wkc->bhwk", grid, columns[relative])


def sam(q, k, v, rows, columns):
    n = SIDE * SIDE
    by_row, by_column = decomposed(q, rows, columns)
    bias = (by_row[:, :, :, :, None] + by_column[:, :, :, None, :]).reshape(B, H, n, n)
    q, k, v = (x.view(B, H, n, -1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def vitdet(q, k, v, rows, columns):
    n = SIDE * SIDE
    by_row, by_column = decomposed(q, rows, columns)
    scores = (q * 0.25) @ k.transpose(-2, -1)
    scores = scores.view(B * H, *(SIDE,) * 4) + by_row[:, :, :, :, None] + by_column[:, :, :, None, :]
    probabilities = F.softmax(scores.view(B * H, n, n), dtype=torch.float32, dim=-1).to(q.dtype)
    return (probabilities @ v).view(B, H, n, -1).permute(0, 2, 1, 3).reshape(B, n, -1)


def sam_eager(q, k, v, rows, columns):
    """The bias takes the shape of the scores, of which nothing but that is read."""
    by_row, by_column = decomposed(q, rows, columns)
    scores = (q * 0.25) @ k.transpose(-2, -1)
    bias = (by_row[:, :, :, :, None] + by_column[:, :, :, None, :]).reshape_as(scores)
    bias = bias + 0.5 * torch.ones_like(scores)
    probabilities = F.softmax(scores + bias, dtype=torch.float32, dim=-1).to(q.dtype)
    return F.dropout(probabilities, p=0.0, training=True) @ v


def conformer(q, k, v, positions, u, w):
    """The relative shift: pad, view as another matrix, and cut off a row."""
    shifted = torch.matmul(q + w[None, :, None, :], positions)
    shifted = F.pad(shifted, (1, 0)).view(B, H, 2 * S, S)[..., 1:, :].view(B, H, S, 2 * S - 1)[..., :S] * 0.25
    return F.scaled_dot_product_attention(q + u[None, :, None, :], k, v, attn_mask=shifted, scale=0.25)


def xlnet(q, k, r, v, r_w, r_r):
    content = torch.einsum("ibnd,jbnd->bnij", q + r_w, k)
    position = torch.einsum("ibnd,jbnd->bnij", q + r_r, r)
    b, n, i, j = position.shape
    position = position.reshape(b, n, j, i)[:, :, 1:, :].reshape(b, n, i, j - 1)
    position = torch.index_select(position, 3, torch.arange(S))
    return torch.einsum("bnij,jbnd->ibnd", F.softmax((content + position) * 0.25, dim=3), v)


def deberta(q, k, v, keys, queries, exists):
    n, span = B * H, 8
    i = torch.arange(S)
    relative = (i[:, None] - i[None, :]).unsqueeze(0)
    scores = torch.bmm(q, k.transpose(-1, -2) / torch.sqrt(torch.tensor(D, dtype=torch.float32) * 3).to(q.dtype))
    c2p = torch.bmm(q, keys.repeat(B, 1, 1).transpose(-1, -2))
    index = torch.clamp(relative + span, 0, 2 * span - 1).squeeze(0).expand(n, S, S)
    total = 0 + torch.gather(c2p, -1, index) / math.sqrt(D * 3)
    p2c = torch.bmm(k, queries.repeat(B, 1, 1).transpose(-1, -2))
    index = torch.clamp(-relative + span, 0, 2 * span - 1).squeeze(0).expand(n, S, S)
    total += torch.gather(p2c, -1, index).transpose(-1, -2) / math.sqrt(D * 3)
    scores = (scores + total).view(-1, H, S, S)
    # A padded query is a row that is masked as a whole.
    both = exists[:, None, :, None] & exists[:, None, None, :]
    probabilities = F.dropout(F.softmax(scores.masked_fill(~both, LOWEST), -1), 0.0)
    return torch.bmm(probabilities.view(-1, S, S), v).view(-1, H, S, D).permute(0, 2, 1, 3).contiguous()


def triangle(q, k, v, exists, pair):
    """OpenFold: five dims, two biases, one of them shared by all rows."""
    mask = 1e9 * (exists - 1)
    scores = torch.matmul(q / 4.0, k.transpose(-1, -2))
    scores += mask
    scores += pair
    return torch.matmul(F.softmax(scores, -1), v)


def learned_alibi(q, k, v, slopes, exists):
    i = torch.arange(S)
    bias = -(i[None, :] - i[:, None]).abs() * slopes.exp()[:, None, None]
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5 + bias
    scores = scores.masked_fill(~exists[:, None, None, :], -torch.finfo(scores.dtype).max)
    causal = torch.ones(S, S, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(causal, -torch.finfo(scores.dtype).max)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1, dtype=torch.float32).type(q.dtype), v)


def gpt_oss(q, k, v, sinks, exists):
    """A learned sink in each head, a sliding window, and a padded sequence. Two heads of queries share one of keys."""
    repeated = lambda x: x[:, :, None].expand(B, 1, H, S, D).reshape(B, H, S, D)  # noqa: E731
    i = torch.arange(S)
    near = (i[:, None] >= i[None, :]) & (i[:, None] - i[None, :] < 9)
    mask = torch.where(near & exists[:, None, None, :], 0.0, LOWEST)
    scores = torch.matmul(q, repeated(k).transpose(2, 3)) * D**-0.5 + mask
    sinks = sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)
    logits = torch.cat([scores, sinks], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    probabilities = F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    probabilities = F.dropout(probabilities, p=0.0, training=True)
    return torch.matmul(probabilities, repeated(v)).transpose(1, 2).contiguous()


def off_by_one(q, k, v, table):
    """Softmax with one more in the denominator: a sink of 0."""
    i = torch.arange(S)
    scores = (q @ k.mT / 4 + table[:, i[:, None] - i + S - 1]).masked_fill(torch.ones(S, S).triu() > 0, -torch.inf)
    logits = torch.cat((scores, torch.zeros(B, H, S, 1)), -1)
    return logits.softmax(-1)[..., :S] @ v


def sink_in_front(q, k, v, sinks, table):
    """As x-transformers spells a sink in each head, with a bias."""
    i = torch.arange(S)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / 4 + table[:, i[:, None] - i + S - 1]
    logits = torch.cat((sinks[None, :, None, None].expand(B, -1, S, -1), scores), dim=-1)
    return torch.einsum("bhij,bhjd->bhid", logits.softmax(-1)[..., 1:], v)


def one_head_of_keys(q, k, v, table):
    """As x-transformers spells heads that share one head of keys and values."""
    i = torch.arange(S)
    scores = torch.einsum("bhid,bjd->bhij", q, k) / 4 + table[:, i[:, None] - i + S - 1]
    return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v)


def grouped_einsum(q, k, v, table):
    """Queries have a dim for the heads of keys and one for the heads that share it."""
    i = torch.arange(S)
    scores = torch.einsum("bgrid,bgjd->bgrij", q, k) / 4 + table[:, i[:, None] - i + S - 1].view(1, H, 2, S, S)
    return torch.einsum("bgrij,bgjd->bgrid", scores.softmax(-1), v)


def soft_capped(q, k, v, bias):
    """A soft cap, and heads beside positions in memory."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4 + bias
    scores = torch.tanh(scores / 5.0) * 5.0
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def esmfold(x, pairs, exists):
    """Dims that an ellipsis stands for, and probabilities that a caller drops."""
    q, k, v = x.permute(0, 2, 1, 3).chunk(3, dim=-1)
    scores = torch.einsum("...qc,...kc->...qk", 0.25 * q, k) + pairs.permute(0, 3, 1, 2)
    scores = scores.masked_fill(exists[:, None, None] == False, -torch.inf)  # noqa: E712
    probabilities = F.softmax(scores, dim=-1)
    _ = probabilities.permute(0, 3, 1, 2)
    return torch.einsum("...hqk,...hkc->...qhc", probabilities, v).reshape(B, S, -1)


def documents(q, k, v, table, document):
    """A boolean mask of SDPA hides other documents, and a causal one later keys."""
    i = torch.arange(S)
    same = document[:, None, :, None] == document[:, None, None, :]
    bias = table[:, (i[None, :] - i[:, None]).clamp(-9, 0) + 9]
    mask = torch.where(same, bias, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def wavlm(q, k, v, table):
    """The bias is repeated for each sequence, and heads are folded into the batch."""
    bias = t5_bias(table).squeeze(0).unsqueeze(0).repeat(B, 1, 1, 1).view(B * H, S, S)
    scores = torch.bmm(q * 0.25, k.transpose(1, 2)) + bias
    return torch.bmm(scores.softmax(-1), v)


def longer_grid(q, k, v, table):
    """As models cut what they keep for their longest input."""
    position = torch.arange(2 * S)
    distance = (position[None, :] - position[:, None]).clamp(-9, 9) + 9
    bias = table[distance[:S, :S]].permute(2, 0, 1)[None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def udop(q, k, v, table, places):
    """Distances of positions that are data, as of words on a page."""
    distance = (places[:, None, :] - places[:, :, None]).clamp(-6, 6) + 6
    bias = F.embedding(distance, table).permute(0, 3, 1, 2)
    return (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v


def bloom(q, k, v, slopes):
    """A bias for each key, to which the scaled product is added."""
    alibi = (slopes[:, None, None] * torch.arange(S)).repeat(B, 1, 1)
    scores = alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.25)
    return torch.bmm(scores.softmax(-1), v)


def added_in_part(q, k, v, table):
    i = torch.arange(S)
    bias = table[:, i[:, None] - i + S - 1].repeat(B, 1, 1)
    return torch.bmm(torch.baddbmm(bias, q, k.mT, beta=0.5).softmax(-1), v)


INDEX = relative_position_index(WINDOW)
PLACES = torch.randint(0, 20, (B, S), generator=torch.Generator().manual_seed(1))
REGION = torch.randint(0, 3, (NW, WINDOW * WINDOW), generator=torch.Generator().manual_seed(0)).float()
SEQUENCES = ((B * H, S, D),) * 3

SPELLINGS = {
    "t5_eager": Spelling(t5_eager, (*HEADS, (8, H), padding()), "head+diagonal"),
    "t5_eager_with_an_empty_sequence": Spelling(t5_eager, (*HEADS, (8, H), padding([1])), "head+diagonal"),
    "t5_sdpa": Spelling(t5_sdpa, (*HEADS, (8, H), padding()), "head+diagonal"),
    "t5_sdpa_with_an_empty_sequence": Spelling(t5_sdpa, (*HEADS, (8, H), padding([1]))),
    "t5_decoder": Spelling(t5_decoder, (*HEADS, (8, H)), "head+diagonal"),
    "bloom": Spelling(bloom, (*((B * H, S, D),) * 3, (H,))),
    "added_in_part": Spelling(added_in_part, (*((B * H, S, D),) * 3, (H, 2 * S - 1)), "diagonal"),
    "wavlm": Spelling(wavlm, (*((B * H, S, D),) * 3, (8, H)), "diagonal"),
    "longer_grid": Spelling(longer_grid, (*HEADS, (19, H)), "head+diagonal"),
    "udop": Spelling(udop, (*HEADS, (13, H), PLACES), "captured_"),
    "mpnet": Spelling(mpnet, (*HEADS, (8, H), padding()), "head+diagonal"),
    "swin": Spelling(swin, (*WINDOWS, TABLE, INDEX), "captured_0[captured_1[q, k], h]"),
    "swin_shifted": Spelling(swin_shifted, (*WINDOWS, TABLE, INDEX, REGION), "captured_0[captured_1[q, k], h]"),
    "swin_v2": Spelling(swin_v2, (*WINDOWS, (H, 1, 1), TABLE, INDEX, REGION), "sigmoid(captured_1[captured_2[q, k], h])"),
    "beit": Spelling(beit, (*((B, H, 26, D),) * 3, (84, H)), "captured_0[captured_1[q, k], h]"),
    "sam": Spelling(sam, IMAGE, "captured_0[b, h, q, k // 8] + captured_1[b, h, q, k % 8]"),
    "sam_eager": Spelling(sam_eager, IMAGE, "captured_0[b, q, k // 8]"),
    "vitdet": Spelling(vitdet, IMAGE, "captured_0[b, q, k // 8] + captured_1[b, q, k % 8]"),
    "conformer": Spelling(conformer, (*HEADS, (1, H, D, 2 * S - 1), (H, D), (H, D)), "captured_0[b, h, q, (k - q) + 31]"),
    "xlnet": Spelling(xlnet, ((S, B, H, D),) * 2 + ((2 * S, B, H, D), (S, B, H, D), (H, D), (H, D)), "(k - q) + 32]"),
    "deberta": Spelling(deberta, (*SEQUENCES, (H, 16, D), (H, 16, D), padding())),
    "triangle": Spelling(triangle, (*((1, 8, H, S, D),) * 3, padding().float()[:1, None, None, None], (1, 1, H, S, S))),
    "triangle_of_a_batch": Spelling(
        triangle, (*((2, 8, H, S, D),) * 3, padding().float()[:, None, None, None], (2, 1, H, S, S))
    ),
    "esmfold": Spelling(esmfold, ((B, S, H, 3 * D), (B, S, S, H), padding())),
    "learned_alibi": Spelling(learned_alibi, (*HEADS, (H,), padding())),
    "gpt_oss": Spelling(gpt_oss, (HEADS[0], *((B, 1, S, D),) * 2, (H,), padding([1])), "1 are learned, with its sink"),
    "off_by_one": Spelling(off_by_one, (*HEADS, (H, 2 * S - 1)), "with its sink"),
    "sink_in_front": Spelling(sink_in_front, (*HEADS, (H,), (H, 2 * S - 1)), "with its sink"),
    "one_head_of_keys": Spelling(one_head_of_keys, (HEADS[0], *((B, S, D),) * 2, (H, 2 * S - 1)), "head+diagonal"),
    "grouped_einsum": Spelling(grouped_einsum, ((B, H, 2, S, D), *((B, H, S, D),) * 2, (2 * H, 2 * S - 1))),
    "soft_capped": Spelling(soft_capped, (*((B, S, H, D),) * 3, (1, H, S, S))),
    "documents": Spelling(documents, (*HEADS, (H, 10), torch.arange(S).expand(B, S) // 12), "head+diagonal"),
}
