"""Ways to run LoRA on packed experts that need no other package than transformers and PEFT.

A candidate is made of inputs and two packed weights; it is a function that computes the output.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from sonicmoe import Mxfp4, experts
from sonicmoe.packed import PackedWeight

from .packed_layer import Inputs, activate, of_experts

Forward = Callable[[], torch.Tensor]
Decoder = Callable[[PackedWeight], torch.Tensor]  # to (E, N, K) in bf16


# --- ours -----------------------------------------------------------------------------------------
def ours(inputs: Inputs, weights: tuple[Any, Any], precision: str | None = None) -> Forward:
    i = inputs
    options: dict[str, Any] = {"activation": i.layer.activation, "gate_up": i.layer.gate_up}
    options |= {"lora1": i.lora1, "lora2": i.lora2, "precision": precision}
    return lambda: experts(i.x, i.ids, i.scores, *weights, i.b1, i.b2, **options)


def decoded_for_ours(inputs: Inputs, weights: tuple[Any, Any], decode: Decoder) -> Forward:
    """Decoded in every call; the dense weights live until the backward pass."""
    return lambda: ours(inputs, (decode(weights[0]), decode(weights[1])))()


# --- dequantise + grouped_mm + split LoRA ---------------------------------------------------------
class _FrozenGemm(torch.autograd.Function):
    """x W[e]ᵀ for groups of rows; W is decoded again in the backward pass."""

    @staticmethod
    def forward(ctx, x, decoded, ends):
        ctx.save_for_backward(ends)
        ctx.decoded = decoded
        return F.grouped_mm(x, decoded().mT, offs=ends)

    @staticmethod
    def backward(ctx, dz):
        (ends,) = ctx.saved_tensors
        return F.grouped_mm(dz.contiguous(), ctx.decoded(), offs=ends), None, None


class _Gather(torch.autograd.Function):
    """x[order // K]; the gradient is a gather and a sum, too, instead of atomic additions."""

    @staticmethod
    def forward(ctx, x, order, inverse, k):
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, drows):
        (inverse,) = ctx.saved_tensors
        return drows[inverse].view(-1, ctx.k, drows.shape[1]).sum(1), None, None, None


Gemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of rows and the ends of the groups


def grouped(inputs: Inputs, gemms: tuple[Gemm, Gemm]) -> Forward:
    """The layer around two GEMMs with frozen weights, as unsloth composes it."""
    i, (_, _, E, K) = inputs, inputs.layer.sizes
    activation: Any = activate
    if i.x.is_cuda:  # for any number of tokens
        activation = torch.compile(activate, dynamic=True)

    def projection(rows, gemm, lora, bias, ends, expert):
        a, b = of_experts(lora, E)
        u = F.grouped_mm(rows, a.mT.contiguous(), offs=ends)
        z = gemm(rows, ends) + F.grouped_mm(u, b.mT.contiguous(), offs=ends)
        return z if bias is None else z + bias[expert]

    def forward() -> torch.Tensor:
        expert, order = i.ids.flatten().sort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        every = torch.arange(E, device=expert.device)
        ends = torch.searchsorted(expert, every, right=True).to(torch.int32)
        rows = _Gather.apply(i.x, order, inverse, K)
        z = projection(rows, gemms[0], i.lora1, i.b1, ends, expert)
        a = activation(z, i.layer.like_gpt_oss)
        y = projection(a, gemms[1], i.lora2, i.b2, ends, expert)
        y = y[inverse].view(len(i.x), K, -1)
        return (y * i.scores.to(y.dtype)[..., None]).sum(1)

    return forward


def decoded_for_grouped_mm(inputs: Inputs, weights: tuple[Any, Any], decode: Decoder) -> Forward:
    def gemm(w: Any) -> Gemm:
        return lambda rows, ends: _FrozenGemm.apply(rows, lambda: decode(w), ends)

    return grouped(inputs, (gemm(weights[0]), gemm(weights[1])))


# --- transformers' experts, and PEFT --------------------------------------------------------------
def by_transformers(packed: PackedWeight) -> torch.Tensor:
    """MXFP4, as transformers decodes it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    assert isinstance(packed, Mxfp4)
    return convert_moe_packed_tensors(packed.blocks, packed.scales).mT


def experts_module(inputs: Inputs, implementation: str = "grouped_mm") -> Any:
    """transformers' module for such a layer, without weights."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    H, I, E, K = inputs.layer.sizes
    sizes = {"hidden_size": H, "num_experts_per_tok": K}
    if inputs.layer.like_gpt_oss:
        config: Any = GptOssConfig(intermediate_size=I, num_local_experts=E, **sizes)
    else:
        config = Qwen3MoeConfig(moe_intermediate_size=I, num_experts=E, **sizes)
    config._experts_implementation = implementation
    kind = GptOssExperts if inputs.layer.like_gpt_oss else Qwen3MoeExperts
    with torch.device("meta"):
        module = kind(config)
    for name in list(module._parameters):
        del module._parameters[name]
    if inputs.layer.like_gpt_oss:
        module.gate_up_proj_bias, module.down_proj_bias = inputs.b1, inputs.b2
    return module


NAMES = ("gate_up_proj", "down_proj")


def _call(module: nn.Module, inputs: Inputs) -> torch.Tensor:
    return module(inputs.x, inputs.ids, inputs.scores)


def peft_arithmetic(inputs: Inputs, weights: tuple[Any, Any], decode: Decoder) -> Forward:
    """What PEFT means to compute: in every call, W is decoded and B·A added to it.

    Its own forward pass on weights that are decoded by a parametrization adds B·A repeatedly.
    """
    i, module = inputs, experts_module(inputs)

    def forward() -> torch.Tensor:
        for name, w, lora in zip(NAMES, weights, (i.lora1, i.lora2), strict=True):
            a, b = of_experts(lora, i.layer.sizes[2])
            dense = decode(w) + b @ a
            setattr(module, name, dense.mT if i.layer.like_gpt_oss else dense)
        return _call(module, i)

    return forward


class _Container(nn.Module):
    """What PEFT can replace the experts in."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, inputs: Inputs) -> torch.Tensor:
        return _call(self.experts, inputs)


def with_peft(module: nn.Module, inputs: Inputs) -> Forward:
    """PEFT's own forward pass, with the adapters of `inputs`."""
    from peft import LoraConfig, get_peft_model

    rank = inputs.lora1.a.shape[0] // inputs.layer.sizes[2]
    lora = LoraConfig(r=rank, lora_alpha=rank, target_parameters=[f"experts.{n}" for n in NAMES])
    with inputs.x.device:
        tuned: Any = get_peft_model(_Container(module), lora)
    found: dict[str, Any] = {
        w.parameter_name: w for w in tuned.modules() if hasattr(w, "parameter_name")
    }
    for name, adapter in zip(NAMES, (inputs.lora1, inputs.lora2), strict=True):
        wrapper = found[name]
        wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight = adapter.a, adapter.b
    return lambda: tuned.base_model.model(inputs)


def peft_on_dense(inputs: Inputs, weights: tuple[Any, Any], decode: Decoder) -> Forward:
    """PEFT on weights that were decoded once and stay in bf16."""
    module = experts_module(inputs)
    for name, w in zip(NAMES, weights, strict=True):
        dense = decode(w).mT.contiguous() if inputs.layer.like_gpt_oss else decode(w).contiguous()
        module.register_parameter(name, nn.Parameter(dense, requires_grad=False))
    return with_peft(module, inputs)
