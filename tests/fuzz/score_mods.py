"""flex_attention with random score_mods over learned and integer tables, masks, shapes and dtypes.

Integers carry the range of their values, so that every index is in range (or negative as indexing allows). A program is
kept from being chaotic: floats are compared nowhere, and what is cast from float to int is a multiple of a power of two.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from .program import Program

DTYPES = ("float32", "float32", "float32", "float32", "bfloat16", "bfloat16", "float64")
_LENGTHS = (1, 2, 7, 16, 31, 33, 48, 65)


@dataclass(frozen=True)
class Int:
    """An integer expression and the range of its values; narrow: of a dtype that wraps early, or indexes as a mask."""

    text: str
    low: int
    high: int
    narrow: bool = False


class _ScoreMod:
    def __init__(self, seed: int, dtype: str) -> None:
        self.rng = rng = random.Random(seed)
        self.dtype = dtype
        self.batch, self.heads = rng.choice([1, 2, 2]), rng.choice([1, 2, 2, 4])
        self.kv_heads = rng.choice([h for h in (1, 2, 4) if self.heads % h == 0]) if rng.random() < 0.3 else self.heads
        self.queries = rng.choice(_LENGTHS)
        self.keys = self.queries if rng.random() < 0.6 else rng.choice(_LENGTHS)
        self.dim = rng.choice([16, 16, 32, 64])
        self.v_dim = self.dim if rng.random() < 0.85 else rng.choice([16, 32])
        self.inputs: list[tuple[str, str]] = []
        self.lines: list[str] = []
        self.learned: list[tuple[str, tuple[int, ...]]] = []
        self.sizes = {"b": self.batch, "h": self.heads, "q": self.queries, "k": self.keys}

    # ------------------------------------------------ inputs

    def input(self, text: str, prefix: str) -> str:
        name = f"{prefix}{len(self.inputs)}"
        self.inputs.append((name, text))
        return name

    def table(self, *shape: int, grad: bool | None = None) -> str:
        """A float table: an old one of that shape, or a new one."""
        rng = self.rng
        same = [name for name, s in self.learned if s == shape]
        if same and rng.random() < 0.4:
            return rng.choice(same)
        dtype = (
            self.dtype
            if rng.random() < 0.85
            else rng.choice(["float32", "bfloat16", "float64" if self.dtype == "float64" else "float32"])
        )
        grad = rng.random() < 0.85 if grad is None else grad
        text = f"(torch.randn({list(shape)}, generator=g) * 0.5).to(device, torch.{dtype})" + (
            ".requires_grad_()" if grad else ""
        )
        name = self.input(text, "t")
        self.learned.append((name, shape))
        return name

    def integer_table(self, high: int, *shape: int) -> str:
        dtype = self.rng.choice(["int64", "int64", "int32", "uint8" if high < 200 else "int32"])
        return self.input(f"torch.randint({high + 1}, {list(shape)}, generator=g).to(device, torch.{dtype})", "i")

    # ------------------------------------------------ integers

    def position(self) -> Int:
        name = self.rng.choice(["b", "h", "q", "q", "q", "k", "k", "k"])
        return Int(name, 0, self.sizes[name] - 1)

    def integer(self, depth: int = 2) -> Int:
        rng = self.rng
        if depth == 0 or rng.random() < 0.25:
            return self.position()
        kind = rng.randrange(20)
        if kind <= 3:
            return Int("(q - k)", 1 - self.keys, self.queries - 1)
        if kind == 4:
            return Int("(q + k)", 0, self.queries + self.keys - 2)
        if kind == 5:
            return self.looked_up()
        if kind == 6:
            return self.wrapped()
        if kind == 7:
            return self.through_floats()
        if kind == 8:
            return Int(f"({self.boolean(0)} + {self.boolean(0)})", 0, 1, True)
        x, y = self.integer(depth - 1), self.integer(depth - 1)
        return replace(self.arithmetic(x, y, depth), narrow=x.narrow or y.narrow)

    def arithmetic(self, x: Int, y: Int, depth: int) -> Int:
        rng = self.rng
        kind, n = rng.randrange(9, 22), rng.choice([1, 2, 3, 4, 7])
        big = max(abs(x.low), abs(x.high), abs(y.low), abs(y.high)) > 2**20
        if kind == 9:
            return Int(f"({x.text} + {y.text})", x.low + y.low, x.high + y.high)
        if kind == 10:
            return Int(f"({x.text} - {y.text})", x.low - y.high, x.high - y.low)
        if kind == 11 and not big:
            return Int(f"({x.text} * {n})", x.low * n, x.high * n)
        if kind == 12:
            return Int(f"({x.text} // {n})", x.low // n, x.high // n)
        if kind == 13:
            return Int(f"({x.text} % {n})", 0, n - 1)
        if kind == 14:
            return Int(f"{x.text}.abs()" if x.text[-1] == ")" else f"({x.text}).abs()", 0, max(abs(x.low), abs(x.high)))
        if kind == 15:
            low, high = rng.choice([(-n, n), (0, n), (-n, n - 1)])
            return Int(f"torch.clamp({x.text}, {low}, {high})", low, high)
        if kind == 16:
            return Int(f"torch.maximum({x.text}, {y.text})", max(x.low, y.low), max(x.high, y.high))
        if kind == 17:
            return Int(f"torch.minimum({x.text}, {y.text})", min(x.low, y.low), min(x.high, y.high))
        if kind == 18:
            return Int(f"torch.where({self.boolean(1)}, {x.text}, {y.text})", min(x.low, y.low), max(x.high, y.high))
        if kind == 19:
            return Int(f"({x.text}).to(torch.{rng.choice(['int64', 'int32'])})", x.low, x.high)
        if kind == 20:
            return Int(f"({n} - {x.text})", n - x.high, n - x.low)
        return x

    def looked_up(self) -> Int:
        """A value of an integer table: documents, shortest-path distances, time stamps."""
        rng = self.rng
        kind = rng.randrange(5)
        high = rng.choice([3, 7, 30])
        if kind == 0:
            return Int(f"{self.integer_table(high, self.batch, self.queries)}[b, q]", 0, high, True)
        if kind == 1:
            return Int(f"{self.integer_table(high, self.batch, self.keys)}[b, k]", 0, high, True)
        if kind == 2:
            return Int(f"{self.integer_table(high, self.batch, self.queries, self.keys)}[b, q, k]", 0, high, True)
        if kind == 3:
            n = max(self.queries, self.keys)
            stamps = self.input(f"(1_700_000_000 + torch.arange({n}) * 3).to(device)", "i")
            return Int(f"({stamps}[q] - {stamps}[k])", -3 * n, 3 * n)
        return Int(f"{self.integer_table(high, self.keys)}[k]", 0, high, True)

    def wrapped(self) -> Int:
        """Integer arithmetic that wraps around."""
        rng = self.rng
        n = max(self.queries, self.keys)
        kind = rng.randrange(3)
        if kind == 0:
            name = self.input(f"torch.randint(256, ({n},), generator=g).to(device, torch.uint8)", "i")
            return Int(f"({name}[q] {rng.choice('+-')} {name}[k])", 0, 255, True)
        if kind == 1:
            return Int(f"({rng.choice(['q - k', 'k - q'])}).to(torch.uint8)", 0, 255, True)
        return Int(
            f"(({rng.choice(['q', 'k'])} * 37).to(torch.int8) - ({rng.choice(['q', 'k'])} * 11).to(torch.int8))",
            -128,
            127,
            True,
        )

    def through_floats(self) -> Int:
        """Integers by way of floats, exactly rounded whatever the order of evaluation."""
        rng = self.rng
        kind = rng.randrange(5)
        n = rng.choice([2, 4])
        if kind == 0:
            return Int(f"(k / {n}).floor().long()", 0, (self.keys - 1) // n)
        if kind == 1:
            return Int(f"((q - k).float() / {n}).int()", -((self.keys - 1) // n), (self.queries - 1) // n)
        if kind == 2:
            far = rng.choice(["16777216.0", "16777214.0", "33554432.0"])
            return Int(f"((k.float() + {far}) - (q.float() + {far})).long()", -self.queries - 4, self.keys + 4)
        if kind == 3:
            return Int("(k.float() * 16777213 - q.float() * 16777213).long()", -(2**32), 2**32)
        return Int("q.to(torch.bfloat16).to(torch.int32)" if self.queries < 256 else "q", 0, self.queries - 1)

    def index(self, x: Int, size: int) -> str:
        """An index of a dim of that size."""
        if x.low >= 0 and x.high < size and not x.narrow:
            return x.text
        if not x.narrow and x.low >= -size and x.high < size and self.rng.random() < 0.5:
            return x.text
        text = x.text if x.text[-1] in ")]" else f"({x.text})"
        # The remainder of uint8 or int8 by a larger size wraps: make room first.
        return f"({text}.long() % {size})"

    # ------------------------------------------------ booleans

    def boolean(self, depth: int = 1) -> str:
        rng = self.rng
        kind = rng.randrange(8)
        if depth and kind == 0:
            return f"({self.boolean(0)} {rng.choice('&|')} {self.boolean(0)})"
        if kind == 1:
            return f"(~{self.boolean(0)})" if depth else "(q != k)"
        if kind == 2:
            name = self.input(f"(torch.rand([{self.keys}], generator=g) > 0.3).to(device)", "m")
            return f"{name}[k]"
        if kind == 3:
            return f"({self.integer(1).text} {rng.choice(['>', '<=', '=='])} {rng.choice([0, 1, 3])})"
        return f"({rng.choice(['q >= k', 'q > k', 'k > 5', 'q - k < 8', 'h > 0', 'q == 0', 'k < q'])})"

    # ------------------------------------------------ floats

    def read(self) -> str:
        """A value of a learned table."""
        rng = self.rng
        kind = rng.randrange(24)
        q, k, b, h = self.queries, self.keys, self.batch, self.heads
        if kind == 0:
            return self.table()
        if kind <= 2:
            return f"{self.table(h)}[h]"
        if kind == 3:
            return rng.choice(
                [
                    f"{self.table(h, k)}[h, k]",
                    f"{self.table(h, q)}[h, q]",
                    f"{self.table(b, h)}[b, h]",
                    f"{self.table(b, h, q)}[b, h, q]",
                    f"{self.table(b, h, k)}[b, h, k]",
                ]
            )
        if kind == 4:
            return f"{self.table(h, q + k)}[h, q - k + {k}]"
        if kind == 5:
            size = max(q, k)
            return f"{self.table(h, size)}[h, {rng.choice(['q - k', 'k - q', '(q - k).abs()'])}]"
        if kind == 6:
            return f"{self.table(h, q, k)}[h, q, k]"
        if kind == 7:
            return f"{self.table(b, h, q, k)}[b, h, q, k]"
        if kind == 8:
            return f"{self.table(h, k)}[h][k]"
        if kind == 9:
            n = rng.choice([3, 5])
            return f"{self.table(n, 2)}[{self.index(self.integer(1), n)}][{self.index(self.integer(1), 2)}]"
        if kind == 10:
            n = rng.choice([5, 9])
            weight = self.table(n, h)
            return f"F.embedding({self.index(self.integer(1), n)}, {weight})[h]"
        if kind == 11:
            d = rng.choice([3, 4])
            a, c = self.table(b, h, q, d), self.table(b, h, k, d)
            return rng.choice([f"({a}[b, h, q] * {c}[b, h, k]).sum(-1)", f"torch.dot({a}[b, h, q], {c}[b, h, k])"])
        if kind == 12:
            n = rng.choice([4, 6])
            x, y = self.integer(2), self.integer(2)
            return f"{self.table(h, n, n)}[h, {self.index(x, n)}, {self.index(y, n)}]"
        if kind == 13:
            n = 31
            spd = self.integer_table(30, b, q, k)
            return (
                f"{self.table(n, h)}[{spd}[b, q, k].long(), h]"
                if rng.random() < 0.5
                else f"{self.table(n, h)}[{spd}[b, q, k], h]"
            )
        n = rng.choice([3, 8, 33, max(q, k)])
        x = self.integer(2)
        text = self.index(x, n)
        return rng.choice(
            [
                f"{self.table(n)}[{text}]",
                f"{self.table(h, n)}[h, {text}]",
                f"{self.table(h, n)}[h, {text}]",
                f"{self.table(n, h)}[{text}, h]",
                f"{self.table(b, n)}[b, {text}]",
            ]
        )

    def value(self, depth: int = 2) -> str:
        rng = self.rng
        if depth == 0 or rng.random() < 0.3:
            return self.read()
        kind = rng.randrange(15)
        x = self.value(depth - 1)
        if kind <= 2:
            return f"({x} {rng.choice('+-*')} {self.value(depth - 1)})"
        if kind == 3:
            return f"torch.{rng.choice(['tanh', 'sigmoid', 'sin'])}({x})"
        if kind == 4:
            return rng.choice([f"F.softplus({x})", f"torch.exp(-{x}.abs())", f"F.relu({x})"])
        if kind == 5:
            i = self.integer(1)
            return f"({x} * {i.text} * {rng.choice([0.05, 0.01]) if max(abs(i.low), abs(i.high)) < 300 else 1e-9})"
        if kind == 6:
            return f"torch.where({self.boolean()}, {x}, {self.value(depth - 1)})"
        if kind == 7:
            return f"torch.where({self.boolean()}, {x}, {rng.choice(['torch.zeros_like(s)', 'torch.full_like(s, 0.5)', '0.0', 'torch.ones_like(' + self.read() + ')', 's * 0.5'])})"
        if kind == 8:
            return f"{x}.detach()" if rng.random() < 0.5 else f"({x} + {self.read()}.detach())"
        if kind == 9:
            return (
                f"({x} + {self.boolean()} + {self.boolean()})"
                if rng.random() < 0.3
                else f"({x} + ({self.boolean()} + {self.boolean()}))"
            )
        if kind == 10:
            i = self.integer(2)
            return f"({x} - {i.text} * {0.02 if max(abs(i.low), abs(i.high)) < 300 else 1e-10})"
        if kind == 11:
            n = max(self.queries, self.keys)
            stamps = self.input(f"(1_700_000_000 + torch.arange({n})).to(device)", "i")
            return f"({x} - ({stamps}[q] - {stamps}[k]))"
        return x

    def statements(self) -> str:
        """The body's lines; what is returned is an expression."""
        rng = self.rng
        kind = rng.randrange(12)
        x = self.value()
        if kind == 0:
            self.lines += [
                f"x = {x} * 1.0",
                rng.choice(
                    [
                        "x.mul_(2.0)",
                        "x.add_(0.5)",
                        "x.mul_(0.5).add_(1.0)",
                        "x.neg_()",
                        "x += 0.25",
                        "F.relu(x, inplace=True)",
                        "x.tanh_()",
                    ]
                ),
            ]
            x = "x"
        elif kind == 1:
            self.lines += [
                rng.choice(
                    [f"s.mul_({self.table(self.heads)}[h])", f"s += {self.read()}", "s.mul_(0.5)", "F.relu(s, inplace=True)"]
                )
            ]
            if rng.random() < 0.8:
                self.lines.insert(0, "s = s * 1.0")
        elif kind == 2:
            self.lines += ["with torch.no_grad():", f"    x = {x}"]
            x = rng.choice(["x", "x", f"x + {self.read()}"])
        elif kind == 3:
            self.lines += [f"x = {x}", f"y = x + {self.read()}"]
            x = "x * y"
        kind = rng.randrange(13)
        if kind == 0:
            return x
        if kind == 1:
            return f"torch.where({self.boolean()}, s, {x})"
        if kind == 2:
            return f"torch.where({self.boolean()}, s + {x}, s)"
        if kind == 3:
            return f"torch.tanh(s / 4) * 4 + {x}"
        if kind == 4:
            return f"s * {x}"
        if kind == 5:
            return f"s * {self.read()} + {x}"
        if kind == 6:
            return f"torch.where(q >= k, s + {x}, -float('inf'))"
        if kind == 7:
            return f"{x} + s - {self.read()}"
        return f"s + {x}"

    def mask(self) -> str | None:
        """A mask_mod, as an expression; what it captures becomes an input."""
        rng = self.rng
        kind = rng.randrange(7)
        if kind == 0:
            return "q >= k"
        if kind == 1:
            return f"(q >= k) & (q - k < {rng.choice([2, 5, 20])})"
        if kind == 2:
            n = max(self.queries, self.keys)
            return f"{self.input(f'(torch.arange({n}) // {rng.choice([3, 10])}).to(device)', 'doc')}[q] == DOC[k]"
        if kind == 3:
            return f"(q - k).abs() <= {rng.choice([0, 4])}"
        return None

    def program(self) -> str:
        rng, d = self.rng, self.dtype

        def tensor(heads: int, length: int, dim: int) -> str:
            grad = ".requires_grad_()" if rng.random() < 0.93 else ""
            return f"torch.randn([{self.batch}, {heads}, {length}, {dim}], generator=g).to(device, torch.{d}){grad}"

        query = tensor(self.heads, self.queries, self.dim)
        key, value = tensor(self.kv_heads, self.keys, self.dim), tensor(self.kv_heads, self.keys, self.v_dim)
        returned = self.statements()
        mask = self.mask()
        options, body = ["score_mod=score_mod"], []
        inputs = [("query", query), ("key", key), ("value", value), *self.inputs]
        if mask:
            if "DOC" in mask:
                mask = mask.replace("DOC", self.inputs[-1][0])
            block = rng.choice([16, 32, 64, 128])
            made = (
                f"create_block_mask(lambda b, h, q, k: {mask}, {rng.choice([self.batch, None])}, None, "
                f"{self.queries}, {self.keys}, device=device, BLOCK_SIZE={block})"
            )
            inside = rng.random() < 0.2
            if inside:
                body.append("mask = " + made.replace("device=device", "device=query.device"))
            else:
                inputs.append(("mask", made))
            options.append("block_mask=mask")
        if self.kv_heads != self.heads:
            options.append("enable_gqa=True")
        if rng.random() < 0.12:
            options.append("return_lse=True")
        names = ", ".join(n for n, _ in inputs)
        lines = ["import torch", "import torch.nn.functional as F"]
        lines += ["from torch.nn.attention.flex_attention import create_block_mask, flex_attention", "", ""]
        lines += ["def make(g, device):", *(f"    {n} = {t}" for n, t in inputs), f"    return [{names}]", "", ""]
        lines += [f"def program({names}):", *("    " + line for line in body)]
        lines += [
            "    def score_mod(s, b, h, q, k):",
            *("        " + line for line in self.lines),
            f"        return {returned}",
            "",
        ]
        return "\n".join([*lines, f"    return flex_attention(query, key, value, {', '.join(options)})", ""])


def generate(seed: int, dtype: str = "any") -> Program:
    """The program of a seed."""
    chosen = random.Random(f"dtype{seed}").choice(DTYPES) if dtype == "any" else dtype
    dynamic = True if random.Random(f"dynamic{seed}").random() < 0.08 else None
    return Program("score_mods", seed, _ScoreMod(seed, chosen).program(), chosen, dynamic)
