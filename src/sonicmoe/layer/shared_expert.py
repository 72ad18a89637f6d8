"""The shared expert: a dense MLP for all tokens, next to the routed experts."""

import torch
from torch import nn

from ..enums import ActivationType
from ..reference.activation import activate


class SharedExpert(nn.Module):
    """A dense MLP without biases; `gate` multiplies its output by σ(x · gate), one per token.

    Keys: `c_fc.weight` (2I, H), or (I, H) for plain activations, with gate and up columns ordered
    by `gate_up`; `c_proj.weight` (H, I); `gate.weight` (1, H).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: ActivationType,
        *,
        gate: bool = False,
        gate_up: str = "interleaved",
        std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = gate_up
        self.std = std
        columns = 2 * intermediate_size if activation.is_gated else intermediate_size

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        self.c_fc = linear(hidden_size, columns)
        self.c_proj = linear(intermediate_size, hidden_size)
        self.gate = linear(hidden_size, 1) if gate else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As `Experts`: a normal distribution of deviation `std`, by default 1/√in."""
        for module in self.children():
            assert isinstance(module, nn.Linear)
            std = module.in_features**-0.5 if self.std is None else self.std
            nn.init.normal_(module.weight, mean=0.0, std=std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, H) to (…, H)."""
        out = self.c_proj(activate(self.c_fc(x), self.activation, self.gate_up))
        return out if self.gate is None else self.gate(x).sigmoid() * out
