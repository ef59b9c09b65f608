"""Integer and boolean expressions of a score_mod, with the range of their values."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Int:
    """An integer expression and the range of its values. ``narrow``: its dtype wraps early, or makes an index a mask."""

    text: str
    low: int
    high: int
    narrow: bool = False


class Integers:
    """Draws expressions of b, h, q, k and integer tables. ``inputs`` are the tables that they read."""

    rng: random.Random
    inputs: list[tuple[str, str]]
    sizes: dict[str, int]
    batch: int
    queries: int
    keys: int

    def input(self, text: str, prefix: str) -> str:
        name = f"{prefix}{len(self.inputs)}"
        self.inputs.append((name, text))
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
        kind, n = rng.randrange(9, 24), rng.choice([1, 2, 3, 4, 7])
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
        # One operand may be used twice, and a square grows as no multiple of a position does.
        other = x if rng.random() < 0.5 else y
        ends = [a * c for a in (x.low, x.high) for c in (other.low, other.high)]
        if kind == 21 and max(map(abs, ends)) < 2**20:
            return Int(f"({x.text} * {other.text})", min(ends), max(ends))
        return x

    def looked_up(self) -> Int:
        """A value of an integer table, such as documents, shortest-path distances or time stamps."""
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
        """An integer computed through floats. It is exact in any order of evaluation."""
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
        """An index of a dim of this size."""
        if x.low >= 0 and x.high < size and not x.narrow:
            return x.text
        if not x.narrow and x.low >= -size and x.high < size and self.rng.random() < 0.5:
            return x.text
        text = x.text if x.text[-1] in ")]" else f"({x.text})"
        # The remainder of uint8 or int8 by a larger size wraps, so it is cast to a wider dtype first.
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
