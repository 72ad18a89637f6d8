"""The layer with its experts spread over a mesh dimension."""

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.func import functional_call
from torch.utils.weak import WeakTensorKeyDictionary

from ..enums import KernelBackendMoE
from ..errors import bad_argument
from ..layer.weights import ExpertWeights, Projection
from ..moe import MoE
from ..routing import Routing
from ..routing.base import check_routing
from ..routing.plain_linear import is_linear
from .agreement import raise_on_all_ranks
from .drift import note_training
from .guards import guard
from .layer import experts


class ExpertParallelMoE(MoE):
    """A `MoE` with its experts spread over `mesh`; every rank must call it, with its own tokens.

    Gradients, also those of the router and the shared expert, are summed over the ranks of the mesh
    dimension: they are those of one layer on the tokens of all these ranks. The auxiliary loss
    counts a rank's own tokens.

    Weights of a model around it must be sharded over these ranks too, and gradients must all be
    means or all be sums: `parallelize_model` sees to it, and else the first step of an optimizer
    raises a ValueError.
    """

    mesh: DeviceMesh
    ranks: tuple[int, ...]
    same_tokens: bool

    def forward(
        self,
        hidden_states: torch.Tensor,
        kernel_backend_moe: KernelBackendMoE | str | None = None,
        is_inference_mode: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, aux_loss = super().forward(hidden_states, kernel_backend_moe, is_inference_mode)
        if out.requires_grad:
            note_training(self)
        return out, aux_loss

    def _run_experts(self, x, r, logits, backend, is_inference_mode):
        # Counts of this rank's tokens, which its own experts do not know.
        aux_loss = None if is_inference_mode else self._aux_loss(logits, r, None, backend)
        with self._raise_on_all_ranks():
            options = self._options(backend)
        if options.fp8_weights is not None:
            options.fp8_weights.follow(self.c_fc.weight, self.c_proj.weight)
        (w1, b1, *_), (w2, b2, *_) = self._weights()
        slots = {"slot_token": r.slot_token, "token_start": r.token_start}
        given = (x, r.ids, r.scores, w1, w2, b1, b2)
        keywords: Any = options._asdict() | slots
        return experts(*given, group=self.mesh.get_group(), **keywords), aux_loss

    def _weights(self) -> ExpertWeights:
        """Those of this rank."""
        up, down = (Projection(_local(w.weight), _local(w.bias)) for w in super()._weights())
        return ExpertWeights(up, down)

    def _checked_backend(self, hidden_states, backend):
        with self._raise_on_all_ranks():
            return super()._checked_backend(hidden_states, backend)

    def _router_logits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self._raise_on_all_ranks():
            if not is_linear(self.router):
                raise bad_argument(
                    "router",
                    "nn.Linear without hooks under expert parallelism",
                    type(self.router).__name__,
                    "Its gradients are summed over the ranks.",
                )
            return super()._router_logits(x)

    def _raise_on_all_ranks(self) -> AbstractContextManager[None]:
        return raise_on_all_ranks(self.mesh.get_group(), _local(self.c_fc.weight))

    def _router_weight(self) -> torch.Tensor:
        return self._replicated(self.router)["weight"]

    def _call_router(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        copies = self._replicated(self.router)
        if dtype is not None:
            copies = {name: t.to(dtype) for name, t in copies.items()}
        return functional_call(self.router, copies, (x,))

    def _route(self, logits: torch.Tensor, backend: str | None) -> Routing:
        with self._raise_on_all_ranks():
            copies = self._replicated(self.routing)
            if not copies:
                return super()._route(logits, backend)
            r = functional_call(self.routing, copies, (logits,), {"backend": backend})
            check_routing(r, self.routing, logits)
            return r

    def _shared_output(self, x: torch.Tensor) -> torch.Tensor:
        module = self.shared_expert
        assert module is not None
        with self._raise_on_all_ranks():
            return functional_call(module, self._replicated(module), (x,))

    def _replicated(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """This rank's copies of the parameters, with gradients that are summed over the ranks."""
        group = self.mesh.get_group()
        return {n: _SumOfGradients.apply(_local(p), group) for n, p in module.named_parameters()}


def parallelize(
    moe: MoE, mesh: DeviceMesh | dist.ProcessGroup, *, same_tokens: bool = False
) -> ExpertParallelMoE:
    """Spread the experts of `moe` over the ranks of a one-dimensional mesh or a group, in place.

    Parameters become DTensors with the values of the first rank: the experts' sharded by expert,
    those of the router and the shared expert replicated. Their names, and so checkpoints, do not
    change, nor do their attributes, and what layers share. For the layers of a model, call
    `parallelize_model`.

    `same_tokens` says that outside of the layer all these ranks compute on the same tokens, as
    under tensor parallelism. Else optimizers refuse parameters sharded over other ranks only.
    """
    if type(moe) is not MoE:
        raise bad_argument("moe", "a sonicmoe.MoE", type(moe).__name__, "Call it once, on a MoE.")
    if isinstance(mesh, dist.ProcessGroup):
        mesh = DeviceMesh.from_group(mesh, moe.router.weight.device.type)
    if not isinstance(mesh, DeviceMesh):
        expected, remedy = "a DeviceMesh or a ProcessGroup", "Build one with init_device_mesh."
        raise bad_argument("mesh", expected, type(mesh).__name__, remedy)
    if mesh.ndim != 1:
        raise bad_argument(
            "mesh", "one dimension", f"{mesh.ndim} dimensions", "Pick one: mesh['expert']."
        )
    if moe.num_experts % mesh.size():
        raise bad_argument(
            "mesh",
            f"a size that divides the {moe.num_experts} experts",
            mesh.size(),
            "Every rank holds the same number of experts.",
        )
    _distribute(moe.router, mesh, Replicate())
    for module in moe.routing.modules():
        _distribute(module, mesh, Replicate())
    if moe.shared_expert is not None:
        for module in moe.shared_expert.children():
            _distribute(module, mesh, Replicate())
    _distribute(moe.c_fc, mesh, Shard(0))
    _distribute(moe.c_proj, mesh, Shard(0))
    moe.__class__ = ExpertParallelMoE
    parallel = cast(ExpertParallelMoE, moe)
    parallel.mesh = mesh
    parallel.ranks = tuple(mesh.mesh.tolist())
    parallel.same_tokens = same_tokens
    guard(parallel)
    return parallel


# Parameter -> the one that replaced it; so layers that shared it do so afterwards.
_replaced = WeakTensorKeyDictionary()


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, p in list(module.named_parameters(recurse=False)):
        if _is_spread(p, mesh, placement):  # a module that layers share
            continue
        spread = _replaced.get(p)
        if not _is_spread(spread, mesh, placement):
            check_plain(name, p)
            values = distribute_tensor(p.detach(), mesh, [placement])
            spread = nn.Parameter(values, requires_grad=p.requires_grad)
            vars(spread).update(vars(p))
            _replaced[p] = spread
        setattr(module, name, spread)


def _is_spread(p: torch.Tensor | None, mesh: DeviceMesh, placement: Placement) -> bool:
    return isinstance(p, DTensor) and p.device_mesh == mesh and p.placements == (placement,)


def check_plain(name: str, p: Any) -> None:
    """Raise for what would be lost with a parameter that another one replaces."""
    remedy = "Register them on the parameters of the parallel model."
    for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(p, attribute, None):
            raise bad_argument(name, "a parameter without hooks", "hooks of its gradient", remedy)
    check_no_main_grad(name, p)


def check_no_main_grad(name: str, p: Any) -> None:
    if getattr(p, "main_grad", None) is not None:
        remedy = "Delete it: under expert parallelism gradients go to .grad."
        raise bad_argument(name, "a parameter without main_grad", "one with it", remedy)


def _local(parameter: torch.Tensor | None) -> Any:
    if not isinstance(parameter, DTensor):
        return parameter
    check_no_main_grad("weight", parameter)
    return parameter.to_local()


class _SumOfGradients(torch.autograd.Function):
    """The identity; the gradient is summed over the group, which holds copies of one parameter."""

    @staticmethod
    def forward(ctx, parameter, group):
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
