"""bf16 under Triton's interpreter as the hardware computes it. Import before any kernel runs.

The interpreter holds tensors as numpy arrays. numpy knows no bf16, so such values lie there as the
16 bits that encode them. Two things then go wrong: a dot product multiplies these bits as if they
were integers, and a conversion from fp32 cuts the lower bits off instead of rounding. A bf16 number
is the upper half of the fp32 number of the same value, which mends both. A conversion to e4m3 does
not round right either; PyTorch's does.

`tl.sort` exchanges by exclusive or, which the interpreter reduces element by element in Python:
3.4 s for the permutation of one span. numpy does it at once.
"""

from types import SimpleNamespace

import numpy as np
import torch
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
    """fp32 to bf16 and to e4m3 rounds to the nearest, ties to even."""
    if source == tl.float32 and target == tl.float8e4nv:
        values = torch.from_numpy(np.array(data, dtype=np.float32))
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
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

# --- the same, in a third of the time -------------------------------------------------------------
# Triton patches its language again at every call of a device function. Once is enough.
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

# Every tensor and type works out its shape, its name and its numpy type anew. They are remembered.
_np_dtype_of = interpreter._get_np_dtype
_init_tensor = tl.tensor.__init__
_init_block = tl.block_type.__init__
_np_dtypes: dict[str, np.dtype] = {}
_tensors: dict[tuple, tuple] = {}
_blocks: dict[tuple, tuple] = {}


def _get_np_dtype(dtype):
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype_of(dtype)
    return _np_dtypes[name]


def _tensor(self, handle, type):
    key = tuple(type.shape) if type.is_block() else ()
    if key not in _tensors:
        _init_tensor(self, handle, type)
        _tensors[key] = self.shape, self.numel
    self.shape, self.numel = _tensors[key]
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _block(self, element_ty, shape):
    key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
    if key not in _blocks:
        _init_block(self, element_ty, shape)
        _blocks[key] = self.shape, self.numel, self.name
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _blocks[key]


interpreter._get_np_dtype = _get_np_dtype
tl.tensor.__init__ = _tensor
tl.block_type.__init__ = _block
