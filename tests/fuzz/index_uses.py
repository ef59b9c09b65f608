"""Statements that gather and scatter by an index, and the inputs of index programs."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from .program import Writer


class Uses:
    """The names of the tensors that a program has so far: ``indices`` of integers and ``floats``."""

    rng: random.Random
    dtype: str
    w: Writer
    rows: int
    columns: int
    indices: list[str]
    floats: list[str]

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

    def _value(self, name: str) -> Tensor:
        return self.w.values[name]

    def _whole(self, name: str) -> bool:
        value = self._value(name)
        return not value.dtype.is_floating_point and value.dtype != torch.bool

    def _unique(self, name: str) -> bool:
        value = self._value(name)
        return value.numel() == value.unique().numel()

    # ------------------------------------------------ using them

    def index_for(self, rows: int, p: str) -> str:
        """Make ``p`` a valid int64 index of ``rows`` rows with as few operations as possible."""
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
        """A tensor to read: an existing one, or a new one with at least as many rows as the index needs."""
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
        """Dispatch each token to k experts, and combine: the typical program for these rewrites, with variations."""
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
