"""bf16 under Triton's interpreter as the hardware computes it. Import before any kernel runs.

The interpreter holds tensors as numpy arrays. numpy knows no bf16, so such values lie there as the
16 bits that encode them. Two things then go wrong: a dot product multiplies these bits as if they
were integers, and a conversion from fp32 cuts the lower bits off instead of rounding. A bf16 number
is the upper half of the fp32 number of the same value, which mends both.

`tl.sort` exchanges by exclusive or, which the interpreter reduces element by element in Python:
3.4 s for the permutation of one span. numpy does it at once.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_multiply = InterpreterBuilder.create_dot
_convert = interpreter._convert_float
_reduce_otherwise = interpreter.ReduceOps.apply_impl


def _widened(operand: TensorHandle) -> TensorHandle:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _create_dot(self, left, right, *rest):
    """Products and sums in fp32, as tensor cores do it."""
    return _multiply(self, _widened(left), _widened(right), *rest)


def _convert_float(data, source, target, rounding):
    """fp32 to bf16 rounds to the nearest, ties to even."""
    if source != tl.float32 or target != tl.bfloat16:
        return _convert(data, source, target, rounding)
    word = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


def _reduce(self, input):
    if self.combine_fn != tl.standard._xor_combine:
        return _reduce_otherwise(self, input)
    data = np.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(data, input[0].dtype)


InterpreterBuilder.create_dot = _create_dot
interpreter.ReduceOps.apply_impl = _reduce
interpreter._convert_float = _convert_float
