"""AdamW for weights in bfloat16, whose updates are not rounded away.

bfloat16 has 8 bits: a change of less than 1/512 is lost when rounded to the nearest. Late in a
training nearly all updates of weights are that small, and with beta2 above 0.99 those of the second
moment. Rounded up or down at random, in proportion, the mean is right.
"""

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sonicmoe.plugins import bad_argument

_BLOCK = 1024
_MASK = 0xFFFFFFFF


class StochasticAdamW(Optimizer):
    """AdamW that rounds weights and moments, all in bfloat16, stochastically.

    The random bits depend on `seed`, the step, the index of the parameter and the element: runs
    repeat, and replicas of a weight stay equal. Gradients are divided by
    `grad_scale` (a tensor of one number in fp32), if it is set, as in PyTorch's fused optimizers.
    """

    grad_scale: torch.Tensor | None = None

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, seed: int = 0) -> None:  # fmt: skip
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.seed = seed
        for group in self.param_groups:
            for p in group["params"]:
                if p.dtype != torch.bfloat16:
                    remedy = "Use torch.optim.AdamW for weights in other dtypes."
                    raise bad_argument("params", "weights in bfloat16", p.dtype, remedy)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index = 0
        for group in self.param_groups:
            for p in group["params"]:
                index += 1
                if p.grad is not None:
                    self._update(p, p.grad, group, index)
        return loss

    def _update(self, p: torch.Tensor, g: torch.Tensor, group: dict, index: int) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        step, lr, (beta1, beta2) = int(state["step"]), float(group["lr"]), group["betas"]
        key = key_of(self.seed, step, index)
        w, g, m, v = (_local(t) for t in (p, g, state["exp_avg"], state["exp_avg_sq"]))
        update(
            w, g, m, v, key, lr, 1 - lr * group["weight_decay"], beta1, beta2, 1 - beta1**step,
            1 - beta2**step, group["eps"], self.grad_scale,
        )  # fmt: skip
        torch.autograd.graph.increment_version([w, m, v])  # kernels are not seen by autograd


def _local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def key_of(seed: int, step: int, index: int) -> int:
    """31 bits that differ between steps and parameters."""
    mixed = (seed * 0x9E3779B1 + step) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA77 + index) & _MASK
    return ((mixed ^ (mixed >> 13)) * 0xC2B2AE3D & _MASK) >> 1


def update(w, g, m, v, key, lr, decay, beta1, beta2, correction1, correction2, eps,
           divisor: torch.Tensor | None = None) -> None:  # fmt: skip
    """One step of AdamW on w, m and v, in place; see `kernels.adamw`."""
    if not (w.is_contiguous() and m.is_contiguous() and v.is_contiguous()):
        raise bad_argument("params", "contiguous weights", w.stride(), "Call .contiguous().")
    g = g.contiguous()
    numbers = (lr, decay, beta1, beta2, correction1, correction2, eps)
    if w.is_cuda:
        from .kernels.adamw import adamw_kernel

        if w.numel():
            adamw_kernel[(-(-w.numel() // _BLOCK),)](
                w, g, m, v, w if divisor is None else divisor, w.numel(), key, *numbers,
                DIVIDE=divisor is not None, BLOCK=_BLOCK, enable_fp_fusion=True,
            )  # fmt: skip
        return
    g32, m32, v32 = g.float(), m.float(), v.float()
    if divisor is not None:
        g32 = g32 * (1 / divisor)
    m32 = beta1 * m32 + (1 - beta1) * g32
    v32 = beta2 * v32 + (1 - beta2) * g32 * g32
    step = (m32 / correction1) / ((v32 / correction2).sqrt() + eps)
    noise = hashed(torch.arange(w.numel(), device=w.device), key).view(w.shape)
    w.copy_(rounded_stochastically(w.float() * decay - lr * step, noise & 0xFFFF))
    m.copy_(rounded_stochastically(m32, (noise * 0x9E3779B1 & _MASK) >> 16))
    v.copy_(rounded_stochastically(v32, noise >> 16))


def hashed(i: torch.Tensor, key: int) -> torch.Tensor:
    """`kernels.adamw.hashed` in int64, whose products wrap around in the same lower 32 bits."""
    h = (i * 0x9E3779B9 + key) & _MASK
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def rounded_stochastically(value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16: up or down, each as likely as the other end is near. `noise` has 16 bits."""
    word = value.view(torch.int32).to(torch.int64) & _MASK
    cut = (word + noise) & 0xFFFF0000
    rounded = (cut - ((cut >> 31) << 32)).to(torch.int32).view(torch.float32)
    return torch.where(value.isnan(), value, rounded).bfloat16()
