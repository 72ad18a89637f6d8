"""The loss of a head: logits exist for some rows at a time, on a GPU never in fp32."""

import torch
import torch.nn.functional as F

from sonicmoe.plugins import bad_argument

_BLOCK = 4096  # logits that a program of the kernel reads at once


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int = 0
) -> torch.Tensor:
    """The mean cross-entropy of `x @ weightᵀ`, x (N, H), weight (V, H), targets (N,) in [0, V).

    The logits of `chunk` rows are alive at a time; 0: of all rows. Gradients are computed in the
    forward pass, so logits are computed once: the backward pass multiplies by a number.
    """
    if chunk < 0:
        raise bad_argument("chunk", "0 or more rows", chunk, "0 computes all rows at once.")
    # Rounded like the operands of any GEMM under autocast; its gradient has the dtype of `weight`.
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    with torch.autocast(x.device.type, enabled=False):  # the kernel reads targets one by one
        return _LinearCrossEntropy.apply(x, weight, targets.contiguous(), chunk)


class _LinearCrossEntropy(torch.autograd.Function):
    """Kept: the gradients of x (N, H) and, in fp32, of the weight (V, H)."""

    @staticmethod
    def forward(ctx, x, weight, targets, chunk: int):
        rows, (of_x, of_weight) = x.shape[0], ctx.needs_input_grad[:2]
        w = weight.to(x.dtype)
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        dx = torch.empty_like(x) if of_x else None
        dw = torch.zeros_like(w, dtype=total.dtype) if of_weight else None
        chunk = chunk or max(rows, 1)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            logits = F.linear(x[part], w)
            losses, dlogits = _losses(logits, targets[part], of_x or of_weight)
            total += losses.sum()
            if dx is not None:
                torch.mm(dlogits, w, out=dx[part])
            if dw is not None:
                _add_gemm(dw, dlogits.mT, x[part])
        ctx.save_for_backward(dx, dw)
        ctx.rows, ctx.dtype = rows, weight.dtype
        return total / rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss):
        scale = dloss / ctx.rows
        dx, dw = ctx.saved_tensors
        # Scaled and rounded at once: dW of 7B takes 0.3 GB in fp32.
        of_x = None if dx is None else _times(dx, scale, dx.dtype)
        return of_x, None if dw is None else _times(dw, scale, ctx.dtype), None, None


def _times(t: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.mul(t, scale, out=torch.empty_like(t, dtype=dtype))


def _losses(logits, targets, gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row in fp32; with `gradient`, also its gradient, in the place of logits."""
    if logits.is_cuda:
        from .kernels.cross_entropy import cross_entropy_kernel

        rows, size = logits.shape
        losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
        cross_entropy_kernel[(rows,)](
            logits, targets, losses, rows, logits.stride(0), V=size, GRADIENT=gradient,
            BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
        return losses, logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = wide.logsumexp(1, keepdim=True)
    losses = (lse - wide.gather(1, targets[:, None]))[:, 0]
    if gradient:
        p = (wide - lse).exp_()
        p.scatter_add_(1, targets[:, None], p.new_full((len(p), 1), -1.0))
        logits.copy_(p)
    return losses, logits


def _add_gemm(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, summed in the dtype of `total`."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
