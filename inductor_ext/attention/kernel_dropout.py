"""Dropout of attention probabilities inside the kernels: Philox draws the same numbers in the forward and in the backward.

    out = (dropout(softmax(score_mod(scale · Q Kᵀ)))) V          kept probabilities are divided by 1 - p

The pass draws one seed for each call of flex_attention, and captures it. Whether the probability at (b, h, q, k) is kept is
a function of the seed and of these positions, so nothing is stored, and a recomputed forward keeps the same.

Philox is Philox4x32-7 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011), the fewest rounds that passed all
their tests. Its counters are ``k // 8``, ``q`` and ``b * H + h``, and its four results of 32 bits are eight numbers of 16
bits, for neighbouring keys. So p is rounded to a multiple of 2**-16, and probabilities are divided by what remains of 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..core.dynamo_graph import Inserter
from ..core.fx import fake_tensor, value_of
from ..core.report import record, user_line
from ..options import Options
from ..torch_api.config import uses_triton_on_cpu
from ..torch_api.higher_order import flex_attention_hop
from .calls import BackwardCall, ForwardCall
from .canonical import install, placeholders

NAME = "attention_dropout"
#: The kernel options for the probability, and for the number of the seed among the captured tensors.
OPTION, SEED = "GRADFUSE_DROPOUT", "GRADFUSE_DROPOUT_SEED"
_BITS = 32
_LOW = 2**_BITS - 1
_ROUNDS = 7
#: The bits of a number that decides about one probability, and how many of them Philox draws at once.
_HALF, _KEYS = 16, 8
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def dropout(p: float) -> dict[str, float]:
    """Return kernel options with which ``flex_attention`` drops probabilities, for the gradfuse backend.

    p: the probability with which each is dropped, from 0 to less than 1. With 0 the options are empty.

        flex_attention(q, k, v, score_mod, kernel_options=dropout(0.1 if self.training else 0.0))

    ``torch.manual_seed`` makes it reproducible. Other backends ignore these options. Raises a ValueError for other numbers.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"the dropout probability of an attention must be in [0, 1), not {p}")
    return {OPTION: float(p)} if p else {}


def dropout_mask(seed: Tensor, p: float, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Return which probabilities are kept, as bool [batch, heads, queries, keys].

    seed: int64 [1]. p: the probability with which each is dropped.
    """
    b, h, q, k = (torch.arange(n, device=seed.device) for n in (batch, heads, queries, keys))
    return kept(seed, p, b[:, None, None, None] * heads + h[:, None, None], q[:, None], k)


def kept(seed: Tensor, p: float, of_slice: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return whether probabilities are kept. ``of_slice`` is ``b * H + h``; it, q and k are integers that broadcast."""
    q, of_slice, k = torch.broadcast_tensors(*(x.to(torch.int64) for x in (q, of_slice, k)))
    seed = seed.reshape(())
    drawn = philox([seed & _LOW, (seed >> _BITS) & _LOW], [k // _KEYS, q, of_slice, torch.zeros_like(q)])
    lane = k % _KEYS // 2
    both = torch.where(lane < 2, torch.where(lane == 0, *drawn[:2]), torch.where(lane == 2, *drawn[2:]))
    own = torch.where(k % 2 == 0, both, both >> _HALF) & (2**_HALF - 1)
    return own >= threshold(p)


def philox(keys: list[Tensor], counters: list[Tensor], rounds: int = _ROUNDS) -> list[Tensor]:
    """Return the four results of Philox4x32. All numbers are unsigned 32-bit integers in int64."""
    for _ in range(rounds):
        (low_0, high_0), (low_2, high_2) = (
            _product(counters[i], factor) for i, factor in zip((0, 2), _FACTORS, strict=True)
        )
        counters = [high_2 ^ counters[1] ^ keys[0], low_2, high_0 ^ counters[3] ^ keys[1], low_0]
        keys = [(key + step) & _LOW for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return counters


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the low and the high half of a product of 64 bits.

    It is made of products of 48 bits, because C++ compilers assume that a signed integer does not overflow.
    """
    mask = 2**_HALF - 1
    low = x * (factor & mask)
    upper = x * (factor >> _HALF) + (low >> _HALF)
    return ((upper & mask) << _HALF) | (low & mask), upper >> _HALF


def threshold(p: float) -> int:
    """Return how many of the 2**16 numbers drop a probability."""
    return min(max(round(p * 2**_HALF), 1), 2**_HALF - 1) if p else 0


def scale(p: float) -> float:
    """Return the factor of probabilities that are kept."""
    return 2**_HALF / (2**_HALF - threshold(p))


@dataclass(frozen=True)
class Dropout:
    """The dropout of a call. p: the probability. seed: its number among the captured tensors."""

    p: float
    seed: int

    @staticmethod
    def of(call: ForwardCall | BackwardCall) -> Dropout | None:
        """Return None for a call without dropout."""
        return Dropout(probability(call), call.kernel_options[SEED]) if probability(call) else None


def probability(call: ForwardCall | BackwardCall) -> float:
    """Return the dropout probability of a call, which is 0 if it has no dropout."""
    return call.kernel_options.get(OPTION, 0.0)


def missing(options: Options, device: torch.device) -> str | None:
    """Return the name of a disabled pass or lowering without which stock computes an attention, or None."""
    on_cpu = device.type == "cpu" and not uses_triton_on_cpu()
    kernels = ("dense_attention",) if on_cpu else ("flex_attention", "flex_attention_backward")
    return next((name for name in (NAME, *kernels) if not options.enabled(name)), None)


def check(gm: GraphModule, options: Options) -> None:
    """Raise a RuntimeError if the dropout of a flex_attention would be lost, or could not be verified."""
    for node in gm.graph.find_nodes(op="call_function", target=flex_attention_hop):
        call = ForwardCall.of(node)
        if not probability(call):
            continue
        disabled = missing(options, fake_tensor(call.query).device)
        if disabled is not None:
            _refuse(f"{disabled!r}, which computes it, is disabled", "Enable it, or use dropout(0.0)", node)
        if options.verify:
            _refuse("eager mode, with which verify compares, drops nothing", "Verify with dropout(0.0)", node)


def check_not_stock(call: ForwardCall | BackwardCall, reason: str, where: str) -> None:
    """Raise a NotImplementedError if a call has dropout. Stock, to which it is left for this reason, would drop nothing."""
    if probability(call):
        raise NotImplementedError(
            f"gradfuse cannot compute the dropout of this attention at {where}: {reason}. Use dropout(0.0) there."
        )


def _refuse(why: str, advice: str, node: Node) -> NoReturn:
    raise RuntimeError(f"gradfuse cannot compile the dropout of this attention at {user_line(node)}: {why}. {advice}.")


def seed_of(call: ForwardCall | BackwardCall) -> Any:
    """Return the captured tensor that is the seed of a call with dropout."""
    return call.captured[Dropout.of(call).seed]


def template_options(call: ForwardCall | BackwardCall) -> dict[str, Any]:
    """Return the options for both templates."""
    p = probability(call)
    return {"DROPOUT": bool(p), "DROP_BELOW": threshold(p), "KEEP_SCALE": scale(p), "PHILOX_ROUNDS": _ROUNDS}


def rewrite(gm: GraphModule, options: Options) -> None:
    """Draw a seed for every flex_attention with dropout of a Dynamo graph. Changes ``gm``."""
    for node in gm.graph.find_nodes(op="call_function", target=flex_attention_hop):
        call = ForwardCall.of(node)
        if probability(call) and SEED not in call.kernel_options:
            _rewrite_node(gm, node, call)


def _rewrite_node(gm: GraphModule, node: Node, call: ForwardCall) -> None:
    outer = Inserter(gm.graph, node)
    device = fake_tensor(call.query).device
    module = getattr(gm, call.score_mod.target)
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    with gm.graph.inserting_before(node):
        seed = outer.function(torch.randint, -(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
        with graph.inserting_after(placeholders(graph)[-1]):
            graph.placeholder("dropout_seed").meta["example_value"] = value_of(seed)
        score_mod = install(gm, call.score_mod.target, GraphModule(module, graph))
    # Stock's kernel of inference has no dropout, and ours runs if the logsumexp is asked for.
    kernel_options = {**call.kernel_options, SEED: len(call.captured), "OUTPUT_LOGSUMEXP": True}
    rewritten = {"score_mod": score_mod, "captured": (*call.captured, seed), "kernel_options": kernel_options}
    node.args = replace(call, **rewritten).operands()
    p = call.kernel_options[OPTION]
    record(
        NAME,
        "flex_attention",
        "dropout in the kernels",
        f"p = {p}; the mask is drawn again in the backward",
        user_line(node),
    )
