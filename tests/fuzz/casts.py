"""Chains of casts through ops that move values, with tensors that are changed in place before or after.

The reference is eager mode: values, dtypes, strides, shared memory of outputs, and the inputs after the call.
"""

from __future__ import annotations

import random
import re

import torch
from torch import Tensor

from .program import Program, Writer

DTYPES = ("float32", "float32", "bfloat16", "bfloat16", "float16", "float64")
_FLOATS = ("float32", "float32", "bfloat16", "bfloat16", "float16", "float64")
_INTEGERS = ("int64", "int32", "int16", "uint8")
_METHODS = {"float32": ".float()", "bfloat16": ".bfloat16()", "float16": ".half()", "float64": ".double()"}


class _Casts:
    def __init__(self, seed: int, dtype: str, keeping: random.Random | None = None) -> None:
        self.rng = random.Random(seed)
        #: Chooses a product that keeps an operand for the backward, if there is to be one.
        self.keeping = keeping
        self.dtype = dtype
        self.w = Writer(self.rng)
        self.pool: list[str] = []
        self.buffers: list[str] = []
        #: Casts to integers round. They are exact only after ops that are casts or that move values.
        self.exact = self.rng.random() < 0.6

    def new_input(self, buffer: bool) -> None:
        rng = self.rng
        shape = rng.choice([[4, 6], [4, 6], [6, 4], [2, 3, 4], [8], [4, 4], [1, 6]])
        kind = self.dtype if rng.random() < 0.7 else rng.choice(_FLOATS)
        if rng.random() < 0.12:
            text = f"torch.randint(0, 100, {shape}, generator=g).to(device, torch.{rng.choice(_INTEGERS)})"
        else:
            text = f"(torch.randn({shape}, generator=g) * 3).to(device, torch.{kind})"
            if not buffer and rng.random() < 0.6:
                text += ".requires_grad_()"
            elif rng.random() < 0.15:
                text = f"{text}.t()" if len(shape) == 2 else text
        name = self.w.input(text, "buf" if buffer else "x")
        self.pool.append(name)
        if buffer:
            self.buffers.append(name)

    def value(self, name: str) -> Tensor:
        return self.w.values[name]

    def cast(self, x: str) -> str:
        rng, t = self.rng, self.value(x)
        kind = rng.choice(_FLOATS)
        if rng.random() < 0.4:
            # A cast back to a dtype that it may have come from, which makes a round trip.
            inputs = [str(self.value(n).dtype).removeprefix("torch.") for n, _ in self.w.inputs]
            kind = rng.choice([k for k in inputs if k in _METHODS] or [kind])
        # Autograd refuses to read a part of a split whose base has changed. Its values are there all the same.
        with torch.no_grad():
            finite = not t.is_floating_point() or bool(t.isfinite().all())
        if rng.random() < 0.08 and self.exact and finite:
            return f"{x}.to(torch.{rng.choice(('int64', 'int32'))})"
        copy = ", copy=True" if rng.random() < 0.05 else ""
        if rng.random() < 0.5 and not copy:
            return x + _METHODS[kind]
        return f"{x}.to(torch.{kind}{copy})"

    def move(self, x: str) -> str:
        rng, t = self.rng, self.value(x)
        n, dim = t.shape[0] if t.dim() else 1, t.dim()
        last = f"{dim - 1}"
        choices = [
            f"{x}.reshape(-1)",
            f"{x}.flatten()",
            f"{x}[:{max(1, n - 1)}]",
            f"{x}[1:]",
            f"{x}[0]",
            f"{x}[None]",
            f"{x}.unsqueeze(-1)",
            f"{x}.expand(2, {', '.join(map(str, t.shape))})",
            f"torch.cat([{x}, {x}])",
            f"{x}.split({max(1, n // 2)})[0]",
            f"{x}.split({max(1, n // 2)})[-1]",
            f"{x}.chunk(2, -1)[0]",
            f"{x}.clone()",
            f"{x}.contiguous()",
            f"{x}.transpose(0, {last})",
            f"{x}.permute({', '.join(map(str, reversed(range(dim))))})",
            f"{x}.flip(0)",
            f"{x}.index_select(0, torch.tensor([0, {n - 1}], device={x}.device))",
            f"{x}[torch.arange({n}, device={x}.device).flip(0)]",
            f"{x}.squeeze(0)",
            f"{x}.repeat({', '.join(['2'] + ['1'] * (dim - 1))})",
            f"{x}.narrow(0, {n // 2}, {n - n // 2})",
            f"{x}.detach()",
            f"torch.stack([{x}, {x}])",
        ]
        same = [y for y in self.pool if self.value(y).shape == t.shape and y != x]
        if same:
            y = rng.choice(same)
            choices += [
                f"torch.cat([{x}, {y}])",
                f"torch.stack([{x}, {y}.to({x}.dtype)])",
                f"torch.where({x} == {x}, {x}, {y}.to({x}.dtype))",
            ] * 2
        if t.numel() % 2 == 0:
            choices += [f"{x}.view(2, -1)" if t.is_contiguous() else f"{x}.reshape(2, -1)"]
        return rng.choice(choices)

    def compute(self, x: str) -> str:
        rng, t = self.rng, self.value(x)
        if not t.is_floating_point():
            return f"{x} * 2"
        choices = [
            f"{x} * 2",
            f"{x} + 1",
            f"torch.tanh({x})",
            f"{x} * {x}",
            f"F.silu({x})",
            f"{x}.sum(-1)" if t.dim() else x,
            f"-{x}",
        ]
        if t.dim() == 2:
            choices += [f"{x} @ {x}.t()"] * 2
        return rng.choice(choices)

    def change(self) -> None:
        """Change a tensor in place: a buffer, or any tensor of the program that has no gradient."""
        rng = self.rng
        made = [x for x in self.pool if x not in self.buffers and not x.startswith("x")]
        # A tensor that overlaps itself has no defined value after a change in place.
        targets = [x for x in made if not self.value(x).requires_grad and 0 not in self.value(x).stride()]
        x = (
            rng.choice(self.buffers)
            if self.buffers and (rng.random() < 0.7 or not targets)
            else rng.choice(targets)
            if targets
            else None
        )
        if x is None:
            return
        t = self.value(x)
        choices = [f"{x}.add_(1)", f"{x}.mul_(2)", f"{x}[0] = 3", f"{x}.zero_()", f"{x}.copy_({x}.flip(0))"]
        same = [y for y in self.pool if self.value(y).shape == t.shape and y != x]
        if same:
            choices += [f"{x}.copy_({rng.choice(same)}.detach())"] * 2
        if t.is_contiguous():
            choices.append(f"{x}.view(-1)[0].neg_()" if t.dtype.is_signed else f"{x}.view(-1)[0].zero_()")
        self.w.statement(rng.choice(choices))

    def kept(self, rng: random.Random) -> str | None:
        """A product of which a round trip of casts is an operand that is kept for the backward."""
        floats = [x for x in dict.fromkeys([*self.pool, *self.buffers]) if self.value(x).is_floating_point()]
        if not floats:
            return None
        x = rng.choice(floats)
        narrow = str(self.value(x).dtype)
        if self.value(x).dim() == 2:
            move = rng.choice(["", ".t()", ".reshape(-1)", "[1:]", ".flip(0)"])
        else:
            move = rng.choice(["", ".reshape(-1)", "[1:]", ".unsqueeze(0)"])
        trip = self.w.add(f"{x}.to(torch.{rng.choice(['float32', 'float64'])}){move}.to({narrow})")
        if trip is None:
            return None
        made = f"torch.randn({list(self.value(trip).shape)}, generator=g).to(device, {narrow}).requires_grad_()"
        learned = self.w.input(made, "x")
        products = [f"{learned} * {trip}"]
        if self.value(trip).dim() == 2:
            products += [f"{learned} @ {trip}.t()", f"F.linear({learned}, {trip})", f"{learned}[None] @ {trip}[None].mT"]
        return self.w.add(rng.choice(products))

    def program(self) -> tuple[str, list[str]]:
        rng = self.rng
        for _ in range(rng.choice([1, 1, 2])):
            self.new_input(buffer=False)
        if rng.random() < 0.6:
            for _ in range(rng.choice([1, 1, 2])):
                self.new_input(buffer=True)
        start = len(self.pool)
        for _ in range(rng.randint(2, 9)):
            x = rng.choice([*self.pool[-2:], self.pool[-1], rng.choice(self.pool), *self.buffers])
            r = rng.random()
            if r < (0.3 if self.buffers else 0.12) and (self.buffers or len(self.pool) > start):
                self.change()
                continue
            text = self.cast(x) if r < 0.7 else self.move(x) if self.exact or r < 0.88 else self.compute(x)
            name = self.w.add(text)
            if name and isinstance(self.value(name), Tensor) and self.value(name).numel() <= 2000:
                self.pool.append(name)
        made = self.pool[start:]
        if not made:
            return "", []
        returned = list(dict.fromkeys([made[-1], *rng.sample(made, min(len(made), rng.choice([0, 1, 1, 2])))]))
        if self.buffers and rng.random() < 0.1:
            returned.append(rng.choice(self.buffers))
        if self.keeping is not None and (name := self.kept(self.keeping)) is not None:
            returned.append(name)
        source = self.w.source(returned, effects=True)
        return (self.as_module(source) if self.buffers and rng.random() < 0.3 else source), returned

    def as_module(self, source: str) -> str:
        """The program as a module with buffers."""
        head, body = source.split("\ndef program(")
        arguments, body = body.split("):\n", 1)
        used = [b for b in self.buffers if b in arguments]
        if not used:
            return source
        others = [a for a in arguments.split(", ") if a not in used]
        registered = [f'    m.register_buffer("{b}", {b})' for b in used]
        head = re.sub(
            r"\n    return \[.*\]",
            "\n".join(["", "    m = torch.nn.Module()", *registered, f"    return [{', '.join(['m', *others])}]"]),
            head,
        )
        body = re.sub(r"\b(buf\d+)\b", r"m.\1", body)
        return f"{head}\ndef program({', '.join(['m', *others])}):\n{body}"


def generate(seed: int, dtype: str = "any") -> Program:
    """Make the program of a seed."""
    attempt = seed
    for _ in range(50):
        chosen = random.Random(f"dtype{seed}").choice(DTYPES) if dtype == "any" else dtype
        # Drawn apart, so that a seed writes the same program as before anything was overwritten.
        other = random.Random(f"overwrites{seed}")
        overwrites = other.randrange(12) if other.random() < 0.3 else -1
        with torch.no_grad():
            casts = _Casts(attempt, chosen, other if overwrites >= 0 else None)
        source, returned = casts.program()
        if returned:
            return Program("casts", seed, source, chosen, None, casts.exact, strides=True, overwrites=overwrites)
        attempt += 1_000_003
    raise RuntimeError(f"seed {seed} makes no program")
