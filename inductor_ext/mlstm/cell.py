"""The mLSTM cell as a module, as in xLSTM (Beck et al., 2024): gate projections, the memory, and its headwise norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .api import mlstm
from .reference import State


class MLSTMCell(nn.Module):
    """``y = mlstm(q, k, v)`` with gates projected from q, k and v together, and a headwise layer norm.

    queries, keys and values are [B, S, H], and so is the result. At the start the input gate is equally closed for all
    inputs (its weight is 0, and its bias is drawn from N(0, 0.1)), the forget gates go from short to long memory (bias from
    3 to 6 over the heads), and the norm is the identity. Raises ValueError if num_heads does not divide hidden_size.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, eps: float = 1e-6, norm_eps: float = 1e-6, norm_bias: bool = False
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"MLSTMCell: num_heads={num_heads} does not divide hidden_size={hidden_size}")
        self.num_heads, self.eps, self.norm_eps = num_heads, eps, norm_eps
        self.input_gate = nn.Linear(3 * hidden_size, num_heads)
        self.forget_gate = nn.Linear(3 * hidden_size, num_heads)
        self.norm_weight = nn.Parameter(torch.empty(hidden_size))
        self.norm_bias = nn.Parameter(torch.empty(hidden_size)) if norm_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the parameters to their initial values; the bias of the input gate is drawn again."""
        for gate in (self.input_gate, self.forget_gate):
            nn.init.zeros_(gate.weight)
        nn.init.normal_(self.input_gate.bias, std=0.1)
        with torch.no_grad():
            self.forget_gate.bias.copy_(torch.linspace(3.0, 6.0, self.num_heads))
        nn.init.zeros_(self.norm_weight)
        if self.norm_bias is not None:
            nn.init.zeros_(self.norm_bias)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        initial_state: State | None = None,
        return_final_state: bool = False,
    ) -> Any:
        """The outputs [B, S, H] for queries, keys and values [B, S, H]. An output depends on the positions up to its own.

        The states are those of ``mlstm``; with ``return_final_state`` the result is (outputs, state).
        """
        joined = torch.cat([queries, keys, values], dim=-1)
        input_gate, forget_gate = (gate(joined).transpose(1, 2) for gate in (self.input_gate, self.forget_gate))
        heads = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (queries, keys, values))
        result = mlstm(
            *heads,
            input_gate,
            forget_gate,
            norm_weight=self.norm_weight,
            norm_bias=self.norm_bias,
            eps=self.eps,
            norm_eps=self.norm_eps,
            initial_state=initial_state,
            return_final_state=return_final_state,
        )
        y, *state = result if return_final_state else (result,)
        y = y.transpose(1, 2).flatten(2)
        return (y, *state) if state else y
