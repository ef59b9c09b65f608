"""The model of these tests, a small transformer with learned attention biases and experts, and its float64 reference.

A module computes attention with ``flex_attention``, or by the formula if its ``dense`` is set. The reference of a step is
the formula in float64, run eagerly in one process.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 61, 64, 4, 40, 2
EXPERTS, TOPK, BUCKETS = 4, 2, 8
#: The largest relative Frobenius error of a gradient compared with float64.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}
#: In half precision, an error may be this many times that of the same model run eagerly, which rounds after every operation.
SLACK = 1.2
FEW = 2e-2

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def bucket(distance: Tensor) -> Tensor:
    """Buckets of ``q - k`` as in T5: one for each small distance, then logarithmic. Each sign has half of them."""
    near = distance.abs()
    far = 2 + (torch.log(near.clamp(min=1).float() / 2) / math.log(LENGTH) * 2).long().clamp(0, 1)
    return torch.where(near < 2, near, far) + (distance > 0).long() * (BUCKETS // 2)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod) -> Tensor:
    """Attention by the formula. The score_mod gets index tensors that broadcast."""
    b, h, q, k = (
        torch.arange(n, device=query.device).reshape([-1 if axis == d else 1 for d in range(4)])
        for axis, n in enumerate((*query.shape[:3], key.shape[2]))
    )
    return torch.softmax(score_mod(query @ key.mT / math.sqrt(query.shape[-1]), b, h, q, k), -1) @ value


class Attention(nn.Module):
    """Attention with a learned temperature for each head and a learned bias.

    ``kind``: "relative" (``t[h, q - k]``), "bucket" (``t[bucket(q - k), h]``) or "pair" (``t[h, q, k]``).
    """

    dense = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        shape = {"relative": (HEADS, 2 * LENGTH), "bucket": (BUCKETS, HEADS), "pair": (HEADS, LENGTH, LENGTH)}[kind]
        self.bias = nn.Parameter(torch.randn(shape))
        self.temperature = nn.Parameter(torch.rand(HEADS) + 0.5)

    def score_mod(self, bias: Tensor, temperature: Tensor) -> ScoreMod:
        """The score_mod that captures these tensors, which may be parts of the parameters."""
        if self.kind == "relative":
            return lambda s, b, h, q, k: s * temperature[h] + bias[h, q - k + LENGTH]
        if self.kind == "bucket":
            return lambda s, b, h, q, k: s * temperature[h] + bias[bucket(q - k), h]
        return lambda s, b, h, q, k: s * temperature[h] + bias[h, q, k]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod) -> Tensor:
        """[B, H, S, D] -> [B, H, S, D]."""
        if self.dense:
            return dense_attention(query, key, value, score_mod)
        return flex_attention(query, key, value, score_mod=score_mod)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, WIDTH] -> [B, S, WIDTH]."""
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = self.attend(q, k, v, self.score_mod(self.bias, self.temperature))
        return self.out(y.transpose(1, 2).flatten(2))


def experts_of(tokens: Tensor) -> Tensor:
    """The experts of tokens [N], [N, TOPK]."""
    return torch.stack([tokens % EXPERTS, (tokens // EXPERTS + tokens + 1) % EXPERTS], 1)


class Experts(nn.Module):
    """A mixture of experts: rows are sorted by expert, gathered, computed, weighted and added back to their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / math.sqrt(WIDTH))

    def choose(self, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the experts of each row, [N, TOPK]. The token itself determines the experts, as in Hash Layers.

        A choice by the router's logits could differ between float64 and half precision.
        """
        chosen = experts_of(tokens.flatten())
        return self.router(rows).gather(1, chosen).softmax(-1), chosen

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x [B, S, WIDTH], tokens [B, S] -> [B, S, WIDTH]."""
        rows = x.flatten(0, 1)
        weight, chosen = self.choose(rows, tokens)
        order = chosen.flatten().argsort(stable=True)
        source = order // TOPK
        choices = F.one_hot(chosen.flatten()[order], EXPERTS).to(x.dtype)
        hidden = F.silu(torch.einsum("nd,edf->nef", rows[source], self.up)) * choices[..., None]
        outputs = torch.einsum("nef,efd->nd", hidden, self.down) * weight.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, source, outputs).view_as(x)


class Block(nn.Module):
    """Attention and then experts, each of which reads the normalised residual stream."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.experts = Attention(kind), Experts()

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x [B, S, WIDTH], tokens [B, S] -> [B, S, WIDTH]."""
        x = x + self.attention(self.norms[0](x))
        return x + self.experts(self.norms[1](x), tokens)


class Transformer(nn.Module):
    """A model that computes the mean cross-entropy of tokens and targets."""

    def __init__(self, kinds: Iterable[str] = ("relative", "bucket")) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(map(Block, kinds))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets [B, S] -> 0-d loss."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, tokens)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def make(kinds: Iterable[str] = ("relative", "bucket"), seed: int = 0) -> Transformer:
    """The model, the same in every process."""
    torch.manual_seed(seed)
    return Transformer(kinds)


def data(seed: int = 0, batch: int = BATCH, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Tokens and targets, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCABULARY, (2, batch, length), generator=generator)
    return tokens, targets


def plain_name(name: str) -> str:
    """The name of a parameter without the prefixes that wrappers add."""
    return re.sub(r"\b(_orig_mod|module|_checkpoint_wrapped_module)\.", "", name)


def full(x: Tensor) -> Tensor:
    """A gradient or parameter as an ordinary tensor. For a sharded one this is a collective operation."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by plain name, as ordinary tensors. Gradients that are None are left out."""
    return {plain_name(n): full(p.grad).detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def dense_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy that computes attention by the formula, in ``dtype``, with no gradients yet."""
    out = copy.deepcopy(model).to(dtype)
    for module in out.modules():
        if isinstance(module, Attention):
            module.dense = True
    out.zero_grad()
    return out


def reference(model: nn.Module, *inputs: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of one step by the formula, run eagerly, in float64 unless ``dtype`` is given."""
    exact = dense_copy(model, dtype)
    loss = exact(*inputs)
    loss.backward()
    return loss.detach(), gradients(exact)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius error. It fails if that is not a number."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    assert not math.isnan(error), "the error is not a number"
    return error


def check_gradients(
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    tolerance: float = TOLERANCE[torch.float32],
    eager: dict[str, Tensor] | None = None,
) -> None:
    """Check that every gradient exists, and that its error is at most ``tolerance`` or SLACK times the error of ``eager``.

    A gradient of a few elements in half precision has an error of a few random roundings, so its bound is FEW.
    """
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    errors = {name: relative_error(got[name], want[name]) for name in want}
    allowed = dict.fromkeys(want, tolerance)
    for name in eager or ():
        few = FEW if want[name].numel() <= 64 else 0.0
        allowed[name] = max(tolerance, few, SLACK * relative_error(eager[name], want[name]))
    wrong = {n: (errors[n], allowed[n]) for n in want if not errors[n] <= allowed[n]}
    assert not wrong, wrong


def check_half(
    model: nn.Module, compiled: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]], tolerance: float
) -> None:
    """As ``check_step`` in half precision. Errors are averaged over several batches, since those of one are random."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for batch in batches:
        _, want = reference(model, *batch)
        _, eager = reference(model, *batch, dtype=next(model.parameters()).dtype)
        model.zero_grad()
        compiled(*batch).backward()
        got = gradients(model)
        assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
        for name in want:
            pair = relative_error(got[name], want[name]), relative_error(eager[name], want[name])
            errors.setdefault(name, []).append(pair)
    for name, pairs in errors.items():
        ours, usual = (math.sqrt(sum(p[i] ** 2 for p in pairs) / len(pairs)) for i in (0, 1))
        assert ours <= max(tolerance, SLACK * usual, FEW * (want[name].numel() <= 64)), (name, ours, usual)


def check_step(model: nn.Module, compiled: Callable[..., Tensor], *inputs: Tensor, tolerance: float | None = None) -> None:
    """Compare one step of ``compiled``, which shares its parameters with ``model``, with the reference of ``model``."""
    dtype = next(model.parameters()).dtype
    tolerance = TOLERANCE.get(dtype, 1e-3) if tolerance is None else tolerance  # half precision: see check_gradients
    want_loss, want = reference(model, *inputs)
    eager = None if dtype in TOLERANCE else reference(model, *inputs, dtype=dtype)[1]
    model.zero_grad()
    loss = compiled(*inputs)
    loss.backward()
    assert abs(float(loss) - float(want_loss)) <= max(tolerance, 0 if eager is None else 1e-2) * abs(float(want_loss))
    check_gradients(gradients(model), want, tolerance, eager)
