"""One name for each function that Gluon renamed between Triton 3.6 and 3.9."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

_TMA_RENAMED = hasattr(tma, "async_load")
_GATHER_RENAMED = hasattr(async_copy, "async_load")
_REINTERPRET_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

copy_in = tma.async_load if _TMA_RENAMED else tma.async_copy_global_to_shared
copy_out = tma.async_store if _TMA_RENAMED else tma.async_copy_shared_to_global
copy_gathered = async_copy.async_load if _GATHER_RENAMED else async_copy.async_copy_global_to_shared


@gluon.jit
def reinterpreted(smem, shape: gl.constexpr, descriptor):
    """The same shared memory with another shape, in the dtype and layout of `descriptor`."""
    if _REINTERPRET_RENAMED:
        return smem.reinterpret(descriptor.dtype, shape, descriptor.layout)
    else:
        return smem._reinterpret(descriptor.dtype, shape, descriptor.layout)
