"""associative_scan with combine functions that are associative by construction, compared with a plain loop."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .program import Program

DTYPES = ("float32", "float32", "float32", "float32", "bfloat16", "float64")
_LENGTHS = (1, 2, 7, 64, 97)

#: Leaves are drawn from these: values near 1 (for products), gates in (0, 1), normal values, flags, integers.
_KINDS = {
    "near": "(torch.randn({shape}, generator=g) * 0.1 + 1)",
    "gate": "(torch.rand({shape}, generator=g) * 0.6 + 0.4)",
    "any": "torch.randn({shape}, generator=g)",
    "small": "(torch.randn({shape}, generator=g) * 0.2)",
    "flag": "(torch.rand({shape}, generator=g) < 0.2)",
    "number": "torch.randint(50, {shape}, generator=g)",
}


@dataclass(frozen=True)
class Combine:
    """A combine function: ``results`` are expressions of L0, L1, ... (the earlier) and R0, R1, ... (the later)."""

    kinds: tuple[str, ...]
    results: tuple[str, ...]
    distinct: bool = False
    lines: tuple[str, ...] = ()


_COMBINES = {
    "add": Combine(("any",), ("L0 + R0",)),
    "mul": Combine(("near",), ("L0 * R0",)),
    "max": Combine(("any",), ("torch.maximum(L0, R0)",), True),
    "min": Combine(("any",), ("torch.minimum(L0, R0)",), True),
    "logaddexp": Combine(("any",), ("torch.logaddexp(L0, R0)",)),
    "add_integers": Combine(("number",), ("L0 + R0",)),
    "gated": Combine(("gate", "any"), ("L0 * R0", "L1 * R0 + R1")),
    "gated_swapped": Combine(("any", "gate"), ("R0 + R1 * L0", "R1 * L1")),
    "gated_log": Combine(("small", "any"), ("L0 + R0", "torch.exp(R0) * L1 + R1")),
    "log_space": Combine(("small", "any"), ("L0 + R0", "torch.logaddexp(L1 + R0, R1)")),
    "two_states": Combine(("gate", "any", "any"), ("L0 * R0", "L1 * R0 + R1", "L2 * R0 + R2")),
    "two_gates": Combine(("gate", "gate", "any"), ("L0 * R0", "L1 * R1", "L2 * R0 * R1 + R2")),
    "affine": Combine(
        ("near", "small", "small", "near", "any", "any"),
        (
            "R0 * L0 + R1 * L2",
            "R0 * L1 + R1 * L3",
            "R2 * L0 + R3 * L2",
            "R2 * L1 + R3 * L3",
            "R0 * L4 + R1 * L5 + R4",
            "R2 * L4 + R3 * L5 + R5",
        ),
    ),
    "matrices": Combine(
        ("near", "small", "small", "near"),
        ("R0 * L0 + R1 * L2", "R0 * L1 + R1 * L3", "R2 * L0 + R3 * L2", "R2 * L1 + R3 * L3"),
    ),
    "triangular": Combine(("near", "small", "near"), ("R0 * L0", "R0 * L1 + R1 * L2", "R2 * L2")),
    "complex": Combine(("near", "small"), ("L0 * R0 - L1 * R1", "L0 * R1 + L1 * R0")),
    "complex_gated": Combine(
        ("near", "small", "any", "any"),
        ("L0 * R0 - L1 * R1", "L0 * R1 + L1 * R0", "R0 * L2 - R1 * L3 + R2", "R0 * L3 + R1 * L2 + R3"),
    ),
    "segmented": Combine(("flag", "any"), ("L0 | R0", "torch.where(R0, R1, L1 + R1)")),
    "all_and_sum": Combine(("flag", "any"), ("L0 & R0", "L1 + R1")),
    "argmax": Combine(
        ("any", "number"), ("torch.where(later, R0, L0)", "torch.where(later, R1, L1)"), True, ("later = R0 > L0",)
    ),
    "running_softmax": Combine(
        ("any", "gate", "any"),
        ("m", "L1 * torch.exp(L0 - m) + R1 * torch.exp(R0 - m)", "L2 * torch.exp(L0 - m) + R2 * torch.exp(R0 - m)"),
        True,
        ("m = torch.maximum(L0, R0)",),
    ),
    "unrelated": Combine(("any", "near", "number"), ("L0 + R0", "L1 * R1", "torch.maximum(L2, R2)")),
    "delayed": Combine(("gate", "any", "any"), ("L0 * R0", "L1 * R0 + R1", "L2 + R2")),
    "mul_constant": Combine(("near",), ("L0 * R0 * 0.98",)),
    "add_captured": Combine(("any",), ("L0 + R0 + c",)),
    "mul_captured": Combine(("near",), ("L0 * R0 * c",)),
    "gated_captured": Combine(("gate", "any"), ("L0 * R0 * c", "L1 * R0 * c + R1")),
}


def _structure(rng: random.Random, count: int) -> tuple[str, list[str]]:
    """A pytree of ``count`` leaves: a template with {0}, {1}, ..., and an expression that reaches each of them."""
    kind = rng.randrange(4 if count > 1 else 3)
    if kind == 0 and count == 1:
        return "{0}", [""]
    if kind <= 1:
        return "(" + "".join(f"{{{i}}}, " for i in range(count)) + ")", [f"[{i}]" for i in range(count)]
    if kind == 2:
        return "dict(" + ", ".join(f"{chr(97 + i)}={{{i}}}" for i in range(count)) + ")", [
            f"['{chr(97 + i)}']" for i in range(count)
        ]
    inner = "[" + ", ".join(f"{{{i}}}" for i in range(1, count)) + "]"
    return "({0}, " + inner + ")", ["[0]", *(f"[1][{i}]" for i in range(count - 1))]


def _source(rng: random.Random, dtype: str) -> str:
    name = rng.choice(list(_COMBINES))
    combine = _COMBINES[name]
    if combine.distinct and dtype == "bfloat16":
        dtype = "float32"
    length = rng.choice(_LENGTHS)
    sizes = rng.choice([[], [3], [2, 3], [2, 3], [5, 1]])
    dim = rng.randint(0, len(sizes))
    shape = [*sizes[:dim], length, *sizes[dim:]]
    template, reached = _structure(rng, len(combine.kinds))
    inputs = []
    for i, kind in enumerate(combine.kinds):
        text = _KINDS[kind].format(shape=shape)
        if kind in ("flag", "number"):
            text += ".to(device)"
        else:
            text += f".to(device, torch.{dtype})" + (".requires_grad_()" if rng.random() < 0.85 else "")
        inputs.append((f"x{i}", text))
    if "captured" in name:
        shape_of_c = "[]" if rng.random() < 0.7 else str(shape[:dim] + shape[dim + 1 :])
        grad = ".requires_grad_()" if rng.random() < 0.8 else ""
        inputs.append(("c", f"(torch.rand({shape_of_c}, generator=g) * 0.1 + 0.9).to(device, torch.{dtype}){grad}"))
    arguments = ", ".join(n for n, _ in inputs)

    def reach(text: str) -> str:
        for i, path in enumerate(reached):
            text = text.replace(f"L{i}", f"left{path}").replace(f"R{i}", f"right{path}")
        return text

    before = [f"x{i} = {t}" for i, t in _prepared(rng, combine).items()]
    # Dynamo expands a generic scan into the operations of every step of a tree, which is slow and of little interest here.
    mode = "generic" if length < 10 and rng.random() < 0.2 else "pointwise"
    reverse = ", reverse=True" if rng.random() < 0.4 else ""
    shown_dim = dim if rng.random() < 0.8 else dim - len(shape)
    outputs = rng.sample(range(len(combine.kinds)), rng.randint(1, len(combine.kinds))) if rng.random() < 0.4 else None
    returned = "ys" if outputs is None else ", ".join(f"ys{reached[i]}" for i in outputs)
    lines = ["import torch", "from torch._higher_order_ops.associative_scan import associative_scan", "", ""]
    lines += ["def make(g, device):", *(f"    {n} = {t}" for n, t in inputs), f"    return [{arguments}]", "", ""]
    lines += [f"def program({arguments}):", *("    " + line for line in before), "    def combine(left, right):"]
    lines += ["        " + reach(line) for line in combine.lines]
    lines += ["        return " + template.format(*map(reach, combine.results)), ""]
    xs = template.format(*(f"x{i}" for i in range(len(combine.kinds))))
    lines += [
        f'    ys = associative_scan(combine, {xs}, {shown_dim if shown_dim >= 0 else dim}{reverse}, combine_mode="{mode}")'
    ]
    return "\n".join([*lines, f"    return {returned}", ""])


def _prepared(rng: random.Random, combine: Combine) -> dict[int, str]:
    """The operations on the leaves before the scan."""
    done = {}
    for i, kind in enumerate(combine.kinds):
        if kind in ("any", "small", "gate") and not combine.distinct and rng.random() < 0.2:
            done[i] = rng.choice(
                [f"torch.sigmoid(x{i})" if kind == "gate" else f"torch.tanh(x{i})", f"x{i} * 0.5", f"x{i}.clone()"]
            )
    return done


def generate(seed: int, dtype: str = "any") -> Program:
    """Make the program of a seed."""
    chosen = random.Random(f"dtype{seed}").choice(DTYPES) if dtype == "any" else dtype
    source = _source(random.Random(seed), chosen)
    if f"torch.{chosen}" not in source:
        chosen = "float32"
    return Program("scans", seed, source, chosen)
