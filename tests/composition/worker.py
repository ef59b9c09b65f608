"""One process of a distributed test: ``python -m tests.composition.worker`` runs scenarios and writes their results.

Each scenario has its own process group, so that a failure leaves no messages for the next scenario. After a failure the
scenario runs again with ``backend="aot_eager"``, which is stock without code generation, to see whether stock fails too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
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
#: After how many seconds a scenario that still runs writes the stacks of its threads to the log.
STACKS_AFTER = 80


@dataclass
class Context:
    """The setting of a scenario: its rank out of ``world``, its device and backend, and a folder that all ranks share."""

    rank: int
    world: int
    device: str
    backend: str
    folder: Path

    def compile(self, what: Callable[..., Tensor], **options: bool) -> Callable[..., Tensor]:
        """torch.compile with the backend under test."""
        return torch.compile(what, backend=self.backend, **options)

    def mesh(self) -> DeviceMesh:
        """A mesh of one dimension with all ranks."""
        return init_device_mesh(self.device, (self.world,))

    def on_device(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors on this rank's device."""
        return [x.to(self.device) for x in tensors]

    def data(self, **shape: int) -> list[Tensor]:
        """This rank's tokens and targets."""
        return self.on_device(*models.data(seed=self.rank, **shape))

    def all_data(self, **shape: int) -> list[Tensor]:
        """The tokens and targets of all ranks, concatenated."""
        parts = [models.data(seed=rank, **shape) for rank in range(self.world)]
        return self.on_device(*map(torch.cat, zip(*parts, strict=True)))


def _run(scenario: Callable[[Context], None], context: Context) -> str | None:
    """Run a scenario. Return the traceback of its failure, or None."""
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
    """Run a scenario in this process. Return ``error`` and ``stock``, each a traceback or None, and the seconds."""
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
    """Run the named scenarios, one after another."""
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
        faulthandler.dump_traceback_later(STACKS_AFTER, repeat=True)
        result = run_scenario(name, given.rank, given.world, given.device, given.folder)
        path = given.folder / f"{name}.{given.rank}.json"
        path.with_suffix(".part").write_text(json.dumps(result))
        path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main()
