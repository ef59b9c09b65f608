"""flex_attention with random score_mods over learned and integer tables, masks, shapes and dtypes.

Integers have the range of their values, so every index is in range (or negative, as indexing allows). Small errors must not
become large ones: no floats are compared, and a float that is cast to an integer is a multiple of a power of two.
"""

from __future__ import annotations

import random
import re

from .integers import Integers
from .program import Program

DTYPES = ("float32", "float32", "float32", "float32", "bfloat16", "bfloat16", "float64")
_LENGTHS = (1, 2, 7, 16, 31, 33, 48, 65, 130)


class _ScoreMod(Integers):
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

    def table(self, *shape: int, grad: bool | None = None) -> str:
        """A float table: an existing one of this shape, or a new one."""
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

    # ------------------------------------------------ floats

    def place_in_image(self) -> str:
        """A value for the distance of the rows of two places of an image, and for that of their columns, or nearly so."""
        rng = self.rng
        w = rng.choice([64, 64, 64, 128, 48])
        rows = max(self.queries, self.keys) // w + 1
        dy, dx = rng.choice(
            [
                (f"q // {w} - k // {w} + {rows}", f"q % {w} - k % {w} + {w - 1}"),
                (f"k // {w} - q // {w}", f"(k - k // {w} * {w}) - q % {w}"),
                (f"(k // {w} - q // {w}).abs()", f"(k % {w} - q % {w}).abs()"),
                (f"q // {w} - k // {w} + {rows}", f"(q - k) % {2 * w - 1}"),
                (f"q // {w} + k // {w}", f"q % {w} - k % {w}"),
            ]
        )
        return rng.choice(
            [
                f"{self.table(self.heads, 2 * rows + 1, 2 * w)}[h, {dy}, {dx}]",
                f"{self.table(2 * rows + 1, 2 * w, self.heads)}[{dy}, {dx}, h]",
                f"{self.table(8 * (rows + 1) * w)}[({dy}) * {2 * w} + {dx}]",
                f"{self.table(2 * rows + 1)}[{dy}] * {self.table(2 * w)}[{dx}]",
            ]
        )

    def read(self) -> str:
        """A value of a learned table."""
        rng = self.rng
        kind = rng.randrange(26)
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
            inner = rng.choice([f"({a}[b, h, q] * {c}[b, h, k]).sum(-1)", f"torch.dot({a}[b, h, q], {c}[b, h, k])"])
            return rng.choice(
                [inner, inner, f"{inner} * {rng.choice([0.0, -0.5, 3.0, 0.25])}", f"({inner} * {self.table(h)}[h])"]
            )
        if kind == 12:
            n = rng.choice([4, 6])
            x, y = self.integer(2), self.integer(2)
            return f"{self.table(h, n, n)}[h, {self.index(x, n)}, {self.index(y, n)}]"
        if kind >= 24:
            return self.place_in_image()
        if kind == 13:
            n = 31
            spd = self.integer_table(30, b, q, k)
            return (
                f"{self.table(n, h)}[{spd}[b, q, k].long(), h]"
                if rng.random() < 0.5
                else f"{self.table(n, h)}[{spd}[b, q, k], h]"
            )
        if kind == 14:
            w = rng.choice([4, 16, 64])
            return rng.choice(
                [
                    f"{self.table(b, h, q, k // w + 1)}[b, h, q, k // {w}]",
                    f"{self.table(b, h, q, w)}[b, h, q, k % {w}]",
                    f"{self.table(h, w, k)}[h, q % {w}, k]",
                    f"{self.table(h, w, w)}[h, q % {w}, k % {w}]",
                    f"{self.table(b, h, q, q + k)}[b, h, q, q - k + {k}]",
                    f"{self.table(h, q + k, k)}[h, k - q, k]",
                    f"{self.table(b, h, q, 2 * w)}[b, h, q, (q - k).clamp(-{w}, {w - 1}) + {w}]",
                    f"{self.table(b, h, k, 2 * w)}[b, h, k, (k - q).clamp(-{w}, {w - 1})]",
                    *self.models(),
                ]
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

    def models(self) -> list[str]:
        """Relative shifts whose rows are aligned, and pairs of the segments of the query and the key."""
        q, k, b, h = self.queries, self.keys, self.batch, self.heads
        columns = -(-(q + k) // 8) * 8 + 7
        n, m = self.rng.choice([2, 8]), self.rng.choice([3, 20])
        of_query, of_key = self.integer_table(n - 1, b, q), self.integer_table(m - 1, b, k)
        return [
            f"{self.table(b, h, q, columns)}[b, h, q, q - k + {k - 1}]",
            f"{self.table(h, q, columns)}[h, q, q - k + {k - 1}]",
            f"{self.table(h, n, m)}[h, {of_query}[b, q], {of_key}[b, k]]",
            f"{self.table(m, n, h)}[{of_key}[b, k], {of_query}[b, q] - {n}, h]",
        ]

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

    def integer_term(self) -> str:
        """A sum or difference whose result would be different in floats: booleans, bytes that wrap, time stamps."""
        rng = self.rng
        n = max(self.queries, self.keys)
        kind = rng.randrange(5)
        if kind <= 1:
            return f"(({self.boolean(0)}) + {self.boolean(0)})"
        if kind == 2:
            name = self.input(f"torch.randint(4, ({n},), generator=g).to(device, torch.uint8)", "i")
            return f"({name}[q] {rng.choice('+-')} {name}[k])"
        stamps = self.input(f"(1_700_000_000 + torch.arange({n})).to(device)", "i")
        return rng.choice([f"({stamps}[q] - {stamps}[k])", f"({stamps}[q] - {stamps}[k]) * 0.1"])

    def statements(self) -> str:
        """The lines of the body, and the returned expression."""
        rng = self.rng
        kind = rng.randrange(16)
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
        kind = rng.randrange(20)
        if kind >= 17:
            return self.score_used_again(x)
        if kind >= 13:
            # A sum has a term that is a sum of booleans or integers, and this term must not be split.
            term, rows = self.integer_term(), (self.heads, self.queries)
            if kind < 16:
                # A rewrite takes this out of the sum: a term without a key, or two terms with the same footprint.
                two = f"{self.table(self.heads, self.keys)}[h, k] + {self.table(self.keys)}[k]"
                x = rng.choice([f"{self.table(self.heads)}[h]", f"{self.table(*rows)}[h, q]", two])
            return f"s + {x} {'+' if term.startswith('((') else rng.choice('+-')} {term}"
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

    def score_used_again(self, x: str) -> str:
        """A sum in which the score, or a sum of it, occurs more than once. Such a sum is not the score plus terms."""
        rng = self.rng
        self.lines.append(f"y = {rng.choice([f's + {x}', f'{x} - s', f'{x} + {self.read()}', 's'])}")
        again = [f"y + s * {self.read()}", f"s + y + {x}", f"y * 0.5 + s - y * {self.read()}", "s + torch.tanh(y) + y"]
        return rng.choice([*again, "s + y * y * 0.1", f"y + s + {self.read()} * y.detach()"])

    def mask(self) -> str | None:
        """A mask_mod as an expression. The tensors that it captures become inputs."""
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
        text = "\n".join([*self.lines, returned, mask or "", *body])
        inputs = [(n, t) for n, t in inputs if n in ("query", "key", "value", "mask") or re.search(rf"\b{n}\b", text)]
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
    """Make the program of a seed."""
    chosen = random.Random(f"dtype{seed}").choice(DTYPES) if dtype == "any" else dtype
    dynamic = True if random.Random(f"dynamic{seed}").random() < 0.08 else None
    return Program("score_mods", seed, _ScoreMod(seed, chosen).program(), chosen, dynamic)
