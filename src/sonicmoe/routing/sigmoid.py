"""DeepSeek-V3's router: sigmoid scores, and a bias that changes the choice, not the scores."""

import weakref
from collections.abc import Callable

import torch
from torch import nn

from .. import ops
from ..errors import bad_argument
from ..validation import resolve_backend
from .base import Router, Routing
from .nodes import SigmoidTopK

# The layer of each router. Not an attribute: copies and pickles must not refer to it.
_layers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Sigmoid(Router):
    """DeepSeek-V3's router: picks the K largest of sigmoid(logits) + selection_bias.

    The scores are the sigmoids without the bias. With `groups` > 1 the experts are divided into
    that many groups, and a token chooses from the `groups_kept` whose two best experts have the
    highest sum. `normalize` makes a token's scores sum to one, and `scale` multiplies them. While
    training, `load` adds up each expert's rows for `update_bias`. Layers cannot share one.
    """

    trusted = True

    selection_bias: torch.Tensor
    load: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        k: int,
        *,
        groups: int = 1,
        groups_kept: int = 1,
        normalize: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__(num_experts, k)
        if groups < 1 or num_experts % groups:
            raise bad_argument(
                "groups", f"a divisor of the {num_experts} experts", groups, "1 means no groups."
            )
        if not 1 <= groups_kept <= groups:
            raise bad_argument(
                "groups_kept", f"between 1 and groups ({groups})", groups_kept, "Change one."
            )
        candidates = groups_kept * (num_experts // groups)
        if k > candidates:
            raise bad_argument(
                "k", f"at most the {candidates} experts of the kept groups", k, "Keep more groups."
            )
        self.groups = groups
        self.groups_kept = groups_kept
        self.normalize = normalize
        self.scale = scale
        self.register_buffer("selection_bias", torch.zeros(num_experts))
        self.register_buffer("load", torch.zeros(num_experts), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set `selection_bias` and `load` to zero."""
        self.selection_bias.zero_()
        self.load.zero_()

    def _join(self, layer: nn.Module, *, copied: bool = False) -> None:
        other = self._layer()
        if other is not None and other is not layer and other._modules.get("routing") is self:
            if copied:  # a shallow copy of that layer
                return
            remedy = "Build one per layer: bias and load belong to one layer."
            got = "that of another layer"
            raise bad_argument("router", "a Sigmoid of its own", got, remedy)
        _layers[self] = weakref.ref(layer)

    def _layer(self) -> nn.Module | None:
        reference = _layers.get(self)
        return None if reference is None else reference()

    def forward(self, logits: torch.Tensor, *, backend: str | None = None) -> Routing:
        self.check(logits)
        backend = resolve_backend(backend, logits)
        options = (self.k, self.groups, self.groups_kept, self.normalize, float(self.scale))
        scores, ids = SigmoidTopK.apply(logits, self.selection_bias, *options, backend)
        if self.training:
            with torch.no_grad():
                self.load += ops.count(ids, self.num_experts, backend)
        return Routing(logits, ids, scores)

    @torch.no_grad()
    def update_bias(
        self,
        rate: float = 1e-3,
        *,
        all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Raise the bias of experts below the mean load by `rate` and lower it above the mean.

        Call it after each optimizer step; it balances the experts without an auxiliary loss.
        `all_reduce` maps this rank's rows of each expert to those of the global batch; a layer with
        sharded weights needs it, else the biases of its ranks drift apart. Only the sign of the
        difference matters, so rows that a recomputed forward pass counts again do no harm.
        """
        if all_reduce is None and (ranks := self._ranks()) > 1:
            raise bad_argument(
                "all_reduce",
                f"a function, since the layer is sharded over {ranks} ranks",
                None,
                "Sum the rows: dist.all_reduce(load), then return load; else the biases of the"
                " ranks drift apart.",
            )
        load = self.load if all_reduce is None else all_reduce(self.load)
        self.selection_bias += rate * (load.mean() - load).sign()
        self.load.zero_()

    def _ranks(self) -> int:
        """Over how many ranks FSDP2 or expert parallelism shards the weights of the layer."""
        layer = self._layer()
        meshes = (
            [] if layer is None else [getattr(p, "device_mesh", None) for p in layer.parameters()]
        )
        return max((mesh.size() for mesh in meshes if mesh is not None), default=1)

    def _apply(self, fn, recurse=True):
        """Keep the bias in fp32 when the layer is cast: its updates are too small for 16 bits."""
        before = {name: getattr(self, name) for name in ("selection_bias", "load")}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.dtype in (torch.bfloat16, torch.float16):
                setattr(self, name, old.to(new.device))
        return self

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, groups={self.groups_kept}/{self.groups}, scale={self.scale}"
        )
