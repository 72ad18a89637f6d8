"""bf16 and e4m3 in Triton's interpreter as the hardware has them. Import before any kernel runs.

The interpreter holds tensors as numpy arrays. numpy knows no bf16, so such values lie there as the
16 bits that encode them. Two things then go wrong: a dot product multiplies these bits as if they
were integers, and a conversion from fp32 cuts the lower bits off instead of rounding. A bf16 number
is the upper half of the fp32 number of the same value, which fixes both. A conversion to e4m3
rounds ties up, and denormals toward zero: PyTorch converts instead.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_multiply = InterpreterBuilder.create_dot
_convert = interpreter._convert_float


def _widened(operand: TensorHandle) -> TensorHandle:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return TensorHandle(_fp32_of(operand.data), tl.float32)


def _fp32_of(bf16: np.ndarray) -> np.ndarray:
    return (bf16.astype(np.uint32) << 16).view(np.float32)


def _create_dot(self, left, right, *rest):
    """GEMMs and sums in fp32, as tensor cores do it."""
    return _multiply(self, _widened(left), _widened(right), *rest)


def _convert_float(data, source, target, rounding):
    """From fp32 to bf16 and e4m3: to the nearest, ties to even. Large values of e4m3 saturate."""
    if source == tl.bfloat16 and target == tl.float32:
        return _fp32_of(data)
    if source == tl.float32 and target == tl.float8e4nv:
        value = torch.from_numpy(np.ascontiguousarray(data)).clamp(-448, 448)
        return value.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    if source != tl.float32 or target != tl.bfloat16:
        return _convert(data, source, target, rounding)
    word = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


InterpreterBuilder.create_dot = _create_dot
interpreter._convert_float = _convert_float
