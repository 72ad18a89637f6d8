"""The weights of the experts in FP8, and a cache of them for layers that ask for one."""

import sys

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import ops
from ..errors import bad_argument
from ..tensors import Fp8Weight


@torch.no_grad()
def quantize_weights(
    w1: torch.Tensor, w2: torch.Tensor, transposed: bool, backend: str
) -> tuple[Fp8Weight, Fp8Weight]:
    """Both weights; only the backward pass reads what is `transposed`, and norms of W2."""
    w8, w8_t, scale, _ = ops.quantize_weight(w1, transposed, False, backend)
    q1, q2 = Fp8Weight(w8, w8_t, scale), ops.quantize_weight(w2, transposed, transposed, backend)
    if transposed:
        return q1, Fp8Weight(*q2)
    return q1._replace(w8_t=None), Fp8Weight(*q2)._replace(w8_t=None, w_norm=None)


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
    graphs. They are an error: see `quantized`. Copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._key: tuple = ()
        self._weights: tuple[Fp8Weight, Fp8Weight] | None = None
        self._sample = 0  # of the weights, the last that was compared
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_count_step))

    def __reduce__(self):
        return Fp8WeightCache, ()

    def clear(self) -> None:
        self._weights = None

    def quantized(
        self, w1: torch.Tensor, w2: torch.Tensor, transposed: bool, backend: str
    ) -> tuple[Fp8Weight, Fp8Weight]:
        """`quantize_weights`; what is cached is also transposed.

        Cached weights that are not w1 and w2 in FP8 are a ValueError on a CPU. On a GPU, reading
        that would wait for the device: the scales of experts that changed become NaN, and so does
        their output.
        """
        if _is_traced(w1) or not (_is_tracked(w1) and _is_tracked(w2)):
            return quantize_weights(w1, w2, transposed, backend)
        key = (_optimizer_steps, backend, *_identity(w1), *_identity(w2))
        if self._weights is None or key != self._key:
            # Also a training step may use what inference left here.
            with torch.inference_mode(False):
                self._key, self._weights = key, quantize_weights(w1, w2, True, backend)
            return self._weights
        q1, q2 = self._weights
        of_w1, of_w2 = _as_it_lies(w1, q1), _as_it_lies(w2, q2)
        self._sample = (self._sample + 1) % 2**31  # an int32
        with torch.no_grad():
            scale1, scale2 = ops.checked_scales(*of_w1, *of_w2, self._sample, backend)
        if w1.device.type == "cpu":
            _refuse_stale("c_fc.weight", w1, q1, scale1)
            _refuse_stale("c_proj.weight", w2, q2, scale2)
        return q1._replace(w_scale=scale1), q2._replace(w_scale=scale2)


@torch.no_grad()  # else a checkpoint would keep the weights in its second pass alone
def _refuse_stale(
    name: str, weight: torch.Tensor, cached: Fp8Weight, checked: torch.Tensor
) -> None:
    """Raise if `checked` has a NaN more than the cached scales, or these have one for an expert
    that is finite now."""
    assert cached.w_scale is not None
    was_finite, is_finite = ~cached.w_scale.isnan(), weight.isfinite().flatten(1).all(1)
    if (was_finite & checked.isnan()).any() or (~was_finite & is_finite).any():
        raise bad_argument(
            name,
            "the values it had when its FP8 copy was made (cache_fp8_weights=True)",
            "others, written without PyTorch noticing, for example through .data",
            "Call refresh_fp8_weights() after such a write.",
        )


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
