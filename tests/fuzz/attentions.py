"""Attention that is spelt out, with random biases, masks, views and uses: ``attention_pattern`` finds it or leaves it alone.

No row is hidden by -inf as a whole, because eager mode gives no numbers there.
"""

from __future__ import annotations

import random

from .program import Program, Writer

DTYPES = ("float32", "float32", "float32", "float64")
_LENGTHS = (16, 17, 24, 32, 36, 48)


class _Attention(Writer):
    """Writes one attention: operands, product, terms, softmax, second product. Each part is a statement."""

    def __init__(self, seed: int, dtype: str) -> None:
        super().__init__(random.Random(seed))
        rng = self.rng
        self.dtype = dtype
        self.batch, self.heads = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
        self.queries = rng.choice(_LENGTHS)
        self.keys = self.queries if rng.random() < 0.7 else rng.choice(_LENGTHS)
        self.width = rng.choice([16, 16, 32])
        self.folded = rng.random() < 0.2
        self.infinite = False
        # Drawn apart, so that a seed writes the same program as before there were such heads.
        self.grouping = random.Random(f"groups{seed}")
        self.shared = 2 if self.grouping.random() < 0.25 else 1
        self.heads *= self.shared

    def add(self, expression: str, prefix: str = "v") -> str:
        """Add a statement, which must run."""
        name = super().add(expression, prefix)
        if name is None:
            raise ValueError(f"{expression} does not run")
        return name

    # ------------------------------------------------ inputs

    @property
    def device(self) -> str:
        """The device of the first operand, in the program."""
        return f"{self.inputs[0][0]}.device"

    def learned(self, *shape: int, grad: float = 0.85) -> str:
        text = f"(torch.randn({list(shape)}, generator=g) * 0.5).to(device, torch.{self.dtype})"
        if self.rng.random() < grad:
            # A parameter holds no mask, and another tensor may.
            text = f"torch.nn.Parameter({text})" if self.rng.random() < 0.7 else f"{text}.requires_grad_()"
        return self.input(text, "t")

    def operand(self, length: int, shared: int = 1) -> str:
        """Query, key or value ``[batch, heads, length, width]``, or with both in one dim.

        shared: how many heads of queries read one head of it.
        """
        b, h, d = self.batch, self.heads // shared, self.width
        kind = self.rng.randrange(5)
        if kind == 0:
            x = self.add(f"{self.learned(b, length, h, d, grad=0.95)}.transpose(1, 2)")
        elif kind == 1:
            x = self.add(f"{self.learned(b, length, h * d, grad=0.95)}.view({b}, {length}, {h}, {d}).permute(0, 2, 1, 3)")
        else:
            x = self.add(f"{self.learned(b, h, length, d, grad=0.95)} * 1.0")
        if shared > 1:
            x, h = self.repeated(x, length, shared), h * shared
        return self.add(f"{x}.reshape({b * h}, {length}, {d})") if self.folded else x

    def repeated(self, x: str, length: int, times: int) -> str:
        """An operand with each head repeated, or now and then with all of them repeated in turn."""
        b, h, d = self.batch, self.heads // times, self.width
        expanded = f"{x}[:, :, None].expand({b}, {h}, {times}, {length}, {d}).reshape({b}, {h * times}, {length}, {d})"
        ways = [expanded, f"{x}.repeat_interleave({times}, 1)", f"torch.repeat_interleave({x}, dim=1, repeats={times})"]
        kind = self.grouping.random()
        out = self.add(f"{x}.repeat(1, {times}, 1, 1)" if kind < 0.1 else self.grouping.choice(ways))
        if kind > 0.9:
            self.statement(f"{x} += 1.0" if kind > 0.95 else f"{out}[:, ::2] *= 0.5")
        return out

    # ------------------------------------------------ biases

    def distance(self) -> str:
        q, k = (self.positions(n) for n in (self.queries, self.keys))
        first, second = self.rng.choice([(f"{q}[:, None]", k), (f"{q}.unsqueeze(1)", f"{k}.unsqueeze(0)")])
        return self.add(self.rng.choice([f"{first} - {second}", f"{second} - {first}"]))

    def positions(self, length: int) -> str:
        numbers = self.rng.choice(
            [f"{length}", f"0, {length}", f"end={length}", f"start=0, end={length}", f"0, end={length}"]
        )
        return self.add(f"torch.arange({numbers}, device={self.device})")

    def bias(self) -> str:
        """A bias that broadcasts to ``[batch, heads, queries, keys]``."""
        rng, b, h, q, k = self.rng, self.batch, self.heads, self.queries, self.keys
        kind = rng.randrange(13)
        if kind == 0:
            return self.learned(rng.choice([1, b]), rng.choice([1, h]), q, k)
        if kind == 1:
            first = rng.choice([0, 3])
            return self.add(f"{self.learned(1, h, q + 3, k + 5)}[:, :, {first}:{first + q}, :{k}]")
        if kind == 2:
            w = rng.choice([2, 7, 40])
            index = self.add(f"{self.distance()}.clamp(-{w}, {w}) + {w}")
            return self.looked_up(index, 2 * w + 1)
        if kind == 3:
            distance = self.distance()
            small = self.add(f"{distance}.abs()")
            large = self.add(f"4 + (torch.log({small}.float() / 4) / 2.5 * 4).to(torch.long)")
            large = self.add(f"torch.min({large}, torch.full_like({large}, 7))")
            bucket = self.add(f"torch.where({small} < 4, {small}, {large}) + ({distance} > 0) * 8")
            return self.looked_up(bucket, 16)
        if kind == 4:
            n = 9
            index = self.input(f"torch.randint({n}, [{q}, {k}], generator=g).to(device)", "i")
            return self.looked_up(index, n)
        if kind == 5:
            return self.add(f"{self.learned(b, k)}[:, None, None, :]")
        if kind == 6:
            return self.add(f"{self.learned(h, q)}[:, :, None]")
        if kind == 7:
            return self.add(f"-{self.distance()}.abs() * {self.learned(h)}.exp()[:, None, None]")
        if kind == 8:
            w = rng.choice([x for x in (2, 4, 8, 9, 12) if k % x == 0] or [1])
            y, x = self.learned(b, h, q, k // w), self.learned(b, h, q, w)
            return self.add(f"({y}[..., :, None] + {x}[..., None, :]).reshape({b}, {h}, {q}, {k})")
        if kind == 9 and q == k:
            r = self.learned(b, h, q, 2 * q - 1)
            padded = self.add(f"F.pad({r}, (1, 0)).view({b}, {h}, {2 * q}, {q})")
            return self.add(f"{padded}[:, :, 1:].reshape({b}, {h}, {q}, {2 * q - 1})[..., :{k}]")
        if kind == 10:
            w = rng.choice([3, 8])
            index = self.add(f"torch.clamp({self.distance()} + {w}, 0, {2 * w - 1}).expand({b}, {h}, {q}, {k})")
            return self.add(f"torch.gather({self.learned(b, h, q, 2 * w)}, -1, {index})")
        if kind == 11:
            return self.add(f"{self.learned(h, 1, 1)} * {self.distance()}")
        return self.add(f"{self.learned(1, h, q, k)}.expand({b}, -1, -1, -1).contiguous()")

    def looked_up(self, index: str, entries: int) -> str:
        """The entries of a table at ``index [queries, keys]``."""
        h, q, k = self.heads, self.queries, self.keys
        return self.add(
            self.rng.choice(
                [
                    f"F.embedding({index}, {self.learned(entries, h)}).permute(2, 0, 1).unsqueeze(0)",
                    f"{self.learned(entries, h)}[{index}.view(-1)].view({q}, {k}, -1).permute(2, 0, 1).contiguous()",
                    f"{self.learned(h, entries)}[:, {index}]",
                    f"{self.learned(entries, h)}[{index}].permute(2, 0, 1)[None]",
                ]
            )
        )

    def term(self) -> str:
        """One or two biases, changed elementwise."""
        rng = self.rng
        x = self.bias()
        kind = rng.randrange(13)
        if rng.random() < 0.3:
            return self.with_mask_inside(x)
        if kind == 10:
            return self.add(f"F.pad({x}[..., :-1], (0, 1), value=-1e4)")
        if kind == 11:
            return self.add(f"{x}.masked_fill(~{self.condition()}, -1e4)")
        if kind == 12:
            slope = self.add(f"{self.distance()} * 0.03")
            name = rng.choice(["tanh", "exp2", "erfc"])
            return self.add(f"{x} + torch.{name}({slope}, out=torch.zeros_like({slope}))")
        if kind == 0:
            return self.add(f"16 * torch.sigmoid({x})")
        if kind == 1:
            return self.add(f"{x} {rng.choice(['*', '/'])} {rng.choice([0.5, 2.0, 4])}")
        if kind == 2:
            return self.add(f"{x} {rng.choice('+-')} {self.bias()}")
        if kind == 3:
            return self.add(f"torch.tanh({x}) * {self.learned(self.heads, 1, 1)}")
        if kind == 4:
            x = self.add(f"{x} * 1.0")
            changes = [f"{x}.mul_(0.5)", f"{x} += 0.25", f"{x}[..., 0] = 0.0", f"F.relu({x}, True)"]
            self.statement(rng.choice(changes))
            return x
        return x

    def with_mask_inside(self, x: str) -> str:
        """A bias that holds a mask, as the graph computes it."""
        rng, shape = self.rng, f"{self.batch}, {self.heads}, {self.queries}, {self.keys}"
        visible, low = self.visible(x)
        x, kind = self.add(f"{x}.expand({shape})"), rng.randrange(4)
        if kind == 0:
            x = self.add(f"{x} * 1.0")
            self.statement(
                rng.choice([f"{x}.masked_fill_(~{visible}, {low})", f"{x}[(~{visible}).expand({shape})] = {low}"])
            )
        elif kind == 1:
            x = self.add(f"{x} + torch.tensor([{low}, 0.0], dtype={x}.dtype, device={self.device})[{visible}.long()]")
        elif kind == 2:
            x = self.add(f"{x}.where({visible}, {low})")
        else:
            factor = rng.choice(["1000.0 * 1000.0", "50.0 * 40.0", "9.0"])
            x = self.add(f"{x} - (~{visible}) * {factor}")
        return self.add(rng.choice([f"{x}.flip(0).flip(0)", f"{x}.roll(0, -1)", f"{x}.contiguous()", f"{x} + 0.5"]))

    # ------------------------------------------------ masks

    def condition(self) -> str:
        """Which keys are visible. The first key always is, or the last one, if the padding is on the left."""
        q, k, b = self.queries, self.keys, self.batch
        kind = self.rng.randrange(6)
        if kind == 5:
            start = self.input(f"torch.randint(0, {k}, [{b}], generator=g).to(device)", "i")
            return self.add(f"(torch.arange({k}, device={self.device}) >= {start}[:, None])[:, None, None, :]")
        if kind == 0:
            i, j = (self.positions(n) for n in (q, k))
            return self.add(f"{i}[:, None] >= {j}[None, :]")
        if kind == 4:
            # In bf16, some of these numbers are equal to their neighbours.
            i, j = (self.add(f"({self.positions(n)} + 250).to(torch.bfloat16)") for n in (q, k))
            return self.add(f"{i}[:, None] >= {j}[None, :]")
        if kind == 1:
            return self.add(
                f"torch.ones({q}, {k}, dtype=torch.bool, device={self.device}).tril({self.rng.choice([0, 0, 3])})"
            )
        length = self.input(f"torch.randint(1, {k + 1}, [{b}], generator=g).to(device)", "i")
        exists = self.add(f"torch.arange({k}, device={self.device}) < {length}[:, None]")
        if kind == 2:
            return self.add(f"{exists}[:, None, None, :]")
        return self.add(f"{exists}[:, None, None, :].expand({b}, 1, {q}, {k})")

    def low(self, scores: str, empty_rows: bool = False) -> str:
        lowest = f"torch.finfo({scores}.dtype).min"
        finite = [lowest, lowest, lowest, "-1e4", "-1e9", "-1e10", "-1e30"]
        # Two infinite masks might hide all keys of a row.
        low = self.rng.choice(finite if empty_rows or self.infinite else [*finite, "-float('inf')"])
        self.infinite = self.infinite or "inf')" in low
        return low

    def visible(self, scores: str) -> tuple[str, str]:
        """Which keys are visible, and the number that hides the others."""
        visible = self.condition()
        if self.rng.random() < 0.5:
            # Rows without a key.
            row = self.input(f"(torch.rand([{self.queries}, 1], generator=g) < 0.8).to(device)", "i")
            return self.add(f"{visible} & {row}"), self.low(scores, empty_rows=True)
        return visible, self.low(scores)

    def masked(self, scores: str) -> str:
        rng = self.rng
        visible, low = self.visible(scores)
        kind = rng.randrange(10)
        if kind == 9:
            return self.add(f"{scores}.where({visible}, {low})")
        if kind == 6:
            return self.add(f"{scores} + ({visible}.long() - 1) * {rng.choice(['10**4', '2000'])}")
        if kind == 7:
            return self.add(f"{scores} - (~{visible}).to({scores}.dtype) / {rng.choice([1e-4, 5e-4])}")
        if kind == 8:
            return self.add(f"{scores} + {visible}.to({scores}.dtype) * {rng.choice([100.0, 1e4])}")
        if kind == 0:
            return self.add(f"{scores}.masked_fill(~{visible}, {low})")
        if kind == 1:
            return self.add(f"torch.where({visible}, {scores}, {low})")
        if kind == 2:
            zero = f"torch.zeros((), dtype={scores}.dtype, device={self.device})"
            return self.add(f"{scores} + torch.where({visible}, {zero}, {low})")
        if kind == 3 and "inf" not in low:
            return self.add(f"{scores} + (1.0 - {visible}.to({scores}.dtype)) * {low}")
        if kind == 4:
            zeros = f"torch.zeros({self.queries}, {self.keys}, dtype={scores}.dtype, device={self.device})"
            return self.add(f"{scores} + {zeros}.masked_fill(~{visible}, {low})")
        scores = self.add(f"{scores} * 1.0")
        self.statement(f"{scores}.masked_fill_(~{visible}, {low})")
        return scores

    # ------------------------------------------------ the attention

    def product(self, query: str, key: str) -> str:
        rng = self.rng
        letters = "nqd,nkd->nqk" if self.folded else "bhqd,bhkd->bhqk"
        turned = rng.choice([f"{key}.mT", f"{key}.transpose(-1, -2)", f"{key}.transpose(-2, -1).contiguous()"])
        products = [f"{query} @ {turned}", f"torch.matmul({query}, {turned})", f"torch.einsum('{letters}', {query}, {key})"]
        if self.folded:
            products.append(f"torch.bmm({query}, {turned})")
        return self.add(rng.choice(products))

    def scores(self, query: str, key: str) -> str:
        rng, scale = self.rng, self.width**-0.5
        kind = rng.randrange(4)
        if kind == 0:
            query = self.add(f"{query} * {scale}")
        scores = self.product(query, key)
        if kind == 1:
            scores = self.add(rng.choice([f"{scores} * {scale}", f"{scores} / {1 / scale}"]))
        if self.folded:
            scores = self.add(f"{scores}.view({self.batch}, {self.heads}, {self.queries}, {self.keys})")
        if rng.random() < 0.15:
            scores = self.add(f"torch.tanh({scores} / 5.0) * 5.0")
        for _ in range(rng.choice([1, 1, 1, 2])):
            term = self.term()
            if rng.random() < 0.15:
                self.statement(f"{scores} += {term}")
            else:
                minus = [] if self.infinite else [f"{scores} - {term}"]
                scores = self.add(rng.choice([f"{scores} + {term}", f"{term} + {scores}", *minus]))
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
            scores = self.masked(scores)
        return scores

    def probabilities(self, scores: str) -> str:
        rng = self.rng
        softmax = [f"F.softmax({scores}, dim=-1)", f"{scores}.softmax(-1)", f"torch.softmax({scores}, -1)"]
        softmax.append(f"F.softmax({scores}, dim=-1, dtype={scores}.dtype).to({scores}.dtype)")
        x = self.with_sink(scores) if rng.random() < 0.12 else self.add(rng.choice(softmax))
        if rng.random() < 0.2:
            nothing = ["F.dropout({x}, p=0.0, training=True)", "torch.dropout({x}, 0.5, train=False)"]
            x = self.add(rng.choice([*nothing, "F.dropout({x}, 0.5, False)"]).format(x=x))
        return self.add(f"{x}.view({self.batch * self.heads}, {self.queries}, {self.keys})") if self.folded else x

    def with_sink(self, scores: str) -> str:
        """Probabilities beside those of a sink."""
        rng, shape = self.rng, f"{self.batch}, {self.heads}, {self.queries}, 1"
        sink = self.learned(*rng.choice([(self.heads, 1, 1), (self.batch, self.heads, self.queries, 1), (1, 1, 1, 1)]))
        x = self.add(f"torch.cat([{scores}, {sink}.expand({shape})], dim=-1)")
        if rng.random() < 0.5:
            x = self.add(f"{x} - {rng.choice([f'{x}.max(-1, keepdim=True).values', f'{x}.amax(-1, keepdim=True)'])}")
        return self.add(f"F.softmax({x}, dim=-1)[..., :{rng.choice(['-1', str(self.keys)])}]")

    def fused(self, query: str, key: str, value: str) -> str:
        """scaled_dot_product_attention, with a mask that is learned."""
        rng = self.rng
        mask = self.term()
        if rng.random() < 0.5:
            mask = self.masked(self.add(f"{mask}.expand({self.batch}, {self.heads}, {self.queries}, {self.keys})"))
        if self.dtype == "bfloat16":
            mask = self.add(f"{mask}.to({query}.dtype)")
        scale = rng.choice(["", ", scale=1.0", ", scale=0.3"])
        return self.add(f"F.scaled_dot_product_attention({query}, {key}, {value}, attn_mask={mask}{scale})")

    def program(self) -> str:
        rng = self.rng
        query = self.operand(self.queries)
        key, value = (self.operand(self.keys, self.shared) for _ in range(2))
        returned = []
        if not self.folded and rng.random() < 0.3:
            out = self.fused(query, key, value)
        else:
            scores = self.scores(query, key)
            probabilities = self.probabilities(scores)
            if rng.random() < 0.1:
                returned.append(probabilities)
            if self.dtype == "bfloat16":
                # A distance or a mask may have made fp32 of the scores.
                probabilities = self.add(f"{probabilities}.to({value}.dtype)")
            letters = "nqk,nkd->nqd" if self.folded else "bhqk,bhkd->bhqd"
            products = [f"{probabilities} @ {value}", f"torch.matmul({probabilities}, {value})"]
            products.append(f"torch.einsum('{letters}', {probabilities}, {value})")
            if not self.folded:
                products.append(f"torch.einsum('bhqk,bhkd->bqhd', {probabilities}, {value})")
            out = self.add(rng.choice(products))
        if not self.folded and rng.random() < 0.5:
            out = self.add(f"{out}.transpose(1, 2).reshape({self.batch}, -1, {self.heads * self.width})")
        if rng.random() < 0.1:
            self.statement(f"{out} += 1.0")
        return self.source([out, *returned], effects=True)


def generate(seed: int, dtype: str = "any") -> Program:
    """Make the program of a seed."""
    chosen = random.Random(f"dtype{seed}").choice(DTYPES) if dtype == "any" else dtype
    dynamic = True if random.Random(f"dynamic{seed}").random() < 0.08 else None
    # The first result. Biases and masks, which a kernel reads again in the backward, are not overwritten.
    overwrites = 0 if random.Random(f"overwrites{seed}").random() < 0.25 else -1
    return Program("attentions", seed, _Attention(seed, chosen).program(), chosen, dynamic, overwrites=overwrites)
