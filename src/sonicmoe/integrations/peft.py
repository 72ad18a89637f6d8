"""PEFT: LoRA on the experts of a transformers model or of `MoE` through `sonicmoe.experts`.

PEFT wraps the experts once for each parameter in `target_parameters`. Its own forward pass adds
scale·B·A to the weights of all experts at every call, and that of `MoE` reads the weights alone.
`use_lora_experts(model)` replaces both; parameters, configuration, saving, loading and merging stay
PEFT's.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import bad_argument
from ..extras import missing
from ..layer.lora import LowRank
from ..moe import Experts, MoE
from .packed_parameter import packed_of
from .transformers import ALL_EXPERTS_FUNCTIONS, calls_ours, register

try:
    from peft import PeftModel
    from peft.tuners.lora import ParamWrapper
except ImportError as error:
    raise missing("peft", "sonicmoe.integrations.peft") from error

__all__ = ["use_lora_experts"]

_NAME = "sonicmoe_experts"


def use_lora_experts(model: nn.Module) -> int:
    """Run the LoRA on a PEFT model's experts in the GEMMs; return the number of layers.

    Call it after `get_peft_model` or `PeftModel.from_pretrained`. The model's experts run by our
    implementation from then on, also where adapters are disabled or merged. Any number of active
    adapters, on one or both weights. With another `experts_implementation`, PEFT's own forward
    pass runs again. The experts may also be those of `MoE`: `c_fc.weight` and `c_proj.weight` in
    `target_parameters`.
    """
    inner = {id(m.base_layer) for m in model.modules() if isinstance(m, ParamWrapper)}
    outer = [m for m in model.modules() if isinstance(m, ParamWrapper) and id(m) not in inner]
    of_moe = [wrapper for wrapper in outer if _wraps_weight_of_moe(wrapper)]
    outer = [w for w in outer if w not in of_moe and _wraps_experts(w)]
    if not outer and not of_moe:
        raise bad_argument(
            "model",
            "a PEFT model with LoRA on experts",
            f"{type(model).__name__} without any",
            "Pass target_parameters=['experts.gate_up_proj', 'experts.down_proj'] to LoraConfig, or"
            " ['c_fc.weight', 'c_proj.weight'] for MoE.",
        )
    for wrapper in of_moe:
        wrapper.low_rank = partial(_active_low_rank, wrapper)  # type: ignore[assignment]
    if not all(_is_ours(wrapper.get_base_layer()) for wrapper in outer):
        if not calls_ours(ALL_EXPERTS_FUNCTIONS.get(_NAME)):  # else other models may use it
            register(_NAME)
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        base.set_experts_implementation(_NAME)
    for wrapper in outer:
        # Not a bound method: that could not be pickled with the model.
        wrapper.forward = partial(_forward, wrapper)  # type: ignore[method-assign]
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    return len(outer) + sum(m.c_fc in of_moe or m.c_proj in of_moe for m in layers)


def _wraps_weight_of_moe(wrapper: Any) -> bool:
    return isinstance(wrapper.base_layer, Experts) and wrapper.parameter_name == "weight"


def _active_low_rank(wrapper: Any) -> LowRank | None:
    """None where PEFT's adapter is disabled, or part of the weight."""
    return None if wrapper.disable_adapters or wrapper.merged else _low_rank(wrapper)


def _wraps_experts(wrapper: Any) -> bool:
    """False for other parameters, such as a router's; a ValueError for experts unlike ours."""
    experts = wrapper.get_base_layer()
    if not hasattr(experts, "is_transposed"):
        if wrapper.get_param().ndim < 3:
            return False
        raise bad_argument(
            "model",
            "LoRA on experts with transformers' experts interface",
            type(experts).__name__,
            "Leave this model to PEFT: do not call use_lora_experts.",
        )
    for name in (w.parameter_name for w in _chain(wrapper)):
        if name not in _weights(experts):
            raise bad_argument(
                "target_parameters",
                f"{' and '.join(_weights(experts))} of {type(experts).__name__}",
                name,
                "Leave it out of target_parameters.",
            )
    return True


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In place of `ParamWrapper.forward` of the outermost wrapper of the experts."""
    found = None if kwargs.get("adapter_names") else adapters_of(self)
    if found is None:
        return ParamWrapper.forward(self, x, *args, **kwargs)
    self._check_forward_args(x, *args, **kwargs)
    lora1, lora2 = found
    return self.get_base_layer()(x, *args, **kwargs, lora1=lora1, lora2=lora2)


def adapters_of(wrapper: Any) -> tuple[LowRank | None, LowRank | None] | None:
    """The adapters of both weights, for our experts; None if PEFT's own forward pass runs.

    `wrapper` is the outermost one of an experts module of transformers.
    """
    experts, wrappers = wrapper.get_base_layer(), list(_chain(wrapper))
    if is_plain(wrapper) or not _is_ours(experts):
        return None
    found = {w.parameter_name: _low_rank(w) for w in wrappers}
    first, second = _weights(experts)
    return found.get(first), found.get(second)


def is_plain(wrapper: Any) -> bool:
    """Whether the adapters are disabled, or merged into the weights."""
    return wrapper.disable_adapters or any(w.merged for w in _chain(wrapper))


def uses_lora_experts(wrapper: Any) -> bool:
    """Whether `use_lora_experts` has replaced the forward pass of this outermost wrapper."""
    return getattr(vars(wrapper).get("forward"), "func", None) is _forward


def _chain(wrapper: Any) -> Iterator[Any]:
    """The wrappers of one experts module, from the outside."""
    while isinstance(wrapper, ParamWrapper):
        yield wrapper
        wrapper = wrapper.base_layer


def _weights(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _is_ours(experts: Any) -> bool:
    return calls_ours(ALL_EXPERTS_FUNCTIONS.get(experts.config._experts_implementation))


def _low_rank(wrapper: Any) -> LowRank | None:
    """The sum of the active adapters: one of as many ranks as all of them together."""
    name, number = wrapper.parameter_name, wrapper.num_experts
    weight = packed_of(wrapper.get_base_layer(), name)  # reading it must not dequantize it
    weight = wrapper.get_param() if weight is None else weight
    if isinstance(weight, DTensor) or weight.shape[0] != number:
        raise bad_argument(
            name,
            f"the weights of all {number} experts of its adapter",
            f"{type(weight).__name__} {tuple(weight.shape)}",
            "Expert and tensor parallelism run by PEFT: do not call use_lora_experts.",
        )
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if not names:
        return None
    factors = [LowRank(wrapper.lora_A[n].weight, wrapper.lora_B[n].weight) for n in names]
    scales = [wrapper.scaling[n] for n in names]
    if len(names) == 1:
        return factors[0]._replace(scale=scales[0])
    a = torch.cat([f.a.view(number, -1, f.a.shape[1]) for f in factors], dim=1)
    b = torch.cat([scale * f.b for scale, f in zip(scales, factors, strict=True)], dim=1)
    return LowRank(a.flatten(0, 1), b)
