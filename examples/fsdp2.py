"""FSDP2 over two processes: each block is compiled and sharded, the learned bias of its attention with it.

The model must name the token two places back, and only the biases know places. The processes, each with data of its own
and half of every parameter, talk over NCCL where there are two GPUs, else over gloo on the CPU.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import flex_attention

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 8, 32, 2, 32, 16


class Block(nn.Module):
    """Attention whose scores get a learned bias of the distance, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(HEADS, 2 * LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, WIDTH] -> the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + self.bias[h, i - j + LENGTH])
        return x + self.out(y.transpose(1, 2).flatten(2))


rank, device = int(os.environ["LOCAL_RANK"]), "cuda" if torch.cuda.device_count() > 1 else "cpu"
if device == "cuda":
    torch.cuda.set_device(rank)
dist.init_process_group("nccl" if device == "cuda" else "gloo")
mesh = dist.init_device_mesh(device, (2,))
torch.manual_seed(0)  # the same parameters everywhere; fully_shard leaves each process its part
blocks = [Block().to(device) for _ in range(2)]
for block in blocks:
    block.compile(backend="gradfuse")
    fully_shard(block, mesh=mesh)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY), nn.LogSoftmax(-1)).to(device)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
torch.manual_seed(1 + rank)  # different data
for _ in range(80):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)
    loss = -model(tokens)[:, 2:].gather(2, tokens[:, :-2, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
part, bias = blocks[0].bias.to_local(), blocks[0].bias.full_tensor()
assert loss < 0.5 and 2 * part.numel() == bias.numel() and bias.any()
if rank == 0:
    print(f"fsdp2: loss 2.08 (guessing) -> {loss:.3f}, with {part.numel()} of {bias.numel()} biases in each process")
dist.destroy_process_group()
