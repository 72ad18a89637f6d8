"""The weights of the experts in FP8, and a cache of them for layers that ask for one."""

import sys

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import ops
from .errors import bad_argument
from .fp8_tensors import Fp8Weight


@torch.no_grad()
def quantize_weights(
    w1: torch.Tensor, w2: torch.Tensor, transposed: bool, backend: str
) -> tuple[Fp8Weight, Fp8Weight]:
    """Both weights; only the backward pass reads what is `transposed`."""
    q1 = Fp8Weight(*ops.quantize_weight(w1, transposed, backend))
    q2 = Fp8Weight(*ops.quantize_weight(w2, transposed, backend))
    return (q1, q2) if transposed else (q1._replace(w8_t=None), q2._replace(w8_t=None))


_optimizer_steps = 0
_hooks: list = []  # the one below, once there is a cache


def _count_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


class Fp8WeightCache:
    """The weights in FP8 of the last call, as long as w1 and w2 are not seen to change.

    Seen are: another tensor or storage, PyTorch's version counter, and a step of any optimizer of
    `torch.optim`, since fused ones leave the counter alone. Not seen are writes that bypass the
    counter: through `.data` or NumPy, by collectives of `torch.distributed`, by replayed CUDA
    graphs. They are an error: see `_checked`. Copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._key: tuple = ()
        self._weights: tuple[Fp8Weight, Fp8Weight] | None = None
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_count_step))

    def __reduce__(self):
        return Fp8WeightCache, ()

    def clear(self) -> None:
        self._weights = None

    def quantized(
        self, w1: torch.Tensor, w2: torch.Tensor, transposed: bool, backend: str
    ) -> tuple[Fp8Weight, Fp8Weight]:
        """`quantize_weights`; what is cached is also transposed."""
        if _is_traced(w1) or not (_is_tracked(w1) and _is_tracked(w2)):
            return quantize_weights(w1, w2, transposed, backend)
        key = (_optimizer_steps, backend, *_identity(w1), *_identity(w2))
        if self._weights is None or key != self._key:
            # Also a training step may use what inference left here.
            with torch.inference_mode(False):
                self._key, self._weights = key, quantize_weights(w1, w2, True, backend)
        return _checked(w1, w2, *self._weights, backend)


@torch.no_grad()
def _checked(
    w1: torch.Tensor, w2: torch.Tensor, q1: Fp8Weight, q2: Fp8Weight, backend: str
) -> tuple[Fp8Weight, Fp8Weight]:
    """What is cached, if it is w1 and w2 in FP8.

    On a CPU a ValueError otherwise. On a GPU reading the result would wait for the device: scales
    of the experts that changed become NaN, and so does their output.
    """
    of_w1, of_w2 = _as_it_lies(w1, q1), _as_it_lies(w2, q2)
    scales = ops.checked_scales(*of_w1, *of_w2, backend)
    if w1.device.type == "cpu":
        parts = zip(("c_fc", "c_proj"), (of_w1, of_w2), scales, strict=True)
        for name, (*_, cached), checked in parts:
            if not torch.equal(checked.isnan(), cached.isnan()):
                raise bad_argument(
                    f"{name}.weight",
                    "changes that PyTorch sees, with cache_fp8_weights",
                    "another one, such as a write through .data",
                    "Call refresh_fp8_weights() after it.",
                )
    return q1._replace(w_scale=scales[0]), q2._replace(w_scale=scales[1])


def _as_it_lies(w: torch.Tensor, q: Fp8Weight) -> tuple:
    """A dense weight, its copy in e4m3 in the same order of memory, and the scales."""
    return (w, q.w8, q.w_scale) if w.stride(2) == 1 else (w.mT, q.w8_t, q.w_scale)


def _identity(w: torch.Tensor) -> tuple:
    # While there is a weak reference, no other storage gets this address.
    storage = StorageWeakRef(w.untyped_storage())
    return storage, w.data_ptr(), w._version, w.shape, w.stride(), w.dtype


def _is_tracked(w: torch.Tensor) -> bool:
    """Whether changes of `w` can be seen: not if FSDP gathers it or another tensor makes it."""
    flattened = hasattr(w, "_fsdp_flattened")
    plain = type(w) in (torch.Tensor, torch.nn.Parameter)
    return plain and w.is_leaf and not w.is_inference() and not flattened and not _fsdp2_is_used()


def _fsdp2_is_used() -> bool:
    """FSDP2 gathers into the same parameter and restores its version counter."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and bool(fsdp.FSDPModule.__subclasses__())


def _is_traced(w: torch.Tensor) -> bool:
    """Whether this call is recorded, to be run again with other weights."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or (w.is_cuda and torch.cuda.is_current_stream_capturing())
    )
