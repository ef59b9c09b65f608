"""A mixture of experts: the best two for each token, rows sorted by expert, the experts, rows put back in the tokens' order.

In the backward, reading rows becomes adding to them: to a token from its two experts, to an expert's bias from all of its
rows. gradfuse adds them in fp32 and rounds once; eager mode in bf16 on a CPU rounds after each. float64 shows what it costs.

    python examples/mixture_of_experts.py
"""

import copy

import torch
from torch import Tensor, nn

TOKENS, WIDTH, HIDDEN, EXPERTS, ACTIVE = 1024, 32, 64, 8, 2


class Experts(nn.Module):
    """A feed-forward layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(EXPERTS, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """tokens [T, WIDTH] and the experts of each, chosen [T, ACTIVE] -> [T, WIDTH]."""
        weight = self.router(tokens).gather(1, chosen).softmax(-1)
        expert, order = chosen.flatten().sort(stable=True)
        rows = tokens[order // ACTIVE]
        own = nn.functional.one_hot(expert, EXPERTS).to(rows.dtype)  # keeps every shape independent of the routing
        hidden = torch.einsum("re,rd,edh->rh", own, rows, self.up) + self.bias[expert]
        rows = torch.einsum("re,rh,ehd->rd", own, nn.functional.silu(hidden), self.down)
        restored = rows[order.argsort()].unflatten(0, (-1, ACTIVE))
        return (restored * weight.unsqueeze(-1)).sum(1)


def gradients(function: nn.Module, layer: Experts, tokens: Tensor) -> list[Tensor]:
    """Those of the layer's parameters and of the tokens, in float64."""
    upstream = torch.linspace(-1, 1, tokens.numel(), device=tokens.device).view_as(tokens).to(tokens.dtype)
    leaves = [*layer.parameters(), tokens.detach().requires_grad_()]
    return [g.double() for g in torch.autograd.grad(function(leaves[-1], chosen), leaves, upstream)]


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = Experts().to(device, torch.bfloat16)
exact, compiled = copy.deepcopy(layer).double(), torch.compile(layer, backend="gradfuse")
tokens = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
chosen = layer.router(tokens).topk(ACTIVE).indices  # once, so that float64 routes alike
want = gradients(exact, exact, tokens.double())
errors = []
for function in (layer, compiled):
    got = gradients(function, layer, tokens)
    errors.append(max(float((g - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)))
eager, ours = errors
assert ours < 0.01
print(f"mixture_of_experts: worst relative error of a gradient in bf16: eager {eager:.1e}, gradfuse {ours:.1e}")
