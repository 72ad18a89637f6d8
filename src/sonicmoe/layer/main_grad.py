"""Weight gradients added to an fp32 buffer by the GEMM, as Megatron's main_grad.

A parameter with an attribute `main_grad`, fp32 and laid out like the parameter, gets its gradient
there and none in `.grad`: no 16-bit gradient is written, read or rounded. Trainers that count on
autograd's hooks set `grad_added_to_main_grad` beforehand; it becomes True, and a gradient that
holds nothing is handed on so that the hooks run.
"""

from typing import Any

import torch

from ..errors import bad_argument

_REMEDY = "Make it with torch.zeros_like(weight, dtype=torch.float32)"


class WithMainGrad:
    """A parameter that had a `main_grad` in the forward pass. What autograd saves may be a copy."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    @property
    def main_grad(self) -> torch.Tensor:
        """The buffer that the parameter has now, in the backward pass."""
        main_grad = getattr(self.weight, "main_grad", None)
        if main_grad is None:
            raise bad_argument(
                "main_grad",
                "the buffer of the forward pass, or another one like it",
                "none",
                "Keep it until the backward pass is over.",
            )
        _check(main_grad, self.weight)
        return main_grad


def with_main_grad(weight: Any) -> WithMainGrad | None:
    """None without a `main_grad`, as of packed weights; an error where it does not fit."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return None
    _check(main_grad, weight)
    return WithMainGrad(weight)


def _check(main_grad: Any, weight: torch.Tensor) -> None:
    if not isinstance(main_grad, torch.Tensor):
        raise bad_argument("main_grad", "a tensor", type(main_grad).__name__, f"{_REMEDY}.")
    found = (main_grad.dtype, main_grad.shape, main_grad.stride(), main_grad.device)
    wanted = (torch.float32, weight.shape, weight.stride(), weight.device)
    if found != wanted:
        raise bad_argument(
            "main_grad", f"dtype, shape, strides and device {wanted}", str(found), f"{_REMEDY}."
        )


def added_to_main_grad(main: WithMainGrad) -> torch.Tensor | None:
    """What autograd gets in the place of the gradient."""
    weight = main.weight
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
