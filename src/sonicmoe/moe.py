"""The module `MoE`: the layer with its router."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from .enums import ActivationType, KernelBackendMoE
from .errors import bad_argument
from .layer import prepare
from .layer.expert_parameters import Experts
from .layer.fp8_weights import Fp8Weights
from .layer.gate_up_order import check_order, note_order
from .layer.lora import LowRank
from .layer.memory import KEEP, MemoryPolicy, in_words, memory_policy
from .layer.options import OPTIONS, Options, check_layer_precision
from .layer.run import run
from .layer.shared_expert import SharedExpert
from .layer.weights import ExpertWeights, Projection
from .routing import Router, RouterLike, Routing, auxiliary_loss, make_router
from .routing.base import check_routing, name_of
from .routing.plain_linear import is_linear, is_plain_linear
from .routing.scores import router_logits
from .shapes import check_size
from .validation import (
    check_floating,
    check_gate_up,
    check_k,
    check_num_experts,
    check_router_dtype,
    parse_activation,
)


class MoE(nn.Module):
    """A Mixture-of-Experts layer: router, experts and the weighted sum of their outputs.

    `router` is a name in `sonicmoe.routing.ROUTERS`, a `Router`, or a function from the logits to a
    `Routing`; a forward hook on `moe.routing` sees what it decides, and may return another. With
    "expert_choice" and "token_rounding", later tokens change outputs of earlier ones while
    training. Hooks on `moe.c_fc` and `moe.c_proj` never run: only their weights are read. With
    `shared_intermediate_size`, a dense MLP runs on every token and is added; `shared_gate`
    multiplies it by a sigmoid. `forward` returns the output and the auxiliary loss, aux_loss_coef ·
    (Switch load-balancing loss) + z_loss_coef · mean(logsumexp(logits)²), for which
    `all_reduce_counts` may map a rank's rows of each expert to those of the global batch; a
    constant zero if both coefficients are 0. `memory` is "keep", "e4m3", "recompute" or a
    `MemoryPolicy`.

    `precision="fp8"` is that of `experts`. The weights are then quantized in every forward pass, or
    with `cache_fp8_weights` when they are seen to have changed: see `Fp8Weights`. A step of an
    optimizer of `torch.optim`, `load_state_dict` and what PyTorch's version counter sees are seen.
    After any other change, such as writes through `.data` or a broadcast, call
    `refresh_fp8_weights`; also before the layer is compiled or captured in a CUDA graph, unless it
    ran before. Under FSDP every forward pass quantizes.

    State-dict keys: `router.weight` (E, H), `c_fc.weight` (E, 2I, H), `c_proj.weight` (E, H, I);
    with `router_bias` also `router.bias`, with `add_bias` also `c_fc.bias` and `c_proj.bias`. The
    shared expert has no biases, and S = shared_intermediate_size: `shared_expert.c_fc.weight`
    (2S, H), ordered by `gate_up` too, `shared_expert.c_proj.weight` (H, S) and, with `shared_gate`,
    `shared_expert.gate.weight` (1, H).
    """

    def __init__(
        self,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        intermediate_size: int,
        activation_function: ActivationType | str = ActivationType.SWIGLU,
        add_bias: bool = False,
        std: float | None = None,
        *,
        router: RouterLike = "softmax_over_topk",
        gate_up: str = "interleaved",
        router_bias: bool = False,
        fp32_router_logits: bool = False,
        shared_intermediate_size: int = 0,
        shared_gate: bool = False,
        aux_loss_coef: float = 1.0,
        z_loss_coef: float = 0.0,
        all_reduce_counts: Callable[[torch.Tensor], torch.Tensor] | None = None,
        precision: str | None = None,
        cache_fp8_weights: bool = False,
        memory: str | MemoryPolicy = KEEP,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activation_function = parse_activation(activation_function, "activation_function")
        check_gate_up(gate_up)
        check_num_experts(num_experts)
        check_k(num_experts_per_tok, num_experts, "num_experts_per_tok")
        check_layer_precision(precision, hidden_size, intermediate_size)
        if shared_intermediate_size:
            check_size("shared_intermediate_size", shared_intermediate_size, multiple=8)
        elif shared_gate:
            raise bad_argument(
                "shared_gate",
                "False without a shared expert",
                shared_gate,
                "Set shared_intermediate_size.",
            )
        self.num_experts = num_experts
        self.top_k = num_experts_per_tok
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation_function = activation_function
        self.gate_up = gate_up
        self.fp32_router_logits = fp32_router_logits
        self.aux_loss_coef = aux_loss_coef
        self.z_loss_coef = z_loss_coef
        self.all_reduce_counts = all_reduce_counts
        self.precision = precision
        self.cache_fp8_weights = cache_fp8_weights
        self.memory = memory_policy(memory)

        columns = 2 * intermediate_size if activation_function.is_gated else intermediate_size
        self.router = nn.Linear(
            hidden_size, num_experts, bias=router_bias, device=device, dtype=dtype
        )
        self.routing = make_router(router, num_experts, num_experts_per_tok)
        self.router_kind = router if isinstance(router, str) else name_of(self.routing)
        if device is not None or dtype is not None:
            self.routing.to(device=device, dtype=dtype)
        self.c_fc = Experts(
            num_experts, hidden_size, columns, add_bias, std, device=device, dtype=dtype
        )
        self.c_proj = Experts(
            num_experts, intermediate_size, hidden_size, add_bias, std, device=device, dtype=dtype
        )
        self.shared_expert: SharedExpert | None = None
        if shared_intermediate_size:
            self.shared_expert = SharedExpert(
                hidden_size,
                shared_intermediate_size,
                activation_function,
                gate=shared_gate,
                gate_up=gate_up,
                std=std,
                device=device,
                dtype=dtype,
            )
        self.register_load_state_dict_post_hook(_refresh_fp8_weights)

    def __setattr__(self, name: str, value: Any) -> None:
        """Options may be set later: what they do is done, and what they cannot do is refused."""
        if name == "routing" and isinstance(value, Router):
            value._join(self)
        if name in OPTIONS and "c_proj" in self.__dict__.get("_modules", ()):
            value = OPTIONS[name](self, name, value)
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(self.routing, Router):
            self.routing._join(self, copied=True)

    @property
    def cache_fp8_weights(self) -> bool:
        """Whether the weights in FP8 are kept from one forward pass to the next."""
        return self._fp8_weights is not None

    @cache_fp8_weights.setter
    def cache_fp8_weights(self, cached: bool) -> None:
        if cached and self.precision is None:
            expected, remedy = "False without precision='fp8'", "Set precision='fp8'."
            raise bad_argument("cache_fp8_weights", expected, cached, remedy)
        names = ("c_fc.weight", "c_proj.weight")
        self._fp8_weights = Fp8Weights(names) if cached else None

    def reset_parameters(self) -> None:
        """Initialize all parameters and the router's state, for example after `to_empty`."""
        for module in self.children():
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()

    def forward(
        self,
        hidden_states: torch.Tensor,
        kernel_backend_moe: KernelBackendMoE | str | None = None,
        is_inference_mode: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map (…, H) to (…, H); also return the auxiliary loss, None in inference mode.

        Without a backend, GPU tensors take the Triton kernels and others plain PyTorch.
        """
        name = self._checked_backend(hidden_states, kernel_backend_moe)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_inference_mode):
            is_flat = hidden_states.dim() == 2  # a view would cost the host a node each way
            x = hidden_states if is_flat else hidden_states.reshape(-1, self.hidden_size)
            # First, so that a checkpoint need not run the experts again to get at it.
            shared = None if self.shared_expert is None else self._shared_output(x)
            logits, x = self._router_logits(x)
            r = self._route(logits, name)
            out, aux_loss = self._run_experts(x, r, logits, name, is_inference_mode)
            if shared is not None:
                out = out + shared
        if not is_flat:
            # Autograd must not see a view: FSDP2 would not gather for the backward after `out += x`
            out = torch.ops.aten._unsafe_view(out, hidden_states.shape)
        return out, aux_loss

    def _route(self, logits: torch.Tensor, backend: str | None) -> Routing:
        r = self.routing(logits, backend=backend)
        if not self.routing._is_trusted():
            check_routing(r, self.routing, logits)
        return r

    def _run_experts(
        self,
        x: torch.Tensor,
        r: Routing,
        logits: torch.Tensor,
        backend: str | None,
        is_inference_mode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output of the routed experts, and the auxiliary loss."""
        call = prepare.routed(
            x,
            r.ids,
            r.scores,
            self._weights(),
            self._options(backend),
            slot_token=r.slot_token,
            token_start=r.token_start,
            trusted=r.token_start is not None and self.routing._is_trusted(),
            logits=r.logits.dtype,
        )
        # Before the experts, so that a checkpoint need not run them again to get at it.
        loss = None if is_inference_mode else self._aux_loss(logits, r, call.counts, backend)
        return run(call), loss

    def _checked_backend(
        self, hidden_states: torch.Tensor, backend: KernelBackendMoE | str | None
    ) -> str | None:
        """The name of the backend, once the arguments of `forward` are checked."""
        if hidden_states.shape[-1:] != (self.hidden_size,):
            raise bad_argument(
                "hidden_states",
                f"(…, H) with H = {self.hidden_size}, the layer's hidden_size",
                tuple(hidden_states.shape),
                "The last dimension is one token's vector.",
            )
        if hidden_states.is_meta or self.c_fc.weight.is_meta:
            raise bad_argument(
                "hidden_states",
                "data and weights that exist: the meta device has none",
                f"{hidden_states.device}, weights on {self.c_fc.weight.device}",
                "Call moe.to_empty(device=…) and load or reset_parameters(); for shapes alone use"
                " FakeTensorMode.",
            )
        return _backend_name(backend)

    def _weights(self) -> ExpertWeights:
        c_fc, c_proj = self.c_fc, self.c_proj
        return ExpertWeights(
            Projection(c_fc.weight, c_fc.bias), Projection(c_proj.weight, c_proj.bias)
        )

    def _options(self, backend: str | None = None) -> Options:
        """Each was checked when it was set."""
        return Options(
            self.activation_function,
            self.gate_up,
            self.precision,
            self.memory,
            backend,
            None if self.precision is None else self._fp8_weights,
            _adapter("c_fc", self.c_fc),
            _adapter("c_proj", self.c_proj),
        )

    def refresh_fp8_weights(self) -> None:
        """Quantize the weights now, with `cache_fp8_weights`."""
        if self._fp8_weights is not None:
            weights = self._weights()
            self._fp8_weights.refresh(weights.up.weight, weights.down.weight)

    def _apply(self, fn, recurse=True):
        if self._fp8_weights is not None:
            self._fp8_weights.clear()  # before the weights move or change their dtype
        return super()._apply(fn, recurse)

    def _router_logits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits, and x for the experts. A plain `nn.Linear` is fused, others are called."""
        fp32 = self.fp32_router_logits
        if is_plain_linear(self.router):
            weight = self._router_weight()
            if not fp32:
                check_router_dtype("router.weight", weight, x)
            return router_logits(x, weight, fp32_logits=fp32)
        if not fp32:
            return self._call_router(x), x
        check_floating("hidden_states", x)
        logits_dtype = torch.promote_types(x.dtype, torch.float32)
        narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in self.router.parameters())
        if narrow and not (is_linear(self.router) and self.router.bias is None):
            raise bad_argument(
                "fp32_router_logits",
                "False, or a router with fp32 weights",
                f"{type(self.router).__name__} with 16-bit weights",
                "Call moe.router.float().",
            )
        with torch.autocast(x.device.type, enabled=False):
            return self._call_router(x.to(logits_dtype), logits_dtype if narrow else None), x

    def _call_router(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The router as a module, its hooks included; its parameters in `dtype` if given."""
        if dtype is None:
            return self.router(x)
        cast = {name: p.to(dtype) for name, p in self.router.named_parameters()}
        return functional_call(self.router, cast, (x,))

    def _shared_output(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shared_expert is not None
        return self.shared_expert(x)

    def _router_weight(self) -> torch.Tensor:
        return self.router.weight

    def _aux_loss(
        self,
        logits: torch.Tensor,
        routing: Routing,
        counts: torch.Tensor | None,
        backend: str | None,
    ) -> torch.Tensor:
        """The balance loss counts the top-K choice, before token rounding changes it."""
        if self.aux_loss_coef == self.z_loss_coef == 0:
            return logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
        if counts is None or routing.chosen is not None:
            counts = routing.choice_counts()
        coefficients = {"balance": self.aux_loss_coef, "z": self.z_loss_coef}
        all_reduce = self.all_reduce_counts
        return auxiliary_loss(
            logits, counts, **coefficients, all_reduce=all_reduce, backend=backend
        )

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.activation_function.is_gated:
            note_order(destination, prefix[:-1], self.gate_up)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others) -> None:
        if self.activation_function.is_gated:
            remedy = "Build the MoE with the order of the state dict."
            check_order(local_metadata, self.gate_up, remedy)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def extra_repr(self) -> str:
        return (
            f"hidden={self.hidden_size}, intermediate={self.intermediate_size}, "
            f"experts={self.num_experts}, top_k={self.top_k}, router={self.router_kind}, "
            f"activation={self.activation_function.value}"
            + (f", gate_up={self.gate_up}" if self.activation_function.is_gated else "")
            + f", precision={self.precision}, memory={in_words(self.memory)}"
        )


def _adapter(name: str, experts: nn.Module) -> LowRank | None:
    """The LoRA adapter of `experts`, if PEFT has wrapped them; their weight is without it."""
    if isinstance(experts, Experts):
        return None
    low_rank: Any = getattr(experts, "low_rank", None)
    if low_rank is None:
        raise bad_argument(
            name,
            "sonicmoe.Experts, or PEFT's LoRA on their weight after use_lora_experts(model)",
            type(experts).__name__,
            "Call sonicmoe.integrations.peft.use_lora_experts(model).",
        )
    return low_rank()


def _refresh_fp8_weights(moe: MoE, incompatible_keys: Any) -> None:
    """Compiled models do not see that weights were loaded."""
    if moe._fp8_weights is not None and moe._fp8_weights.is_kept:
        moe.refresh_fp8_weights()


def _backend_name(backend: KernelBackendMoE | str | None) -> str | None:
    if backend is None:
        return None
    if backend in (KernelBackendMoE.sonicmoe, "sonicmoe"):
        return "triton"
    if backend in (KernelBackendMoE.torch, "torch"):
        return "torch"
    raise bad_argument(
        "kernel_backend_moe",
        "KernelBackendMoE.sonicmoe, KernelBackendMoE.torch, their names or None",
        backend,
        "ScatterMoE is a package of its own and not part of this layer.",
    )
