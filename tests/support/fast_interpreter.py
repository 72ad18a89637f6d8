"""Triton's interpreter, faster. Results keep every bit: kernels/test_interpreter.py compares them.

Import before any kernel runs, beside `interpreter`, which is about what kernels compute.
"""

from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterOptions, TensorHandle

# `tl.sort` exchanges by exclusive or, which the interpreter reduces element by element in Python:
# 3.4 s for the permutation of one span. numpy does it at once.
_reduce_otherwise = interpreter.ReduceOps.apply_impl


def _reduce(self, input):
    if self.combine_fn != tl.standard._xor_combine:
        return _reduce_otherwise(self, input)
    data = np.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(data, input[0].dtype)


interpreter.ReduceOps.apply_impl = _reduce

# Without `debug`, checks for overflow are computed and thrown away: a quarter of the operations.
interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)


def _patch_attr(obj, name, member, builder, scope):
    def call(*args, _semantic=None, **kwargs):
        return member(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

    scope.set_attr(obj, name, call)


# Triton patches its language again at every call of a device function. Once is enough.
interpreter._patch_attr = _patch_attr
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

# Every operation makes, compares and looks into types. Block types of a name are one object, types
# are their own IR types, and what they know of their tensors and numpy arrays is remembered.
_INTEGERS = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES)
_np_dtype_of = interpreter._get_np_dtype
_init_tensor = tl.tensor.__init__
_init_block = tl.block_type.__init__
_np_dtypes: dict[str, np.dtype] = {}
_blocks: dict[tuple, tl.block_type] = {}
_shapes: dict[tuple, tuple] = {}


def _get_np_dtype(dtype):
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype_of(dtype)
    return _np_dtypes[name]


def _tensor(self, handle, type):
    if type.of_tensors is None:
        _init_tensor(self, handle, type)
        sizes = tuple(size.value for size in self.shape)
        type.of_tensors = _shapes.setdefault(sizes, (self.shape, self.numel, sizes))
    self.shape, self.numel, _ = type.of_tensors
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _new_block(cls, element_ty, shape):
    key = element_ty.name, *(getattr(size, "value", size) for size in shape)
    if key not in _blocks:
        _blocks[key] = object.__new__(cls)
        _init_block(_blocks[key], element_ty, shape)
    return _blocks[key]


interpreter._get_np_dtype = _get_np_dtype
tl.tensor.__init__ = _tensor
tl.block_type.__new__, tl.block_type.__init__ = _new_block, lambda *_: None
tl.dtype.of_tensors = None
tl.dtype.is_int = lambda self: self.name in _INTEGERS
for _kind in (tl.dtype, tl.block_type, tl.pointer_type):
    _kind.__eq__ = lambda self, other, equal=_kind.__eq__: self is other or equal(self, other)
    _kind.to_ir = lambda self, builder: self

# Shortcuts for what most operations meet: tensors of one type, a shape that was broadcast before, a
# constant that was made before.
_unwrap = tl.core._unwrap_if_constexpr
_promote = TritonSemantic.binary_op_type_checking_impl
_broadcast = TritonSemantic.broadcast_impl_value
_make_constant = TritonSemantic.scalar_constant
_constants: dict[tuple, tl.tensor] = {}
_broadcasts: dict[tuple, tuple] = {}


def _unwrap_if_constexpr(value):
    kind = type(value)
    if kind is tl.tensor or kind is int:
        return value
    return value.value if kind is tl.constexpr else _unwrap(value)


def _binary_op_type_checking_impl(self, left, right, *options):
    is_division = len(options) == 4
    if type(left) is type(right) is tl.tensor and left.dtype is right.dtype and not is_division:
        return self.broadcast_impl_value(left, right)
    return _promote(self, left, right, *options)


def _broadcast_impl_value(self, left, right):
    if left.shape is right.shape:
        return left, right
    key = left.type.name, right.type.name
    if key not in _broadcasts:
        left, right = _broadcast(self, left, right)
        _broadcasts[key] = left.type, right.type
        return left, right
    return tuple(map(_as_type, (left, right), _broadcasts[key]))


def _as_type(tensor, type):
    if tensor.type is type:
        return tensor
    data = np.broadcast_to(tensor.handle.data, type.of_tensors[2])
    return tl.tensor(TensorHandle(data, tensor.handle.dtype.scalar), type)


def _scalar_constant(self, value, dtype):
    key = repr(value), dtype.name  # 0.0 and -0.0 are equal
    if key not in _constants:
        _constants[key] = _make_constant(self, value, dtype)
    return _constants[key]


tl.core._unwrap_if_constexpr = tl._unwrap_if_constexpr = _unwrap_if_constexpr
TritonSemantic.binary_op_type_checking_impl = _binary_op_type_checking_impl
TritonSemantic.broadcast_impl_value = _broadcast_impl_value
TritonSemantic.scalar_constant = _scalar_constant
