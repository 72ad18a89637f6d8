"""Weight gradients added to an fp32 buffer by the product itself, as large trainers ask for.

A parameter with an attribute `main_grad`, fp32 and laid out like the parameter, gets its gradient
there and none in `.grad`: no 16-bit gradient is written, read or rounded. Trainers that count on
autograd's hooks set `grad_added_to_main_grad` beforehand; it becomes True, and a gradient that
holds nothing is handed on so that the hooks run.
"""

import torch

from .errors import bad_argument


def with_main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """The parameter itself, if it has a `main_grad`: what autograd saves may be a copy."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return None
    found = (main_grad.dtype, main_grad.shape, main_grad.stride(), main_grad.device)
    wanted = (torch.float32, weight.shape, weight.stride(), weight.device)
    if found != wanted:
        raise bad_argument(
            "main_grad", f"dtype, shape, strides and device {wanted}", str(found),
            "Make it with torch.zeros_like(weight, dtype=torch.float32).",
        )  # fmt: skip
    return weight


def added_to_main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """What autograd gets in the place of the gradient."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
