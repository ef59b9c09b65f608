"""Long runs of the demo's model with changing lengths: constant memory, no recompilation, and the loss of eager mode."""

import contextlib
import copy
import dataclasses
import gc
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from inductor_ext.demo.model import LanguageModel
from inductor_ext.demo.train import corpus
from tests.support.eager_graphs import eager_graphs

LENGTHS = (48, 64, 80, 96, 33, 57)
#: After this many steps nothing more should be compiled or allocated.
SETTLED = 30


def batch(text, step, device):
    """A batch of text, whose length changes from step to step in the same way in every run."""
    length, generator = LENGTHS[step % len(LENGTHS)], torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length - 1, (8,), generator=generator).tolist()
    return torch.stack([text[s : s + length + 1] for s in starts]).long().to(device)


def memory(device):
    """The bytes in use: those of the allocator on a GPU, and those of the whole process on the CPU."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated()
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * 4096


def train(model, function, steps, device, seen=lambda step: None):
    """The loss of every step."""
    text = corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    masks = {n: create_block_mask(lambda b, h, q, k: q >= k, None, None, n, n, device=device) for n in LENGTHS}
    for step in range(steps):
        tokens = batch(text, step, device)
        loss = function(tokens, masks[tokens.shape[1] - 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        seen(step)
    return losses


@dataclasses.dataclass
class Soak:
    """What a long training showed.

    graphs: the number of compiled graphs after the first steps and at the end. grown: the bytes by which the memory grew in
    between. losses, eager: the losses of the compiled model and of eager mode.
    """

    graphs: tuple[int, int]
    grown: int
    losses: list[float]
    eager: list[float]

    def beside_eager(self):
        """Whether the losses agree within the noise of the last batches. Rounding makes two runs differ after some steps."""
        steps = len(self.losses)
        for part in (slice(0, 10), slice(steps - steps // 6, steps)):
            mine, theirs = torch.tensor(self.losses[part]), torch.tensor(self.eager[part])
            noise = float(theirs.std()) / len(theirs) ** 0.5
            if abs(float(mine.mean() - theirs.mean())) >= max(2 * noise, 0.02):
                return False
        return True


def soak(device, steps, **options):
    """Train for some steps, compiled and in eager mode."""
    torch.manual_seed(0)
    model = LanguageModel(width=64, heads=2, layers=2).to(device)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="gradfuse", fullgraph=True, **options)
    counters.clear()
    marks = {}

    # The steps have the same length, because the tokens of a step are still allocated when it ends.
    last = steps - 1 - (steps - 1 - SETTLED) % len(LENGTHS)

    def seen(step):
        if step in (SETTLED, last):
            marks[step] = counters["stats"]["unique_graphs"], memory(device)

    losses = train(model, compiled, steps, device, seen)
    (graphs, before), (graphs_at_the_end, after) = marks.values()
    wanted = train(eager, lambda tokens, _mask: eager(tokens, None), steps, device)
    return Soak((graphs, graphs_at_the_end), after - before, losses, wanted)


@pytest.mark.slow
def test_three_hundred_steps_on_the_cpu():
    """The rewritten graphs run op by op: gradfuse and Dynamo can leak and recompile, and generated code cannot."""
    with eager_graphs():
        run = soak("cpu", 300, dynamic=True)
    assert run.graphs[0] == run.graphs[1] <= len(LENGTHS)
    assert run.grown <= 64 * 2**20
    assert run.losses[-1] < run.losses[0] - 1
    assert run.beside_eager()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
def test_two_thousand_steps_on_a_gpu(dynamic):
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=16))
        run = soak("cuda", 2000, dynamic=dynamic)
    assert run.graphs[0] == run.graphs[1] <= len(LENGTHS)
    assert run.grown <= 0
    assert run.losses[-1] < run.losses[0] - 1
    assert run.beside_eager()
