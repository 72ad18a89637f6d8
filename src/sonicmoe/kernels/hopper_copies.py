"""The asynchronous copies of Gluon under one name each: Triton 3.9 renamed three of them."""

from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

_TMA_RENAMED = hasattr(tma, "async_load")
_GATHER_RENAMED = hasattr(async_copy, "async_load")

copy_in = tma.async_load if _TMA_RENAMED else tma.async_copy_global_to_shared
copy_out = tma.async_store if _TMA_RENAMED else tma.async_copy_shared_to_global
copy_gathered = async_copy.async_load if _GATHER_RENAMED else async_copy.async_copy_global_to_shared
