"""What CUDA graphs have read of a module at their capture, and whether a replay still may."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import bad_argument
from ..layer.fp8_weights import Fp8Weights

_AGAIN = "Capture the module again."


class CapturedState:
    """Modules, parameters, buffers, modes and kept FP8 weights of a module when it was captured."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        self._device = next((p.device.type for p in self.parameters), "cuda")
        self._autocast = self._autocast_now()
        self._modules = [(m, m.training, dict(m._modules)) for m in module.modules()]
        # With address, whether it needs a gradient, and the address of its `main_grad`.
        self._tensors: list[tuple] = []
        self._owners: list[tuple[str, dict, int]] = []
        for name, m in module.named_modules():
            for owner in (m._parameters, m._buffers):
                self._owners.append((name, owner, len(owner)))
                for key, t in owner.items():
                    if t is not None:
                        facts = (t, t.data_ptr(), t.requires_grad, _main_grad(t))
                        self._tensors.append((f"{name}.{key}".lstrip("."), owner, key, *facts))
        self._kept: list[tuple[Fp8Weights, tuple]] = []

    def note_fp8_weights(self) -> None:
        """After the capture: experts of transformers make their `Fp8Weights` in a first call."""
        for m, _, _ in self._modules:
            store: Any = getattr(m, "_fp8_weights", None) or getattr(
                m, "sonicmoe_fp8_weights", None
            )
            if isinstance(store, Fp8Weights) and store.is_kept:
                self._kept.append((store, store.address()))

    def has_same_mode(self) -> bool:
        """Train or eval mode, and autocast."""
        if any(m.training != training for m, training, _ in self._modules):
            return False
        return self._autocast == self._autocast_now()

    def _autocast_now(self) -> tuple:
        enabled = torch.is_autocast_enabled(self._device)
        return enabled, enabled and torch.get_autocast_dtype(self._device)

    def check(self) -> None:
        """Raise if a replay would read memory that is the module's no more; renew FP8 weights."""
        for m, _, children in self._modules:
            if m._modules != children:
                expected = "the submodules it had when it was captured"
                raise bad_argument("module", expected, f"others in {type(m).__name__}", _AGAIN)
        for name, owner, count in self._owners:
            if len(owner) != count:
                expected = "the parameters and buffers it had when it was captured"
                raise bad_argument("module", expected, f"others in {name or 'it'}", _AGAIN)
        for name, owner, key, t, address, needed, main_grad in self._tensors:
            if owner.get(key) is not t or t.data_ptr() != address:
                expected = "the tensor that was captured, changed in place if at all"
                raise bad_argument(name, expected, "another one, or other memory", _AGAIN)
            if t.requires_grad and not needed:
                expected = "requires_grad=False, as when it was captured"
                raise bad_argument(name, expected, "True", _AGAIN)
            if _main_grad(t) != main_grad:
                expected = "the main_grad it had when it was captured"
                got = "none" if _main_grad(t) is None else "another one"
                raise bad_argument(name, expected, got, f"Zero it in place. {_AGAIN}")
        for store, address in self._kept:
            store.renew()
            if not store.is_kept or store.address() != address:
                expected = "the kept memory that was captured"
                got = "other memory" if store.is_kept else "none: the weights moved"
                raise bad_argument("FP8 weights", expected, got, _AGAIN)

    def versions(self) -> list[int]:
        """Changes when a parameter is written to."""
        return [p._version for p in self.parameters]

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Buffers and `main_grad`s keep their values: calls before a capture change them."""
        changing = [t for _, _, _, t, *_ in self._tensors if not isinstance(t, nn.Parameter)]
        main_grads = [getattr(p, "main_grad", None) for p in self.parameters]
        changing += [t for t in main_grads if t is not None]
        before = [t.detach().clone() for t in changing]
        try:
            yield
        finally:
            with torch.no_grad():
                for t, value in zip(changing, before, strict=True):
                    t.copy_(value)


def _main_grad(t: torch.Tensor) -> int | None:
    main_grad = getattr(t, "main_grad", None)
    return None if main_grad is None else main_grad.data_ptr()
