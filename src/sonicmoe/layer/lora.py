"""LoRA on experts, in PEFT's layout: W + scale·B·A is never formed.

Z = X W1ᵀ + (X A1ᵀ) B1ᵀ, row by row with the adapter of the row's expert, and the same for W2. X A1ᵀ
is a grouped GEMM of its own; the GEMM with B1 adds to the accumulator of X W1ᵀ.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from .. import ops
from ..errors import bad_argument
from ..shapes import ceil_div
from ..validation import check_device, check_floating, check_rank, check_shape
from .nodes import refuse_second_derivatives
from .weights import Projection


class LowRank(NamedTuple):
    """One LoRA adapter of rank r in PEFT's layout, for all experts.

    a is `lora_A.weight` (r·E, in), rows sorted by expert, then by rank; b is `lora_B.weight`
    (out, r·E), columns sorted by rank, then by expert; scale is PEFT's `scaling`.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


def check_adapter(name: str, lora: LowRank | None, w: torch.Tensor) -> None:
    if lora is None:
        return
    if not isinstance(lora, LowRank):
        raise bad_argument(name, "a LowRank or None", type(lora).__name__, "LowRank(a, b, scale).")
    experts, out_size, in_size = w.shape
    for factor, t, dims in (("a", lora.a, "(r·E, in)"), ("b", lora.b, "(out, r·E)")):
        if not isinstance(t, torch.Tensor):
            raise bad_argument(
                f"{factor} of {name}", "a tensor", type(t).__name__, "None as the adapter: no LoRA."
            )
        check_rank(f"{factor} of {name}", t, dims)
        check_floating(f"{factor} of {name}", t)
        check_device(f"{factor} of {name}", t, w)
    rank, rest = divmod(lora.a.shape[0], experts)
    if rank < 1 or rest:
        raise bad_argument(
            f"a of {name}",
            f"a positive multiple of E = {experts} rows, r for each expert",
            tuple(lora.a.shape),
            "Rows are sorted by expert, then by rank.",
        )
    check_shape(f"a of {name}", lora.a, (rank * experts, in_size), "(r·E, in)")
    check_shape(f"b of {name}", lora.b, (out_size, rank * experts), "(out, r·E)")
    if not isinstance(lora.scale, (int, float)):
        raise bad_argument(
            f"scale of {name}", "a number", type(lora.scale).__name__, "Pass lora_alpha / r."
        )


def with_adapter(
    w: Projection, lora: LowRank | None, dtype: torch.dtype, backend: str
) -> Projection:
    """w with A (E, r, in) and scale·B (E, out, r), the rank filled up with zeros to a multiple of
    8."""
    if lora is None:
        return w
    experts, out_size, in_size = w.weight.shape
    rank = lora.a.shape[0] // experts
    a = lora.a.contiguous().view(experts, rank, in_size).to(dtype)
    b = lora.b.contiguous().view(out_size * rank, experts)
    b = _ScaledTranspose.apply(b, float(lora.scale), dtype, backend).view(experts, out_size, rank)
    more = ceil_div(rank, 8) * 8 - rank
    if more:
        a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
    return w._replace(lora_a=a, lora_b=b)


class _ScaledTranspose(torch.autograd.Function):
    """scale · tᵀ in another dtype."""

    @staticmethod
    def forward(ctx, t, scale, dtype, backend):
        ctx.options = (scale, t.dtype, backend)
        return ops.scaled_transpose(t, scale, dtype, backend)

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivatives()
        return ops.scaled_transpose(dout, *ctx.options), None, None, None
