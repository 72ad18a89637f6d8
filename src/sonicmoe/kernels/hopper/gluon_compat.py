"""One name for each function that Gluon renamed between Triton 3.6 and 3.9."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

_TMA_RENAMED = hasattr(tma, "async_load")
_GATHER_RENAMED = hasattr(async_copy, "async_load")
_REINTERPRET_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

copy_in = tma.async_load if _TMA_RENAMED else tma.async_copy_global_to_shared
copy_out = tma.async_store if _TMA_RENAMED else tma.async_copy_shared_to_global
copy_gathered = async_copy.async_load if _GATHER_RENAMED else async_copy.async_copy_global_to_shared

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


def aggregate(cls):
    """A class of values on the device. Its constructor takes the fields by name, `replace` some."""

    def constructor(self, **fields):
        for name, value in fields.items():
            setattr(self, name, value)

    def replace(self, **fields):
        return type(self)(**{name: getattr(self, name) for name in cls.__annotations__} | fields)

    constructor.__triton_builtin__ = replace.__triton_builtin__ = True
    cls.__init__, cls.replace = constructor, replace
    return triton.language.core._aggregate(cls)


@gluon.jit
def reinterpreted(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory with another dtype, shape and layout."""
    if _REINTERPRET_RENAMED:
        return smem.reinterpret(dtype, shape, layout)
    else:
        return smem._reinterpret(dtype, shape, layout)
