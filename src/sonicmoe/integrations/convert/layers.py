"""Weights of Hugging Face models to `sonicmoe.MoE` and back, one layer at a time, bit for bit.

Converting only renames, stacks, transposes and reorders. Needs no transformers: weights come as a
dict of tensors, from a module or from a checkpoint file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...enums import ActivationType
from ...errors import bad_argument
from ...layer.gate_up_order import check_order, metadata_of, with_order
from ...reference.activation import join_gate_up, split_gate_up
from ...routing import Router, Sigmoid
from ...validation import check_gate_up


@dataclass(frozen=True, slots=True)
class Family:
    """Names and layouts of one model type.

    A checkpoint has either `experts.{e}.{gate}.weight` and so on for every expert e (`per_expert`
    has the names of gate, up and down), or the fused `experts.gate_up_proj` and
    `experts.down_proj`; transformers 5 has the fused ones in its modules.
    """

    router: str = "gate"
    selection_bias: str | None = None
    per_expert: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    shared: str | None = None
    shared_gate: str | None = None
    gate_up: str = "concatenated"  # of the fused weights
    transposed: bool = False  # fused weights are (E, in, out)
    biases: bool = False  # of router and experts
    # Attributes of the configuration.
    num_experts: str = "num_experts"
    intermediate_size: str = "moe_intermediate_size"


_QWEN_SHARED = Family(shared="shared_expert", shared_gate="shared_expert_gate")
_FAMILIES = {
    "mixtral": Family(
        per_expert=("w1", "w3", "w2"),
        num_experts="num_local_experts",
        intermediate_size="intermediate_size",
    ),
    "qwen2_moe": _QWEN_SHARED,
    "qwen3_moe": Family(),
    "qwen3_next": _QWEN_SHARED,
    "olmoe": Family(intermediate_size="intermediate_size"),
    "deepseek_v3": Family(
        selection_bias="gate.e_score_correction_bias",
        shared="shared_experts",
        num_experts="n_routed_experts",
    ),
    "gpt_oss": Family(
        router="router",
        per_expert=None,
        gate_up="interleaved",
        transposed=True,
        biases=True,
        num_experts="num_local_experts",
        intermediate_size="intermediate_size",
    ),
}
_GATED = {
    "silu": ActivationType.SWIGLU,
    "gelu": ActivationType.GEGLU,
    "gelu_pytorch_tanh": ActivationType.GEGLU_TANH,
    "relu": ActivationType.REGLU,
}

# Of a `MoE`. The first weight with a letter sets its size; the others are compared with it.
DIMENSIONS = {
    "router.weight": ("E", "H"),
    "router.bias": ("E",),
    "routing.selection_bias": ("E",),
    "c_proj.weight": ("E", "H", "I"),
    "c_proj.bias": ("E", "H"),
    "c_fc.weight": ("E", "2I", "H"),
    "c_fc.bias": ("E", "2I"),
    "shared_expert.c_proj.weight": ("H", "S"),
    "shared_expert.c_fc.weight": ("2S", "H"),
    "shared_expert.gate.weight": ("1", "H"),
}


def from_hf(
    state_dict: Mapping[str, torch.Tensor],
    family: str,
    *,
    gate_up: str = "interleaved",
    prefix: str = "",
) -> dict[str, torch.Tensor]:
    """Return the state dict of a `MoE` for the weights of one layer of a Hugging Face model.

    `family` is the `model_type` of the model's configuration; `gate_up` is that of the `MoE`. Only
    keys that begin with `prefix`, such as "model.layers.3.mlp.", are read. Experts may be fused, as
    in the modules of transformers 5, or separate, as in checkpoints. Results may share memory with
    `state_dict`.
    """
    f = find_family(family, gate_up)
    rest = {key.removeprefix(prefix): t for key, t in state_dict.items() if key.startswith(prefix)}

    def take(key: str) -> torch.Tensor:
        if key not in rest:
            remedy = "Pass the weights of one layer, or its prefix."
            raise _absent(prefix + key, family, state_dict, remedy)
        return rest.pop(key)

    made = {ours: take(theirs) for ours, theirs in renamed(f).items()}
    if f.per_expert is None or "experts.gate_up_proj" in rest:
        w1, w2 = take("experts.gate_up_proj"), take("experts.down_proj")
        w1, w2 = (w1.mT, w2.mT) if f.transposed else (w1, w2)
        made["c_fc.weight"] = _reordered(w1, f.gate_up, gate_up)
        made["c_proj.weight"] = w2
    else:
        numbers = range(len(made["router.weight"]))
        parts = [[take(f"experts.{e}.{name}.weight") for e in numbers] for name in f.per_expert]
        _check_dtypes("experts", [*parts[0], *parts[1]])
        _check_dtypes("experts", parts[2])
        gate, up, down = map(torch.stack, parts)
        made["c_fc.weight"] = _join(gate, up, gate_up)
        made["c_proj.weight"] = down
    if f.biases:
        bias = take("experts.gate_up_proj_bias")
        made["c_fc.bias"] = _reordered(bias[..., None], f.gate_up, gate_up)[..., 0]
    if f.shared:
        gate, up = (take(f"{f.shared}.{name}.weight") for name in ("gate_proj", "up_proj"))
        _check_dtypes(f.shared, [gate, up])
        made["shared_expert.c_fc.weight"] = _join(gate, up, gate_up)
    _none_left(rest, family, "from_hf")
    _check_shapes(made, family)
    return with_order({key: t.contiguous() for key, t in made.items()}, gate_up)


def to_hf(
    state_dict: Mapping[str, torch.Tensor],
    family: str,
    *,
    gate_up: str = "interleaved",
    prefix: str = "",
    fused: bool = True,
) -> dict[str, torch.Tensor]:
    """Return the weights of one layer of a Hugging Face model for the state dict of a `MoE`.

    The inverse of `from_hf`. `fused=False` gives each expert keys of its own, as checkpoints have
    them; transformers 5 loads both.
    """
    f = find_family(family, gate_up)
    if f.per_expert is None and not fused:
        raise bad_argument("fused", f"True for {family}", fused, "It has no per-expert keys.")
    check_order(metadata_of(state_dict), gate_up, "Pass the gate_up of the MoE.")
    rest = dict(state_dict)

    def take(key: str) -> torch.Tensor:
        if key not in rest:
            remedy = "Pass moe.state_dict() of a MoE with the options of this family: moe_options."
            raise _absent(key, family, state_dict, remedy)
        return rest.pop(key)

    _check_shapes(rest, family)
    made = {theirs: take(ours) for ours, theirs in renamed(f).items()}
    w1, w2 = take("c_fc.weight"), take("c_proj.weight")
    if f.per_expert is None or fused:
        w1 = _reordered(w1, gate_up, f.gate_up)
        w1, w2 = (w1.mT, w2.mT) if f.transposed else (w1, w2)
        made |= {"experts.gate_up_proj": w1, "experts.down_proj": w2}
    else:
        for name, weights in zip(f.per_expert, (*_split(w1, gate_up), w2), strict=True):
            made |= {f"experts.{e}.{name}.weight": w for e, w in enumerate(weights)}
    if f.biases:
        bias = take("c_fc.bias")[..., None]
        made["experts.gate_up_proj_bias"] = _reordered(bias, gate_up, f.gate_up)[..., 0]
    if f.shared:
        gate, up = _split(take("shared_expert.c_fc.weight"), gate_up)
        made |= {f"{f.shared}.gate_proj.weight": gate, f"{f.shared}.up_proj.weight": up}
    _none_left(rest, family, "to_hf")
    return {prefix + key: t.contiguous() for key, t in made.items()}


def moe_options(config: Any) -> dict[str, Any]:
    """Return the arguments of a `MoE` that computes what a layer of a Hugging Face model does.

    `config` is the model's configuration, for multimodal models that of the language model. The
    coefficients of the auxiliary loss stay those of `MoE`. Call it for each layer: layers must not
    share a router with a bias, such as that of DeepSeek-V3.
    """
    f = find_family(config.model_type)
    if noise := getattr(config, "router_jitter_noise", 0.0):
        raise bad_argument("router_jitter_noise", "0", noise, "MoE has no jitter: set it to 0.")
    options = {
        "num_experts": getattr(config, f.num_experts),
        "num_experts_per_tok": config.num_experts_per_tok,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, f.intermediate_size),
        "activation_function": _activation(config),
        "add_bias": f.biases,
        "router_bias": f.biases,
        "router": _router(config, f),
        "fp32_router_logits": f.selection_bias is not None,
    }
    if f.shared_gate:
        options["shared_intermediate_size"] = config.shared_expert_intermediate_size
        options["shared_gate"] = True
    elif f.shared:
        size = config.moe_intermediate_size * config.n_shared_experts
        options["shared_intermediate_size"] = size
    return options


def find_family(family: str, gate_up: str = "interleaved") -> Family:
    check_gate_up(gate_up)
    if family not in _FAMILIES:
        raise bad_argument(
            "family",
            f"one of {', '.join(_FAMILIES)}",
            repr(family),
            "Others run through sonicmoe.integrations.transformers, with their own weights.",
        )
    return _FAMILIES[family]


def renamed(f: Family) -> dict[str, str]:
    """Our keys and theirs, for the weights that are only renamed."""
    keys = {"router.weight": f"{f.router}.weight"}
    if f.biases:
        keys |= {"router.bias": f"{f.router}.bias", "c_proj.bias": "experts.down_proj_bias"}
    if f.selection_bias:
        keys["routing.selection_bias"] = f.selection_bias
    if f.shared:
        keys["shared_expert.c_proj.weight"] = f"{f.shared}.down_proj.weight"
    if f.shared_gate:
        keys["shared_expert.gate.weight"] = f"{f.shared_gate}.weight"
    return keys


def _activation(config: Any) -> ActivationType:
    if config.model_type != "gpt_oss":
        if config.hidden_act not in _GATED:
            raise bad_argument(
                "hidden_act",
                f"one of {', '.join(_GATED)}",
                config.hidden_act,
                "Keep the layer of transformers for this model.",
            )
        return _GATED[config.hidden_act]
    limit, alpha = getattr(config, "swiglu_limit", 7.0), getattr(config, "swiglu_alpha", 1.702)
    return ActivationType.clamped_swiglu(limit, alpha=alpha, offset=1.0)


def _router(config: Any, f: Family) -> str | Router:
    if f.selection_bias:
        return Sigmoid(
            getattr(config, f.num_experts),
            config.num_experts_per_tok,
            groups=config.n_group,
            groups_kept=config.topk_group,
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
    if getattr(config, "norm_topk_prob", True):  # Mixtral and gpt-oss always normalize
        return "softmax_over_topk"
    return "topk_over_softmax"


def _join(gate: torch.Tensor, up: torch.Tensor, gate_up: str) -> torch.Tensor:
    """Rows of gate and up (…, I, H) as one (…, 2I, H)."""
    return join_gate_up(gate.mT, up.mT, gate_up).mT


def _split(w1: torch.Tensor, gate_up: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `_join`."""
    gate, up = split_gate_up(w1.mT, gate_up)
    return gate.mT, up.mT


def _reordered(w1: torch.Tensor, before: str, after: str) -> torch.Tensor:
    return w1 if before == after else _join(*_split(w1, before), after)


def _check_shapes(ours: Mapping[str, torch.Tensor], family: str) -> None:
    """Raise unless the shapes of the given weights agree on E, H, I and S."""
    sizes = {"1": 1}
    for name, dims in DIMENSIONS.items():
        if name not in ours:
            continue
        shape = tuple(ours[name].shape)
        for dim, size in zip(dims, shape, strict=False):
            if not dim.startswith("2"):
                sizes.setdefault(dim, size)
        if not all(dim[-1] in sizes for dim in dims):
            continue  # a weight is absent, which is reported elsewhere
        want = tuple(sizes[dim[-1]] * (2 if len(dim) == 2 else 1) for dim in dims)
        if shape != want:
            expected = f"{name} ({', '.join(dims)}) = {want} for {family}"
            remedy = "Experts have gate and up columns, and the router has a row for each expert."
            raise bad_argument("state_dict", expected, shape, remedy)


def _check_dtypes(name: str, weights: list[torch.Tensor]) -> None:
    """Raise unless these weights, which become one tensor, have one dtype."""
    found = sorted({str(t.dtype) for t in weights})
    if len(found) > 1:
        remedy = "Convert the weights of the layer to one of them first."
        raise bad_argument("state_dict", f"{name} of one dtype", " and ".join(found), remedy)


def _absent(key: str, family: str, given: Mapping[str, Any], remedy: str) -> ValueError:
    got = f"{len(given)} other keys" + _examples(given)
    return bad_argument("state_dict", f"a key {key} for {family}", got, remedy)


def _none_left(rest: Mapping[str, torch.Tensor], family: str, function: str) -> None:
    if rest:
        raise bad_argument(
            "state_dict",
            f"only the weights of one layer of {family}",
            f"{len(rest)} more" + _examples(rest),
            f"{function} drops nothing: remove them, and dequantize quantized weights.",
        )


def _examples(state_dict: Mapping[str, Any]) -> str:
    names = list(state_dict)[:3]
    return f": {', '.join(names)}{', …' if len(state_dict) > 3 else ''}" if names else ""
