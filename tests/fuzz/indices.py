"""Programs that compute an index and gather or scatter by it. They test the proofs about permutations."""

from __future__ import annotations

import random

from .index_uses import Uses
from .program import Program, Writer

DTYPES = ("float32", "float32", "float32", "bfloat16", "bfloat16", "float16", "float64")
_NARROW = ("int8", "int16", "int32", "uint8", "int64")
_THROUGH = ("float32", "bfloat16", "float16", "float64")


class _Indices(Uses):
    """Draws statements that make index tensors and statements that use them."""

    def __init__(self, seed: int, dtype: str) -> None:
        self.rng = random.Random(seed)
        self.dtype = dtype
        self.w = Writer(self.rng)
        self.rows = self.rng.choice([4, 6, 8, 8, 12, 16, 24, 40, 60, 300])
        self.columns = self.rng.choice([1, 3, 4, 5, 8, self.rows if self.rows <= 16 else 2])
        self.indices: list[str] = []
        self.floats: list[str] = []

    # ------------------------------------------------ making indices

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
        """Add an index that is computed from the existing ones."""
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
            positions = f"{flat}.long()"
            arange = f"torch.arange({n}, device={p}.device)"
            source = rng.choice(
                [arange, arange, f"{arange}.flip(0)", f"{other if self._value(other).dim() == 1 else flat}.long()"]
            )
            choices += [
                f"torch.empty_like({positions}).scatter(0, {positions}, {source})",
                f"torch.zeros_like({positions}).index_put(({positions},), {source})",
                f"torch.zeros_like({positions}).index_copy(0, {positions}, {source})",
                f"torch.zeros_like({positions}).scatter(0, {positions}[:{n - 1}], {source})",
                f"{positions}.scatter(0, {positions}[:{small}], {source}[:{small}])",
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
    """Make the program of a seed. If a seed gives no program, use another seed that is derived from it."""
    attempt = seed
    for _ in range(50):
        chosen = random.Random(f"dtype{seed}").choice(DTYPES) if dtype == "any" else dtype
        source, outputs = _Indices(attempt, chosen).program()
        if outputs and "requires_grad_" in source:
            dynamic = True if random.Random(f"dynamic{seed}").random() < 0.08 else None
            other = random.Random(f"overwrites{seed}")
            overwrites = other.randrange(12) if other.random() < 0.15 else -1
            return Program("indices", seed, source, chosen, dynamic, overwrites=overwrites)
        attempt += 1_000_003
    raise RuntimeError(f"seed {seed} makes no program")
