"""What `Fp8Weights` keeps of the experts, and which weights it can keep."""

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import ops
from ..tensors import E4M3, Weight

# w8, w8_t, w_scale and w_norm of `Weight`.
Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(eq=False)
class KeptWeight:
    """One weight in FP8, and what tells that it is still that of a tensor. Never changed."""

    # The tensor that an optimizer has: the weight, or what it is a view of. `swap_tensors` refuses
    # tensors with weak references.
    owner: torch.Tensor
    storage: StorageWeakRef  # while it exists, no other storage gets its address
    place: tuple  # in the storage
    version: int
    quantized: Quantized

    def has_memory_of(self, w: torch.Tensor) -> bool:
        return w.untyped_storage()._cdata == self.storage.cdata and _place(w) == self.place

    def is_of(self, w: torch.Tensor) -> bool:
        return self.has_memory_of(w) and w._version == self.version

    def has_changed(self) -> bool:
        """Whether the weight was written to since, or its memory was replaced."""
        return self.owner._version != self.version or self.found() is None

    def is_owned_by(self, w: torch.Tensor) -> bool:
        """What a compiler can tell: it has no addresses."""
        kept = self.quantized[0]
        return self.owner is w and kept.shape == w.shape and kept.device == w.device

    def found(self) -> torch.Tensor | None:
        """The weight, unless its memory was replaced."""
        owner = self.owner
        if owner.untyped_storage()._cdata != self.storage.cdata:
            return None
        address, shape, strides, dtype = self.place
        if owner.dtype != dtype:
            return None
        offset = (address - owner.untyped_storage().data_ptr()) // dtype.itemsize
        return owner.detach().as_strided(shape, strides, offset)

    def in_storage_order(self, w: torch.Tensor) -> tuple:
        """A dense weight, its copy in e4m3 in the same order of memory, and the scales."""
        w8, w8_t, w_scale, _ = self.quantized
        return (w, w8, w_scale) if w.stride(2) == 1 else (w.mT, w8_t, w_scale)


class Alarm:
    """Flags in host memory that `ops.checked_scales` raises when a weight is stale.

    A raised flag has the number of the present generation. `reset` starts the next one in the order
    of the stream: flags that calls before it raise afterwards have an old number.
    """

    def __init__(self, w: torch.Tensor) -> None:
        experts, device = w.shape[0], w.device
        self.memory = torch.zeros(2, dtype=torch.int32, pin_memory=w.is_cuda)
        address = self.memory.data_ptr()
        self.read = (ctypes.c_int32 * 2).from_address(address)  # a tensor takes 10 times longer
        # A tensor: a compiler would take a number for a constant, and compile each layer anew.
        self.flags = _static(torch.tensor([address], device=device))
        self.number = 1
        self.generation = _static(torch.ones(1, dtype=torch.int32, device=device))
        self.sample = _static(torch.zeros(2, experts, dtype=torch.int32, device=device))

    def fits(self, w: torch.Tensor) -> bool:
        return self.sample.device == w.device and self.sample.shape[1] == w.shape[0]

    def raised(self) -> int | None:
        """0 if the flag of W1 is raised, 1 if that of W2 is."""
        if self.read[0] == self.number:
            return 0
        return 1 if self.read[1] == self.number else None

    def reset(self) -> None:
        self.number += 1
        with torch.inference_mode(False), torch.no_grad():
            self.generation.fill_(self.number)


@dataclass(eq=False)
class Kept:
    """Both weights. Never changed, but its tensors are."""

    first: KeptWeight
    second: KeptWeight
    backend: str
    alarm: Alarm
    stream: int | None  # where it was quantized; None on a CPU and in a captured graph
    event: Any  # then

    def is_of(self, w1: torch.Tensor, w2: torch.Tensor, backend: str) -> bool:
        return self.backend == backend and self.first.is_of(w1) and self.second.is_of(w2)

    def wait_in_other_streams(self) -> None:
        """Another thread may have quantized just now, in its own stream."""
        if self.stream is None:
            return
        device = self.alarm.sample.get_device()
        capturing = torch.cuda.is_current_stream_capturing
        if torch._C._cuda_getCurrentRawStream(device) != self.stream and not capturing():
            torch.cuda.current_stream(device).wait_event(self.event)

    def weights(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[Weight, Weight]:
        return Weight(w1, *self.first.quantized), Weight(w2, *self.second.quantized)

    def compared(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[Weight, Weight]:
        """What is kept; scales of experts that are seen to have changed are NaN."""
        first, second, alarm = self.first, self.second, self.alarm
        with torch.no_grad():
            weights = (*first.in_storage_order(w1), *second.in_storage_order(w2))
            scale1, scale2 = ops.checked_scales(
                *weights, alarm.sample, alarm.generation, alarm.flags, self.backend
            )
        (q1, q1_t, _, norm1), (q2, q2_t, _, norm2) = first.quantized, second.quantized
        return Weight(w1, q1, q1_t, scale1, norm1), Weight(w2, q2, q2_t, scale2, norm2)


def quantized_weight(
    part: KeptWeight | None, w: torch.Tensor, norms: bool, backend: str
) -> KeptWeight:
    """`w` in FP8, in the memory of `part` if that has been quantized from the memory of `w`.

    Weights elsewhere may be those of another call, which still reads this memory.
    """
    if part is not None and part.has_memory_of(w):
        part = replace(part, version=w._version)
    else:
        storage = StorageWeakRef(w.untyped_storage())
        quantized = _empty(w, norms)
        part = KeptWeight(owner_of(w), storage, _place(w), w._version, quantized)
    w = w.detach()
    ops.quantize_weight_into(*part.quantized, w, backend)
    # Kernels are not seen by autograd, which checks the versions of tensors that it saved.
    buffers = [t for t in part.quantized if t is not None]
    torch.autograd.graph.increment_version(buffers)
    return part


def _empty(w: torch.Tensor, norms: bool) -> Quantized:
    experts, n, k = w.shape

    def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return _static(torch.empty(shape, dtype=dtype, device=w.device))

    return (
        new(experts, n, k, dtype=E4M3),
        new(experts, k, n, dtype=E4M3),
        new(experts, dtype=torch.float32),
        new(experts, k, dtype=torch.float32) if norms else None,
    )


def _static(t: torch.Tensor) -> torch.Tensor:
    """`torch._dynamo.mark_static_address`, whose import takes seconds: a compiled model that
    replays CUDA graphs need not copy it."""
    t._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return t


def stream_and_event(w: torch.Tensor) -> tuple:
    if not w.is_cuda or is_capturing(w):
        return None, None
    stream = torch.cuda.current_stream(w.device)
    return stream.cuda_stream, stream.record_event()


def _place(w: torch.Tensor) -> tuple:
    return w.data_ptr(), w.shape, w.stride(), w.dtype


def owner_of(w: torch.Tensor) -> torch.Tensor:
    return w if w._base is None else w._base


# --- which weights are kept -----------------------------------------------------------------------
def is_tracked(w: torch.Tensor) -> bool:
    """Whether changes of `w` can be seen: not if FSDP1 gathers it or another tensor makes it."""
    owner = owner_of(w)
    plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in (w, owner))
    if not plain or w.is_meta or w.is_inference() or not owner.is_leaf:
        return False
    return not (hasattr(w, "_fsdp_flattened") or hasattr(owner, "_fsdp_flattened"))


def is_gathered_by_fsdp2(owner: torch.Tensor) -> bool:
    """FSDP2 gathers into the same parameter and restores its version counter."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not fsdp.FSDPModule.__subclasses__():
        return False
    from torch.distributed._composable_state import _module_state_mapping

    for state in [state() for state in _module_state_mapping.values()]:
        for p in fsdp2_parameters(state):
            gathered = getattr(p, "_unsharded_param", None)
            if owner is gathered or owner is getattr(gathered, "_local_tensor", None):
                return True
    return False


def fsdp2_parameters(state: Any) -> Iterator[Any]:
    """The `FSDPParam`s of a module's state; none of other states."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one group, before PyTorch 2.13
        groups = [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        yield from () if group is None else group.fsdp_params


def is_capturing(w: torch.Tensor) -> bool:
    return w.is_cuda and torch.cuda.is_current_stream_capturing()
