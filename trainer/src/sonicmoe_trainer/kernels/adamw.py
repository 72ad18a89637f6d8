"""AdamW on weights and moments in bfloat16, rounded stochastically."""

import triton
import triton.language as tl


@triton.jit
def hashed(i, key):
    """32 bits for each element of `i`, uint32: the finalizer of MurmurHash3."""
    h = i * 0x9E3779B9 + key
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def rounded_stochastically(value, noise):
    """fp32 to bf16: up or down, each as likely as the other end is near. `noise` has 16 bits."""
    word = value.to(tl.uint32, bitcast=True) + noise
    cut = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(value == value, cut, value).to(tl.bfloat16)


@triton.jit(do_not_specialize=["key"])
def adamw_kernel(
    weight, gradient, mean, square, divisor, count, key, lr, decay, beta1, beta2, correction1,
    correction2, eps, DIVIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of AdamW on `count` elements, in fp32. With DIVIDE, the gradient is divided by the
    number at `divisor`, fp32.

    Grid: count/BLOCK; a program owns BLOCK elements of weight, mean and square.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    g = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(mean + i, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(square + i, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    if DIVIDE:
        g *= 1 / tl.load(divisor)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    step = (m / correction1) / (tl.sqrt(v / correction2) + eps)
    w = w * decay - lr * step
    noise = hashed(i.to(tl.uint32), key.to(tl.uint32))
    tl.store(weight + i, rounded_stochastically(w, noise & 0xFFFF), mask=inside)
    tl.store(mean + i, rounded_stochastically(m, noise * 0x9E3779B1 >> 16), mask=inside)
    tl.store(square + i, rounded_stochastically(v, noise >> 16), mask=inside)
