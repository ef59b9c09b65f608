"""One of the processes of a distributed test: ``python -m tests.composition.worker`` runs scenarios and writes what came out.

Each scenario gets a process group of its own, so that one that fails does not leave its messages to the next. After a
failure the scenario runs once more under ``backend="aot_eager"``, stock up to code generation, to know whether stock fails.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import flex_attention as flex_module

import inductor_ext  # noqa: F401  (registers the backend)
from tests.support.eager_graphs import eager_graphs

from . import model as models
from .conftest import left_to_stock

#: How long one operation of a process group may wait for the other processes.
PATIENCE = datetime.timedelta(seconds=60)


@dataclass
class Context:
    """What a scenario knows: its rank among ``world``, the device, the backend it compiles with, a folder all ranks see."""

    rank: int
    world: int
    device: str
    backend: str
    folder: Path

    def compile(self, what: Callable[..., Tensor], **options: bool) -> Callable[..., Tensor]:
        """torch.compile with the backend under test."""
        return torch.compile(what, backend=self.backend, **options)

    def mesh(self) -> DeviceMesh:
        """All ranks in one dimension."""
        return init_device_mesh(self.device, (self.world,))

    def on_device(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors on this rank's device."""
        return [x.to(self.device) for x in tensors]

    def data(self, **shape: int) -> list[Tensor]:
        """This rank's tokens and targets."""
        return self.on_device(*models.data(seed=self.rank, **shape))

    def all_data(self, **shape: int) -> list[Tensor]:
        """Those of all ranks, one after another."""
        parts = [models.data(seed=rank, **shape) for rank in range(self.world)]
        return self.on_device(*map(torch.cat, zip(*parts, strict=True)))


def _run(scenario: Callable[[Context], None], context: Context) -> str | None:
    """The traceback of a failure, or None."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        graphs: list[torch.fx.GraphModule] = []
        if context.device == "cpu" and context.backend != "gradfuse":
            stack.enter_context(mock.patch.object(flex_module, "_validate_device", lambda *_: None))
        elif context.device == "cpu" and not getattr(scenario, "generated", False):
            graphs = stack.enter_context(eager_graphs())
        try:
            scenario(context)
            assert not left_to_stock(graphs), "a flex_attention that trains was left to stock"
        except Exception:
            return traceback.format_exc()
    return None


@contextlib.contextmanager
def _process_group(store: Path, name: str, rank: int, world: int, device: str) -> Iterator[None]:
    file = dist.FileStore(str(store), world)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore(name, file), rank=rank, world_size=world, timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_scenario(name: str, rank: int, world: int, device: str, folder: Path) -> dict[str, str | float | None]:
    """How the scenario went here: ``error`` and, where there is one, ``stock``, each a traceback or None."""
    from .scenarios import SCENARIOS

    result: dict[str, str | float | None] = {"error": None, "stock": None}
    started = time.time()
    for key, backend in (("error", "gradfuse"), ("stock", "aot_eager")):
        context = Context(rank, world, device, backend, folder / f"{name}-{backend}")
        try:
            with _process_group(folder / "store", f"{name}-{backend}", rank, world, device):
                result[key] = _run(SCENARIOS[name], context)
                mine = torch.tensor(float(result[key] is not None), device=device)
                dist.all_reduce(mine)
                failed_anywhere = bool(mine > 0)
        except Exception:
            result[key] = result[key] or traceback.format_exc()
            failed_anywhere = True
        if not failed_anywhere:
            break
        if result[key] is None:
            result[key] = "another rank failed"
    result["seconds"] = round(time.time() - started, 1)
    return result


def main() -> None:
    """Run the scenarios named, one after another."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--device")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("scenarios", nargs="+")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.device == "cuda":
        torch.cuda.set_device(given.rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in given.scenarios:
        result = run_scenario(name, given.rank, given.world, given.device, given.folder)
        path = given.folder / f"{name}.{given.rank}.json"
        path.with_suffix(".part").write_text(json.dumps(result))
        path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main()
