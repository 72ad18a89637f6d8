"""The weights of the experts in FP8, and `Fp8Weights`, which keeps them from call to call."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import bad_argument
from ..tensors import Weight
from ..validation import fp8_backend, resolve_backend
from .fp8_kept import (
    Alarm,
    Kept,
    is_capturing,
    is_gathered_by_fsdp2,
    is_tracked,
    owner_of,
    quantized_weight,
    stream_and_event,
)


def check_fp8_weights(fp8_weights: Any, precision: str | None) -> None:
    """Raise unless `fp8_weights` is None, or an `Fp8Weights` for experts in FP8."""
    if fp8_weights is None:
        return
    if not isinstance(fp8_weights, Fp8Weights):
        remedy = "Make one for each layer: sonicmoe.Fp8Weights()."
        raise bad_argument("fp8_weights", "an Fp8Weights", type(fp8_weights).__name__, remedy)
    if precision is None:
        remedy = "Set precision='fp8'."
        raise bad_argument("fp8_weights", "None without precision='fp8'", "Fp8Weights", remedy)


class Fp8Weights:
    """W1 and W2 of one layer in FP8, quantized when they change instead of in every call.

    Pass the same object with the same weights: `experts(…, precision="fp8", fp8_weights=kept)`. The
    first call quantizes. Later ones do when the version counter of PyTorch or the memory of a
    weight changed; a step of an optimizer of `torch.optim` quantizes the weights it owns at once.
    Values change in place, at fixed addresses, so that compiled models and CUDA graphs read the new
    ones. The backward pass of an earlier call then raises PyTorch's error about tensors modified by
    an inplace operation. Weights that are replaced get new memory.

    After any other change call `refresh`: after writes through `.data` or NumPy, collectives of
    `torch.distributed`, optimizers that own a copy of the weights; in compiled models and CUDA
    graphs after every change but the step of an optimizer. Without it, each call compares a sample
    of the weights, always another one, and experts that changed give NaN. On a CPU the call raises
    a ValueError, on a GPU, where it would have to wait, the next call or step of the optimizer.
    Those inside of compiled models and graphs do not raise.

    A call that is compiled or captured does not quantize. Before it, call the layer once or call
    `refresh`: else a capture raises a ValueError, and a compiled model quantizes in every call.
    Under FSDP, which gathers the weights in every pass, and for weights that are computed, every
    call quantizes. Threads may share the object, which holds the weights of the last call until
    `clear`. Copies and pickles are empty.

    `names` are those of the weights in errors.
    """

    def __init__(self, names: tuple[str, str] = ("w1", "w2")) -> None:
        self._names = names
        self._kept: Kept | None = None  # replaced as a whole, so that threads need no lock to read
        self._lock = threading.Lock()  # held to quantize
        self._gathered: torch.Tensor | None = None  # a weight of FSDP2, seen in the last call
        self._followed: tuple[tuple[torch.Tensor, int], ...] = ()  # DTensors and their versions

    def __reduce__(self) -> tuple:
        return type(self), (self._names,)

    @property
    def is_kept(self) -> bool:
        """Whether it has quantized weights."""
        return self._kept is not None

    def clear(self) -> None:
        """Free the memory; the next call quantizes into new memory."""
        with self._lock:
            self._kept = self._gathered = None
            self._followed = ()

    def refresh(self, w1: torch.Tensor | None = None, w2: torch.Tensor | None = None) -> None:
        """Quantize w1 and w2 now; by default those of the last call, if there was one."""
        with self._lock:
            kept = self._kept
            if w1 is None or w2 is None:
                found = (None, None) if kept is None else (kept.first.found(), kept.second.found())
                w1, w2 = found
            if w1 is None or w2 is None or not self._can_keep(w1, w2):
                self._kept = None
                return
            backend = fp8_backend(resolve_backend(None, w1), w1) if kept is None else kept.backend
            self._kept = self._quantized_now(kept, w1, w2, (True, True), backend)
            if not is_capturing(w1):
                self._kept.alarm.reset()

    def renew(self) -> None:
        """Do for the weights of the last call what another one would do before its GEMMs."""
        self.raise_if_stale()
        kept = self._kept
        if kept is None:
            return
        changed = (kept.first.has_changed(), kept.second.has_changed())
        if any(changed):
            self._step(changed)
        else:
            kept.wait_in_other_streams()

    def follow(self, *weights: torch.Tensor) -> None:
        """Pass changes of DTensors on to their local tensors, which calls are given.

        An in-place operation on a DTensor leaves the version counter of its local tensor alone.
        """
        if torch.compiler.is_compiling():
            return
        weights = tuple([w for w in weights if hasattr(w, "_local_tensor")])
        for w, (seen, version) in zip(weights, self._followed, strict=False):
            local: Any = w._local_tensor  # type: ignore[attr-defined]
            if (w is not seen or w._version != version) and local is not self._gathered:
                torch.autograd.graph.increment_version(local)
        self._followed = tuple([(w, w._version) for w in weights])

    def address(self) -> tuple[int, ...]:
        """Where the kept weights lie; empty without any."""
        kept = self._kept
        if kept is None:
            return ()
        tensors = (*kept.first.quantized, *kept.second.quantized)
        return tuple([t.data_ptr() for t in tensors if t is not None])

    def quantized(
        self, w1: torch.Tensor, w2: torch.Tensor, backend: str
    ) -> tuple[Weight, Weight] | None:
        """W1 and W2 for one call, with all that FP8 needs; None if they cannot be kept."""
        kept = self._kept
        if torch.compiler.is_compiling():
            if kept is None or not (kept.first.is_owned_by(w1) and kept.second.is_owned_by(w2)):
                return None
            return kept.compared(w1, w2)
        if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
            return None
        self.raise_if_stale()
        if kept is None or not kept.is_of(w1, w2, backend):
            kept, is_new = self._renewed(w1, w2, backend)
            if kept is None:
                return None
            if is_new:
                return kept.weights(w1, w2)
        kept.wait_in_other_streams()
        found = kept.compared(w1, w2)
        if not w1.is_cuda:
            self.raise_if_stale()
        return found

    def _renewed(
        self, w1: torch.Tensor, w2: torch.Tensor, backend: str
    ) -> "tuple[Kept | None, bool]":
        """What is kept of these weights, None if that cannot be; and whether it was quantized."""
        with self._lock:
            kept = self._kept
            if kept is not None and kept.is_of(w1, w2, backend):  # another thread was faster
                return kept, False
            if not self._can_keep(w1, w2):
                return None, False
            if is_capturing(w1):
                raise bad_argument(
                    self._names[0],
                    "weights whose FP8 copy was made before the capture of a CUDA graph",
                    "none" if kept is None else "others, or a change since",
                    "Call the layer once before the capture, or refresh its FP8 weights.",
                )
            changed = (True, True)
            if kept is not None and kept.backend == backend:
                changed = (not kept.first.is_of(w1), not kept.second.is_of(w2))
            self._kept = self._quantized_now(kept, w1, w2, changed, backend)
            return self._kept, True

    def _quantized_now(
        self,
        kept: "Kept | None",
        w1: torch.Tensor,
        w2: torch.Tensor,
        changed: tuple[bool, bool],
        backend: str,
    ) -> "Kept":
        """`kept` with the weights that `changed` quantized again, in place if they may be."""
        with _stores_lock:
            _stores.add(self)
            if not _hooks:
                _hooks.append(register_optimizer_step_pre_hook(_before_step))
                _hooks.append(register_optimizer_step_post_hook(_after_step))
        # Also a training step may use what inference left here.
        with torch.inference_mode(False), torch.no_grad():
            if kept is None:
                first = second = alarm = None
            else:
                first, second, alarm = kept.first, kept.second, kept.alarm
            if first is None or changed[0]:
                first = quantized_weight(first, w1, False, backend)
            if second is None or changed[1]:
                second = quantized_weight(second, w2, True, backend)
            if alarm is None or not alarm.fits(w1):
                alarm = Alarm(w1)
            return Kept(first, second, backend, alarm, *stream_and_event(w1))

    def _step(self, changed: tuple[bool, bool]) -> None:
        """Quantize the weights that an optimizer has just changed."""
        with self._lock:
            kept = self._kept
            if kept is None:
                return
            self.follow(*[w for w, _ in self._followed])  # the step's own changes
            w1, w2 = kept.first.found(), kept.second.found()
            if w1 is None or w2 is None:
                self._kept = None
                return
            self._kept = self._quantized_now(kept, w1, w2, changed, kept.backend)

    def _can_keep(self, w1: torch.Tensor, w2: torch.Tensor) -> bool:
        """Whether changes of the weights can be seen."""
        if not (is_tracked(w1) and is_tracked(w2)):
            return False
        owner = owner_of(w1)
        if self._gathered is owner:
            return False
        if is_gathered_by_fsdp2(owner):
            self._gathered = owner
            self._kept = None
            return False
        return True

    def raise_if_stale(self) -> None:
        """Raise a ValueError if a call before found stale weights, and nothing refreshed them."""
        kept = self._kept
        which = None if kept is None else kept.alarm.raised()
        if which is not None:
            raise bad_argument(
                self._names[which],
                "the values it had when its FP8 copy was made",
                "others, written without PyTorch noticing, for example through .data, or between"
                " calls of a compiled model",
                "Call refresh_fp8_weights() of MoE, or refresh() of Fp8Weights, after a write.",
            )


# --- steps of optimizers --------------------------------------------------------------------------
_stores: weakref.WeakSet[Fp8Weights] = weakref.WeakSet()  # that have kept something
_stores_lock = threading.Lock()
_hooks: list = []  # the two below, once there is one


@torch._disable_dynamo  # `torch.compiler.disable` would import it here, which takes seconds
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before gradients of stale weights, which are NaN, are applied."""
    for store, _ in _owned_by(optimizer):
        store.raise_if_stale()


@torch._disable_dynamo
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for store, changed in _owned_by(optimizer):
        store._step(changed)


def _owned_by(optimizer: Optimizer) -> Iterator[tuple[Fp8Weights, tuple[bool, bool]]]:
    """The stores with a weight among the parameters of `optimizer`, and which of the two it is.

    Only these are quantized again: an optimizer may make its step in the backward pass, before the
    other weight is used there.
    """
    with _stores_lock:
        stores = [(store, store._kept) for store in _stores]
    if not stores:
        return
    owned = set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            owned.add(id(getattr(p, "_local_tensor", p)))  # a DTensor's own
    for store, kept in stores:
        if kept is not None:
            changed = (id(kept.first.owner) in owned, id(kept.second.owner) in owned)
            if any(changed):
                yield store, changed
