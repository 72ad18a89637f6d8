"""What Triton's interpreter computes as it comes, and with the corrections of `interpreter` alone.

TRITON_INTERPRET=1 python interpreted_cases.py out.pt
"""

import sys

import torch
import triton
import triton.language as tl
from helpers import Case, make_inputs, ours, run
from triton.runtime import interpreter as of_triton

from sonicmoe import topk_scores

E4M3 = torch.float8_e4m3fn


@triton.jit
def _device_function(x, y, FACTOR: tl.constexpr):
    return tl.where(x > y, x * FACTOR, y - 1), x == y


@triton.jit
def _operators_kernel(x, y, out, N: tl.constexpr, WIDE: tl.constexpr, INTEGER: tl.constexpr):
    """Every kind of operand: tensors of one shape and of others, of one type and of others,
    numbers that Python has, booleans, pointers."""
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i, mask=i < N - 1, other=1)
    larger, same = _device_function(a, b, 3)
    table = a[:, None] * b[None, :] + (a[:, None] - 1)
    index = i[None, :] + i.to(tl.int64)[:, None] * N
    tl.store(out + index, table, mask=(index % 3 == 0) | same[:, None])
    out += N * N
    tl.store(out + i, larger)
    tl.store(out + N + i, tl.sort(a, descending=True))
    tl.store(out + 2 * N + i, tl.cumsum(b, 0) + tl.sum(a, 0) * tl.max(b, 0))
    if INTEGER:
        tl.store(out + 3 * N + i, a // (b + (b == 0).to(b.dtype)) - b % 5)
    else:
        tl.store(
            out + 3 * N + i, (a / (b + 5.3)).to(tl.float32) * 1000 - i * tl.exp(b.to(tl.float32))
        )
    tl.store(out + 4 * N + i, tl.trans(table).sum(0) + tl.sum(table, 1))
    if WIDE:
        for j in range(3):
            tl.atomic_add(out + 5 * N + i // 2, a + j)
    last = tl.program_id(0) * 2 + 7
    while last > 0:
        last -= 3
        tl.store(out + 6 * N + last + 3, a.to(tl.float32).sum() / 3 + last)


@triton.jit
def _bits_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(out + i, (a ^ (a << 3)) & ~(a >> 1) | 5)
    tl.store(out + N + i, a * 65537 + 2147483647)  # overflows
    tl.store(out + 2 * N + i, tl.xor_sum(a, 0) + i)


@triton.jit
def _zeros_kernel(out):
    """Numbers that are equal but have other bits, or types."""
    tl.store(out, 0.0)
    tl.store(out + 1, -0.0)
    tl.store(out + 2, 1.0 / tl.load(out))
    tl.store(out + 3, 1.0 / tl.load(out + 1))
    tl.store(out + 4, True)
    tl.store(out + 5, 1)


@triton.jit
def _dot_kernel(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def _convert_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


def corrected() -> dict[str, torch.Tensor]:
    """What `interpreter` is for: GEMMs of bf16, conversions to bf16 and e4m3."""
    a, b, x = operands()
    found = {"dot": torch.zeros(16, 16), "bf16": torch.empty(512, dtype=torch.bfloat16)}
    found["e4m3"] = torch.empty(512, dtype=E4M3)
    _dot_kernel[(1,)](a, b, found["dot"], 16)
    for name in ("bf16", "e4m3"):
        _convert_kernel[(1,)](x, found[name], 512)
    return {name: t.view(torch.uint8) if t.dtype == E4M3 else t for name, t in found.items()}


def operands() -> tuple[torch.Tensor, ...]:
    seed = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=seed).bfloat16() for _ in range(2))
    return a, b, torch.randn(512, generator=seed)


def results() -> dict[str, torch.Tensor]:
    """What `fast_interpreter` must not change: every operation, and kernels of this package."""
    found = dict(corrected())
    seed = torch.Generator().manual_seed(1)
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.float32, torch.float16):
        x, y = (torch.randint(0, 9, (8,), generator=seed).to(dtype) for _ in range(2))
        out = torch.zeros(64 + 8 * 8, dtype=dtype)
        is_integer = not dtype.is_floating_point
        shift = 0 if is_integer else 4
        _operators_kernel[(1,)](x - shift, y - shift, out, 8, dtype.itemsize > 1, is_integer)
        if is_integer and dtype.itemsize > 1:
            bits, words = torch.zeros(3, 8, dtype=dtype), x * 12345
            _bits_kernel[(1,)](words, bits, 8)
            found[f"bits of {dtype}"] = bits
        found[f"operators of {dtype}"] = out
    found["zeros"] = torch.empty(6)
    _zeros_kernel[(1,)](found["zeros"])
    logits = torch.randn(5, 6, generator=seed).bfloat16()
    found["scores"], found["ids"] = topk_scores(logits, 2, backend="triton")
    case = Case("3,16,8,2,1", bias=True)
    found |= run(ours(case, "triton"), make_inputs(case))
    return found


if __name__ == "__main__":
    as_it_comes = corrected()
    with_overflow = of_triton.interpreter_builder.options.sanitize_overflow
    import interpreter  # noqa: F401

    assert with_overflow, "the interpreter is not as it comes"
    torch.save((as_it_comes, results()), sys.argv[1])
