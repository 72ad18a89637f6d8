"""The module that holds the weights of one grouped GEMM."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn


def _never_runs(register: Callable) -> Callable:
    @wraps(register)
    def warn_and_register(self: nn.Module, *args: Any, **options: Any) -> Any:
        warnings.warn(
            "sonicmoe: a hook on Experts never runs, since MoE reads their weights and does not"
            " call them. Hook the MoE, its router or moe.routing.",
            stacklevel=2,
        )
        return register(self, *args, **options)

    return warn_and_register


class Experts(nn.Module):
    """Weights (E, out, in) and optional biases (E, out) of one grouped GEMM.

    Never called, so hooks on it never run.
    """

    register_forward_pre_hook = _never_runs(nn.Module.register_forward_pre_hook)
    register_forward_hook = _never_runs(nn.Module.register_forward_hook)
    register_full_backward_pre_hook = _never_runs(nn.Module.register_full_backward_pre_hook)
    register_full_backward_hook = _never_runs(nn.Module.register_full_backward_hook)

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        add_bias: bool = True,
        std: float | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.std = std

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.weight = parameter(num_experts, out_features, in_features)
        self.bias = parameter(num_experts, out_features) if add_bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights from a normal distribution of deviation `std`, by default 1/√in; biases zero."""
        std = self.in_features**-0.5 if self.std is None else self.std
        nn.init.normal_(self.weight, mean=0.0, std=std)
        if self.bias is not None:
            self.bias.zero_()

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"{self.num_experts}, in={self.in_features}, out={self.out_features}, bias={bias}"
