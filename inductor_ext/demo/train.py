"""``gradfuse demo`` trains a model, checks every gradient of one step against float64, and prints the report."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..core.report import collect
from ..core.table import progress
from ..torch_api.config import without_caches
from .model import LanguageModel

BATCH, LENGTH = 16, 128


def corpus() -> Tensor:
    """Return the English text that is part of every Python (the topics of ``help()``), as bytes."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


def batches(seed: int, device: torch.device) -> Iterator[Tensor]:
    """Yield random batches [BATCH, LENGTH + 1] of bytes without end."""
    text, generator = corpus(), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator).tolist()
        yield torch.stack([text[s : s + LENGTH + 1] for s in starts]).long().to(device)


def worst_gradient_error(model: LanguageModel, batch: Tensor) -> tuple[float, str]:
    """Return the largest relative error of any parameter's ``.grad`` against eager float64 math, and that parameter."""
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    exact(batch, None).backward()
    errors = {}
    for (name, got), want in zip(model.named_parameters(), exact.parameters(), strict=True):
        errors[name] = float((got.grad.double() - want.grad).norm() / want.grad.norm().clamp(min=1e-30))
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def step_milliseconds(loss_of: Callable[[Tensor], Tensor], batch: Tensor, repeats: int = 20) -> float:
    """Return the median time of a forward and backward."""
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss_of(batch).backward()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return sorted(times[3:])[repeats // 2]


def compare_with_stock(model: LanguageModel, compiled: Callable[..., Tensor], mask: BlockMask, batch: Tensor) -> None:
    """Print the step times under gradfuse and stock Inductor. If stock raises an error, print that."""
    mine = step_milliseconds(lambda text: compiled(text, mask), batch)
    print(f"step time: gradfuse {mine:.2f} ms, ", end="", flush=True)
    try:
        stock = torch.compile(copy.deepcopy(model), backend="inductor")
        print(f"stock Inductor {step_milliseconds(lambda text: stock(text, mask), batch):.2f} ms")
    except Exception as error:
        print(f"stock Inductor raises: {str(error).strip().splitlines()[0]}")


def run(device_name: str | None, dtype_name: str, steps: int, seed: int) -> int:
    """Train for ``steps`` steps and print the results. Returns 0 if the loss fell and every gradient was right."""
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(seed)
    model = LanguageModel().to(device, dtype)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device=device)
    compiled = torch.compile(model, backend="gradfuse")
    data = batches(seed, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"training a byte-level language model of {parameters:,} parameters on {device} in {dtype_name}; compiling ...")

    started, losses = time.time(), []
    with collect() as report, without_caches():
        batch = next(data)
        compiled(batch, mask).backward()
    compiled_in = time.time() - started
    error, name = worst_gradient_error(model, batch)
    optimizer.zero_grad()
    bar = progress("training", "step", of=range(1, steps + 1))
    for step in bar:
        loss = compiled(next(data), mask)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        if bar.disable and (step % max(steps // 10, 1) == 0 or step == 1):
            print(f"step {step}/{steps}  loss {losses[-1]:.3f}  {time.time() - started:.0f} s", flush=True)

    tail = losses[-max(len(losses) // 10, 1) :]
    reached = sum(tail) / len(tail)
    tolerance = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}[dtype_name]
    print(f"loss {losses[0]:.2f} -> {reached:.2f} in {time.time() - started:.0f} s ({compiled_in:.0f} s of it compiling)")
    print(f"worst relative error of a gradient against eager float64: {error:.1e} ({name})")
    if device.type == "cuda":
        compare_with_stock(model, compiled, mask, batch)
    print(f"\n{report}")
    return 0 if reached < losses[0] and error < tolerance else 1
