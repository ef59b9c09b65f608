"""Programs that compute an index and gather or scatter by it: what the proofs about permutations have to survive."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from .program import Program, Writer

DTYPES = ("float32", "float32", "float32", "bfloat16", "bfloat16", "float16", "float64")
_NARROW = ("int8", "int16", "int32", "uint8", "int64")
_THROUGH = ("float32", "bfloat16", "float16", "float64")


class _Indices:
    """Draws statements that make index tensors and statements that use them."""

    def __init__(self, seed: int, dtype: str) -> None:
        self.rng = random.Random(seed)
        self.dtype = dtype
        self.w = Writer(self.rng)
        self.rows = self.rng.choice([4, 6, 8, 8, 12, 16, 24, 40, 60, 300])
        self.columns = self.rng.choice([1, 3, 4, 5, 8, self.rows if self.rows <= 16 else 2])
        self.indices: list[str] = []
        self.floats: list[str] = []

    # ------------------------------------------------ inputs

    def float_input(self, *shape: int, grad: bool = True) -> str:
        made = f"torch.randn({list(shape)}, generator=g).to(device, torch.{self.dtype})"
        return self.w.input(made + (".requires_grad_()" if grad else ""), "x")

    def key(self, n: int) -> str:
        """A tensor of distinct numbers in random order."""
        kind = self.rng.choice(["float32", "float32", "int64", "float64", "int32"])
        return self.w.input(f"torch.randperm({n}, generator=g).to(device, torch.{kind})", "key")

    def random_index(self, n: int, bound: int) -> str:
        kind = self.rng.choice(["int64", "int64", "int32"])
        return self.w.input(f"torch.randint({bound}, ({n},), generator=g).to(device, torch.{kind})", "i")

    # ------------------------------------------------ making indices

    def _value(self, name: str) -> Tensor:
        return self.w.values[name]

    def _whole(self, name: str) -> bool:
        value = self._value(name)
        return not value.dtype.is_floating_point and value.dtype != torch.bool

    def _unique(self, name: str) -> bool:
        value = self._value(name)
        return value.numel() == value.unique().numel()

    def start(self) -> None:
        rng, n = self.rng, self.rows
        kind = rng.randrange(9)
        if kind <= 2:
            key = self.key(n)
            how = rng.choice(
                [
                    "{}.argsort()",
                    "{}.sort().indices",
                    "{}.argsort(descending=True)",
                    "{}.sort(stable=True)[1]",
                    "{}.topk({n}).indices",
                ]
            )
            text = how.format(key, n=n)
        elif kind == 3:
            k = rng.randint(1, n)
            text = f"{self.key(n)}.topk({k}, sorted={rng.random() < 0.5}).indices"
        elif kind == 4:
            start, step = rng.choice([0, 0, 1, 3]), rng.choice([1, 1, 2])
            extra = f", dtype=torch.{rng.choice(_NARROW)}" if rng.random() < 0.4 and n < 100 else ""
            device = f"device={self.any_device()}"
            text = (
                f"torch.arange({start}, {start + step * n}, {step}, {device}{extra})"
                if start or step > 1
                else f"torch.arange({n}, {device}{extra})"
            )
        elif kind == 5:
            text = f"torch.randperm({n}, device={self.any_device()})"
        elif kind == 6:
            self.indices.append(self.random_index(n, rng.choice([n, max(1, n // 2), 2 * n])))
            return
        elif kind == 7:
            m = rng.choice([2, 3, 4])
            made = f"torch.stack([torch.randperm({n}, generator=g) for _ in range({m})]).to(device, torch.float32)"
            key = self.w.input(made, "key")
            text = f"{key}.{rng.choice(['argsort(1)', 'sort(-1).indices', f'topk({rng.randint(1, n)}, 1).indices', 'argsort(1, descending=True)'])}"
        else:
            mask = self.w.input(f"torch.rand({n}, generator=g).gt(0.4).to(device)", "mask")
            text = rng.choice(
                [
                    f"{mask}.nonzero().squeeze(1)",
                    f"torch.where({mask})[0]",
                    f"{mask}.cumsum(0) - 1",
                    f"{mask}.nonzero()[:, 0]",
                ]
            )
        name = self.w.add(text, "p")
        if name:
            self.indices.append(name)

    def any_device(self) -> str:
        if not self.floats:
            self.floats.append(self.float_input(self.rows, self.columns))
        return f"{self.floats[0]}.device"

    def step(self) -> None:
        """One more index from those there are."""
        rng = self.rng
        if not self.indices:
            return
        p = rng.choice(self.indices[-3:])
        value = self._value(p)
        n, dim = value.numel(), value.dim()
        small = rng.choice([1, 2, 2, 3, 4])
        flat = p if dim == 1 else f"{p}.flatten()"
        unique = self._unique(p)
        same = [q for q in self.indices if self._value(q).dim() == 1 and self._value(q).numel() == n and q != p]
        other = rng.choice(same) if same else p
        low = int(value.min())
        in_range = [
            q for q in self.indices if self._value(q).dim() == 1 and int(value.max()) < self._value(q).numel() and low >= 0
        ]
        table = rng.choice(in_range) if in_range else None
        sort_suffix = "" if unique else "stable=True"
        choices = [
            f"{p} // {small}",
            f"{p} % {rng.choice([small + 1, n, max(1, n // 2), self.rows])}",
            f"torch.div({p}, {small}, rounding_mode='{rng.choice(['floor', 'trunc'])}')",
            f"{p} * {small} + {rng.choice([0, 1])}",
            f"{p}.flip(0)",
            f"{flat}.roll({rng.randint(-3, 3)})",
            f"{p}[{rng.choice([0, 1, 2])}:]",
            f"{p}[::{small}]",
            f"{flat}[:{rng.randint(1, n)}]",
            f"torch.cat([{p}, {p} + {n}])",
            f"torch.cat([{flat}[{n // 2}:], {flat}[:{n // 2}]])",
            f"torch.cat([{flat}, {other if self._value(other).dim() == 1 else flat}])",
            f"{flat}.argsort({sort_suffix})",
            f"{flat}.argsort({sort_suffix}).argsort()",
            f"torch.sort({flat}, stable=True).indices",
            f"({p} // {small}).flatten().argsort(stable=True)",
            f"{p}.repeat({small})" if dim == 1 else f"{p}.t()",
            f"{p}.repeat_interleave({small})",
            f"{flat}[:, None].expand(-1, {small}).reshape(-1)",
            f"{flat}.expand({small}, {n}).reshape(-1)",
            f"{flat}[None].expand({small}, -1).flatten()",
            f"{flat}.view(1, -1).expand({rng.choice([1, small, n])}, {n})",
            f"{flat}[:, None].expand({n}, {rng.choice([1, small, n])})",
            f"{flat}[:1][:, None].expand({small}, {small + 1})",
            f"{flat}[:1].expand({small})",
            f"{p}.to(torch.{rng.choice(_NARROW)})",
            f"{p}.to(torch.{rng.choice(_NARROW)}).long()",
            f"{p}.to(torch.{rng.choice(_THROUGH)}).long()",
            f"torch.where({p} > {small}, {p}, {rng.choice([p, small, f'{n} - 1 - {p}'])})",
            f"torch.where({flat} % 2 == 0, {flat}, {other if self._value(other).dim() == 1 else flat})",
            f"{p}.clamp({rng.choice(['0', '1'])}, {rng.choice([n - 1, max(1, n // 2), n + 5])})",
            f"{rng.choice([n - 1, n])} - {p}",
            f"{flat}.masked_fill({flat} > {n // 2}, {n // 2})",
            f"{flat}.cumsum(0) - {flat}",
            f"({flat}[:, None] == torch.arange({self.rows}, device={p}.device)).sum(0).cumsum(0) - 1",
        ]
        if table:
            choices += [f"{table}[{p}]"] * 4 + [
                f"{table}.gather(0, {p}.long())",
                f"{table}.index_select(0, {flat})",
                f"torch.take({table}, {p}.long())",
            ]
        if unique and low >= 0 and int(value.max()) < n:
            places = f"{flat}.long()"
            arange = f"torch.arange({n}, device={p}.device)"
            source = rng.choice(
                [arange, arange, f"{arange}.flip(0)", f"{other if self._value(other).dim() == 1 else flat}.long()"]
            )
            choices += [
                f"torch.empty_like({places}).scatter(0, {places}, {source})",
                f"torch.zeros_like({places}).index_put(({places},), {source})",
                f"torch.zeros_like({places}).index_copy(0, {places}, {source})",
                f"torch.zeros_like({places}).scatter(0, {places}[:{n - 1}], {source})",
                f"{places}.scatter(0, {places}[:{small}], {source}[:{small}])",
            ] * 2
        if dim == 2:
            choices += [
                f"{p}.t()",
                f"{p}.t().reshape(-1)",
                f"{p}[0]",
                f"{p}[:, 0]",
                f"{p}.flatten() // {value.shape[1]}",
                f"{p}.argsort(1)",
            ] * 2
        if rng.random() < 0.12 and n > 2:
            copy = self.w.add(f"{flat}.clone()", "p")
            a, b = rng.randrange(n), rng.randrange(n)
            text = rng.choice(
                [
                    f"{copy}[{a}] = {copy}[{b}]",
                    f"{copy}[{a}] = {copy}[{b}].clone()",
                    f"{copy}[:{small}] = {copy}[-{small}:].clone()",
                    f"{copy}.copy_({copy}.flip(0))",
                    f"{copy} += 1",
                    f"{copy}[1:].zero_()",
                    f"{copy}.view(-1)[{a}] = {b}",
                ]
            )
            if copy and self.w.statement(text):
                self.indices.append(copy)
            return
        name = self.w.add(rng.choice(choices), "p")
        if name and self._whole(name) and self._value(name).numel() <= 1500:
            self.indices.append(name)

    # ------------------------------------------------ using them

    def index_for(self, rows: int, p: str) -> str:
        """``p`` made a valid int64 index of ``rows`` rows, with as little done to it as possible."""
        value = self._value(p)
        text = p
        if value.dtype != torch.int64:
            text = f"{p}.long()"
        if int(value.min()) < 0 or int(value.max()) >= rows:
            text = f"({text} % {rows})"
        return text

    def consume(self) -> None:
        if not self.indices:
            return
        p = self.rng.choice(self.indices[-2:])
        value = self._value(p)
        n = value.numel()
        bound = int(value.max()) + 1 if int(value.min()) >= 0 else n
        result = self._gather(p, bound) if self.rng.random() < 0.45 else self._scatter(p, n, bound)
        if result:
            self.floats.append(result)

    def table(self, bound: int) -> str:
        """A tensor to read: one that is there, or a new one with as many rows as the index needs, or more."""
        rng = self.rng
        there = [x for x in self.floats if self._value(x).dim() >= 1]
        if there and rng.random() < 0.5:
            return rng.choice(there)
        rows = min(bound, 600) if rng.random() < 0.6 else self.rows + rng.choice([0, 0, 1, 3])
        shape = [max(rows, 1), *rng.choice([[], [self.columns], [self.columns], [3, 2]])]
        return self.float_input(*shape)

    def _gather(self, p: str, bound: int) -> str | None:
        rng, value = self.rng, self._value(p)
        x = self.table(bound)
        t = self._value(x)
        rows = t.shape[0]
        i = self.index_for(rows, p)
        flat = i if value.dim() == 1 else f"{i}.flatten()"
        n, columns = value.numel(), t.shape[1] if t.dim() > 1 else 1
        choices = [f"{x}[{i}]"] * 3 + [f"{x}.index_select(0, {flat})", f"torch.ops.aten.index.Tensor({x}, [{i}])"]
        if t.dim() == 1:
            choices += [f"{x}.gather(0, {flat})", f"{x}.take({i})", f"torch.take_along_dim({x}, {flat}, 0)"]
        if t.dim() == 2:
            choices += [
                f"F.embedding({i}, {x}{rng.choice(['', f', padding_idx={rng.randrange(rows)}'])})",
                f"{x}.gather(0, {flat}[:, None].expand(-1, {columns}))",
                f"{x}.gather(0, {flat}[:, None].expand({n}, {columns}))",
                f"{x}.gather(0, {flat}[:{columns}].expand({rng.choice([1, 2, columns, rows])}, -1))",
                f"{x}.gather(1, ({flat} % {columns}).expand({rows}, {n}))",
                f"{x}.gather(-1, ({flat}[:{rows}, None] % {columns}).expand(-1, 2))",
                f"torch.take_along_dim({x}, {flat}[:, None], 0)",
                f"torch.take_along_dim({x}, ({flat}[None] % {columns}), 1)",
                f"{x}[{flat}, {flat} % {columns}]",
                f"{x}[:, {flat} % {columns}]",
                f"{x}[{flat}[:, None], torch.arange({columns}, device={p}.device)]",
                f"{x}[{flat}, None]",
                f"{x}.t()[:, {flat}]",
            ]
        y = self.w.add(rng.choice(choices), "y")
        if y and rng.random() < 0.4:
            shape = list(self._value(y).shape)
            other = (
                self.float_input(*shape) if rng.random() < 0.5 else self.float_input(*([shape[0]] + [1] * (len(shape) - 1)))
            )
            y = self.w.add(f"{y} * {other}", "y") or y
        return y

    def _scatter(self, p: str, n: int, bound: int) -> str | None:
        rng, value = self.rng, self._value(p)
        rows = min(max(bound, 1), 600) + rng.choice([0, 0, 1, 3])
        c = self.columns
        i = self.index_for(rows, p)
        flat = i if value.dim() == 1 else f"{i}.flatten()"
        unique = self._unique(p) and int(value.min()) >= 0
        like = self.floats[0] if self.floats else self.float_input(self.rows, c)
        if not self.floats:
            self.floats.append(like)
        one = rng.random() < 0.25
        shape = [rows] if one else [rows, c]
        base = f"{like}.new_zeros({shape})" if rng.random() < 0.7 else self.float_input(*shape)
        fits = [f for f in self.floats if list(self._value(f).shape) == ([n] if one else [n, c])]
        values = rng.choice(fits) if fits and rng.random() < 0.5 else self.float_input(*([n] if one else [n, c]))
        if one:
            choices = [
                f"{base}.scatter_add(0, {flat}, {values})",
                f"{base}.index_add(0, {flat}, {values})",
                f"{base}.index_put(({flat},), {values}, accumulate=True)",
                f"{base}.index_put(({i},), {values}[0], accumulate=True)",
                f"{base}.index_put(({flat},), {values}[:1], accumulate=True)",
                f"{base}.scatter_reduce(0, {flat}, {values}, '{rng.choice(['sum', 'mean', 'amax'])}', include_self={rng.random() < 0.5})",
            ]
            if unique:
                choices += [
                    f"{base}.scatter(0, {flat}, {values})",
                    f"{base}.index_copy(0, {flat}, {values})",
                    f"{base}.index_put(({flat},), {values})",
                ]
        else:
            narrow = rng.choice([self.w.add, None])
            column, row = self.float_input(n, 1), self.float_input(1, c)
            expanded = f"{flat}[:, None].expand(-1, {c})"
            m, width = min(n, rng.choice([n, c, 2])), min(n, c)
            across = f"{flat}[:{width}].expand({m}, -1)"
            choices = [
                f"{base}.index_add(0, {flat}, {values})",
                f"{base}.index_add(0, {flat}, {values}, alpha={rng.choice([2, -0.5, 1])})",
                f"{base}.index_put(({flat},), {values}, accumulate=True)",
                f"{base}.index_put(({flat},), {column}, accumulate=True)",
                f"{base}.index_put(({flat},), {row}, accumulate=True)",
                f"{base}.index_put(({flat},), {values}[0], accumulate=True)",
                f"{base}.index_put(({flat}, {flat} % {c}), {column}[:, 0], accumulate=True)",
                f"{base}.index_put((None, {flat} % {c}), {values}[:1, :1], accumulate=True)",
                f"{base}.scatter_add(0, {expanded}, {values})",
                f"{base}.scatter_add(0, {flat}[:, None], {values}[:, :1])",
                f"{base}.scatter_add(0, {across}, {values}[:{m}, :{width}])",
                f"{base}.scatter_add(0, {across}, {values}[:{m}, :{width}])",
                f"{base}.scatter_add(1, ({flat}[:{rows}, None] % {c}), {values}[:{rows}, :1])",
                f"{base}.t().index_add(1, {flat}, {values}.t())",
                f"{base}.scatter_reduce(0, {expanded}, {values}, '{rng.choice(['sum', 'mean', 'amax'])}', include_self={rng.random() < 0.5})",
                f"{base}.index_add(0, {flat}, {values}).index_add(0, {flat}.flip(0), {values})",
                f"{base}.index_add(0, {flat}, {values}) + {base}.index_add(0, {flat}, {column} * {values})",
            ]
            if narrow is None:
                choices += [
                    f"{base}.index_add(0, ({flat} // 2), {values} * {column})",
                    f"{base}.index_put((({flat} // 2),), {values}[:, :1], accumulate=True)",
                ]
            if unique:
                choices += [
                    f"{base}.index_copy(0, {flat}, {values})",
                    f"{base}.index_put(({flat},), {values})",
                    f"{base}.index_put(({flat},), {column})",
                    f"{base}.index_put(({flat},), {row})",
                    f"{base}.scatter(0, {expanded}, {values})",
                ]
            m = f"({flat} % 2 == 0)"
            if n == rows or rng.random() < 0.1:
                choices += [
                    f"{values}[{m}]",
                    f"{values}.masked_fill({m}[:, None], 0.5)",
                    f"{base}[:{n}].masked_scatter({m}[:, None], {values})",
                ]
        return self.w.add(rng.choice(choices), "y")

    def mixture_of_experts(self) -> str | None:
        """Dispatch to k experts a token and combine: the program that the rewrites were made for, with variations."""
        rng = self.rng
        tokens, k, c = rng.choice([3, 5, 8]), rng.choice([1, 2, 3]), self.columns
        n = tokens * k
        x, w = self.float_input(tokens, c), self.float_input(n)
        choice = self.w.input(f"torch.randint(4, ({n},), generator=g).to(device)", "e")
        order = self.w.add(rng.choice([f"{choice}.argsort(stable=True)", f"torch.sort({choice}, stable=True).indices"]), "p")
        token = self.w.add(rng.choice([f"{order} // {k}", f"{order} % {tokens}", f"{order}.to(torch.int32) // {k}"]), "p")
        y = self.w.add(f"{x}[{token}] * {self.float_input(n, c)}", "y")
        y = self.w.add(rng.choice([f"{y} * {w}[{order}, None]", f"{y} * {w}[{order}][:, None]", y]), "y")
        zeros = f"torch.zeros_like({x})"
        combine = [
            f"{zeros}.index_add(0, {token}, {y})",
            f"{zeros}.scatter_add(0, {token}.long()[:, None].expand(-1, {c}), {y})",
            f"{zeros}.index_put(({token},), {y}, accumulate=True)",
            f"torch.empty_like({y}).index_copy(0, {order}, {y}).view({tokens}, {k}, {c}).sum(1)",
            f"{y}[{order}.argsort()].view({tokens}, {k}, {c}).sum(1)",
            f"{x}.index_add(0, {token}, {y})",
        ]
        return self.w.add(rng.choice(combine), "y")

    def program(self) -> tuple[str, list[str]]:
        rng = self.rng
        if rng.random() < 0.12:
            y = self.mixture_of_experts()
            if y:
                self.floats.append(y)
                if rng.random() < 0.5:
                    return self.w.source([y]), [y]
        self.start()
        if rng.random() < 0.3:
            self.start()
        for _ in range(rng.choice([0, 1, 1, 2, 3, 4])):
            self.step()
        made: list[str] = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            before = len(self.floats)
            self.consume()
            made += [y for y in self.floats[before:] if y.startswith("y")]
        outputs = made[-2:] if made else [x for x in self.floats if x.startswith("y")][-1:]
        return self.w.source(outputs) if outputs else "", outputs


def generate(seed: int, dtype: str = "any") -> Program:
    """The program of a seed; where a seed makes none, that of a seed derived from it."""
    attempt = seed
    for _ in range(50):
        chosen = random.Random(f"dtype{seed}").choice(DTYPES) if dtype == "any" else dtype
        source, outputs = _Indices(attempt, chosen).program()
        if outputs and "requires_grad_" in source:
            dynamic = True if random.Random(f"dynamic{seed}").random() < 0.08 else None
            return Program("indices", seed, source, chosen, dynamic)
        attempt += 1_000_003
    raise RuntimeError(f"seed {seed} makes no program")
