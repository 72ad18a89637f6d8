"""The base class of routers, what they return, and the check of what others return."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from .. import ops
from ..errors import bad_argument
from ..validation import (
    check_choice,
    check_device,
    check_floating,
    check_integer,
    check_k,
    check_pairs,
    check_shape,
    resolve_backend,
)


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that a router chose for each token, and their scores.

    logits      (T, E)            input of the router
    ids         (T, K) or (S,)    expert of each slot; −1 where a slot is not in use
    scores      as ids, fp32      score of each slot, differentiable in the logits
    slot_token  (S,) or None      token of each slot, ascending; None: K slots each
    token_start (T+1,) or None    slots of token t are [start[t], start[t+1])
    chosen      (E,) or None      rows of each expert by plain top-K, if the router changed them

    Pass it on with
    `experts(x, r.ids, r.scores, …, slot_token=r.slot_token, token_start=r.token_start)`.
    """

    logits: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    slot_token: torch.Tensor | None = None
    token_start: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    def counts(self) -> torch.Tensor:
        """Return the rows of each expert, (E,) int32."""
        backend = resolve_backend(None, self.ids)
        return ops.count(self.ids, self.logits.shape[1], backend)

    def choice_counts(self) -> torch.Tensor:
        """Return the rows of each expert by plain top-K, (E,) int32; balance losses use these."""
        return self.counts() if self.chosen is None else self.chosen


class Router(nn.Module):
    """Base class of routers: a module whose `forward` maps logits (T, E) to a `Routing`.

    `backend` is the one that computes the layer; plain PyTorch may ignore it. Parameters and
    buffers are in the layer's state dict, under `routing.`; `MoE.reset_parameters` calls a
    `reset_parameters`.
    """

    trusted: ClassVar[bool] = False  # whether `forward` is known to be right

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.trusted = vars(cls).get("trusted", False)  # that of a base class is not inherited

    def __init__(self, num_experts: int, k: int) -> None:
        super().__init__()
        check_k(k, num_experts)
        self.num_experts = num_experts
        self.k = k

    def forward(self, logits: torch.Tensor, *, backend: str | None = None) -> Routing:
        raise NotImplementedError

    def _is_trusted(self) -> bool:
        """Whether results need no check: of our own routers, unless a hook may change them."""
        hooks = self._forward_hooks
        return self.trusted and (not hooks or all(hasattr(h, "watches") for h in hooks.values()))

    def _join(self, layer: nn.Module, *, copied: bool = False) -> None:
        """Called when this router is assigned to `layer`, or (`copied`) copied together with it."""

    def check(self, logits: torch.Tensor) -> None:
        if logits.dim() != 2 or logits.shape[1] != self.num_experts:
            raise bad_argument(
                "logits",
                f"(T, E) with E = {self.num_experts}",
                tuple(logits.shape),
                "Flatten batch and sequence; build the router for this number of experts.",
            )
        check_floating("logits", logits)

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, k={self.k}"


class FunctionRouter(Router):
    """A router that calls a function, or a module, with the logits (T, E) for a `Routing`."""

    def __init__(
        self, function: Callable[[torch.Tensor], Routing], num_experts: int, k: int
    ) -> None:
        super().__init__(num_experts, k)
        self.function = function

    def forward(self, logits: torch.Tensor, *, backend: str | None = None) -> Routing:
        self.check(logits)
        return self.function(logits)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, function={name_of(self)}"


def name_of(router: Router) -> str:
    """The class of a router; the name of the function of a `FunctionRouter`."""
    if not isinstance(router, FunctionRouter):
        return type(router).__name__
    return getattr(router.function, "__name__", type(router.function).__name__)


def check_router(router: Router) -> None:
    """Raise unless the layer can call `router`."""
    name = type(router).__name__
    if "num_experts" not in vars(router):
        remedy = "Call super().__init__(num_experts, k) in its constructor."
        raise bad_argument("router", "a Router that was initialized", name, remedy)
    if type(router).forward is Router.forward:
        remedy = "Define forward(self, logits, *, backend=None)."
        raise bad_argument("router", "a Router with a forward of its own", name, remedy)
    parameters = inspect.signature(router.forward).parameters
    if not any(p.name == "backend" or p.kind is p.VAR_KEYWORD for p in parameters.values()):
        expected = "a Router whose forward takes (logits, *, backend=None)"
        got = f"{name}.forward({', '.join(parameters)})"
        raise bad_argument("router", expected, got, "Add backend=None; you may ignore its value.")


def check_routing(routing: Any, router: Router, logits: torch.Tensor) -> None:
    """Raise unless `routing`, which `router` returned for these logits, is a valid `Routing`."""
    name = name_of(router)
    if not isinstance(routing, Routing):
        got = "None" if routing is None else f"a {type(routing).__name__}"
        remedy = "Return sonicmoe.routing.Routing(logits, ids, scores)."
        raise bad_argument("router", f"a Routing from {name}", got, remedy)
    for field, value in (
        ("logits", routing.logits),
        ("ids", routing.ids),
        ("scores", routing.scores),
        ("slot_token", routing.slot_token),
        ("token_start", routing.token_start),
        ("chosen", routing.chosen),
    ):
        optional = field in ("slot_token", "token_start", "chosen")
        if not isinstance(value, torch.Tensor) and not (optional and value is None):
            expected = "a tensor or None" if optional else "a tensor"
            got = "None" if value is None else f"a {type(value).__name__}"
            raise bad_argument(f"{field} from {name}", expected, got, "Fill it in the Routing.")
    try:
        _check_fields(routing, logits)
    except ValueError as error:
        raise ValueError(f"router {name}, in the Routing that it returned: {error}") from None


def _check_fields(r: Routing, logits: torch.Tensor) -> None:
    tokens, experts = logits.shape
    check_shape("logits", r.logits, (tokens, experts), "(T, E)")
    check_floating("logits", r.logits)
    check_device("logits", r.logits, logits)
    if r.slot_token is None:
        if r.token_start is not None:
            remedy = "Pass both, or neither."
            raise bad_argument("token_start", "None without slot_token", "a tensor", remedy)
        check_choice(logits, r.ids, r.scores)
    else:
        check_pairs(logits, r.ids, r.scores, r.slot_token, r.token_start)
    if r.chosen is not None:
        check_shape("chosen", r.chosen, (experts,), "(E,)")
        check_integer("chosen", r.chosen)
        check_device("chosen", r.chosen, logits)


def at_least_fp32(logits: torch.Tensor) -> torch.Tensor:
    """The logits in fp32; float64 stays float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
