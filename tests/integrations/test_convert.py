"""Weights of Hugging Face layers in `MoE` and back: the same outputs, the same bits."""

import copy
import re

import pytest
import torch
from helpers import same_bits
from hf_models import small

from sonicmoe import ActivationType, MoE
from sonicmoe.integrations.convert import from_hf, moe_options, to_hf

FAMILIES = {
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "olmoe": "Olmoe",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
}
LAYOUTS = ["interleaved", "concatenated"]
every_family = pytest.mark.parametrize("family", FAMILIES)
every_layout = pytest.mark.parametrize("gate_up", LAYOUTS)


@pytest.fixture(scope="module")
def models():
    """Each model once: random weights, and random numbers in buffers that start as zeros."""
    torch.manual_seed(0)
    found = {family: small(name).eval() for family, name in FAMILIES.items()}
    for model in found.values():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.1)
    return found


def _block(model) -> torch.nn.Module:
    return model.model.layers[-1].mlp


def _moe(model, **options) -> MoE:
    return MoE(**moe_options(model.config), **options).eval()


def _step(block, x):
    x = x.clone().requires_grad_()
    out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    block.zero_grad(set_to_none=True)
    (out * weight).sum().backward()
    return out.detach(), x.grad


@pytest.mark.tries("Hugging Face transformers", "weights to `MoE` and back")
@every_layout
@every_family
def test_the_layer_computes_what_the_model_does(models, family, gate_up):
    """Output, dX and the gradient of every weight, which is converted like a weight."""
    model = models[family]
    block, moe = _block(model), _moe(model, gate_up=gate_up)
    moe.load_state_dict(from_hf(block.state_dict(), family, gate_up=gate_up))
    x = torch.randn(2, 16, 32)
    (want, dx), (got, our_dx) = _step(block, x), _step(moe, x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
    torch.testing.assert_close(our_dx, dx, rtol=1e-5, atol=1e-5 * dx.abs().max().item())
    gradients = {n: p.grad for n, p in moe.named_parameters()}
    gradients |= dict(moe.named_buffers()) if family == "deepseek_v3" else {}
    gradients.pop("routing.load", None)
    for name, gradient in to_hf(gradients, family, gate_up=gate_up).items():
        if not name.endswith("e_score_correction_bias"):
            theirs = block.get_parameter(name).grad
            scale = theirs.abs().max().item()
            torch.testing.assert_close(gradient, theirs, rtol=0, atol=2e-5 * scale, msg=name)


def test_sigmoid_routers_choose_by_logits_in_fp32(models):
    """Logits rounded to bf16 send some of the tokens to other experts than the model does."""
    model = copy.deepcopy(models["deepseek_v3"]).bfloat16()
    moe = _moe(model).bfloat16()
    moe.load_state_dict(from_hf(_block(model).state_dict(), "deepseek_v3"))
    x = torch.randn(1, 2000, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        want, got = _block(model)(x)[0].float(), moe(x)[0][0].float()
    assert ((got - want).norm(dim=-1) <= 0.03 * want.norm(dim=-1)).all()


@every_layout
@every_family
def test_both_ways_are_exact(models, family, gate_up):
    weights = _block(models[family]).state_dict()
    ours = from_hf(weights, family, gate_up=gate_up)
    assert ours.keys() == _moe(models[family], device="meta").state_dict().keys()
    same_bits(to_hf(ours, family, gate_up=gate_up), weights)
    assert all(t.is_contiguous() for t in ours.values())


@every_family
def test_checkpoints_of_transformers(models, family, tmp_path):
    """The keys in files that transformers writes, which are not those of its modules."""
    from safetensors.torch import load_file

    model = models[family]
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    (prefix,) = {m[0] for key in saved if (m := re.match(r"model\.layers\.1\.\w+\.(?=exp)", key))}
    layer = {key: t for key, t in saved.items() if key.startswith(prefix)}
    separate = f"{prefix}experts.gate_up_proj" not in layer
    assert separate == (family != "gpt_oss")
    ours = from_hf(saved, family, prefix=prefix)
    same_bits(ours, from_hf(_block(model).state_dict(), family))
    same_bits(to_hf(ours, family, prefix=prefix, fused=not separate), layer)


@every_family
def test_a_meta_layer_is_filled(models, family):
    """As a large layer is loaded: no weight is initialized first, and the dtype stays."""
    model = models[family]
    moe = _moe(model, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    moe.reset_parameters()
    weights = {n: t.bfloat16() for n, t in _block(model).state_dict().items()}
    moe.load_state_dict(from_hf(weights, family))
    same_bits({n: t.bfloat16() for n, t in to_hf(moe.state_dict(), family).items()}, weights)
    assert moe(torch.randn(8, 32).bfloat16())[0].isfinite().all()


def test_memory_is_shared_where_nothing_moves(models):
    weights = _block(models["mixtral"]).state_dict()
    ours = from_hf(weights, "mixtral", gate_up="concatenated")
    assert ours["c_fc.weight"].data_ptr() == weights["experts.gate_up_proj"].data_ptr()


def test_options_of_the_router():
    model = small("DeepseekV3", norm_topk_prob=False, routed_scaling_factor=3.0)
    router = _moe(model).routing
    assert (router.groups, router.groups_kept, router.normalize, router.scale) == (2, 1, False, 3.0)
    assert _moe(small("Olmoe", norm_topk_prob=True)).router_kind == "softmax_over_topk"
    assert _moe(small("Olmoe")).router_kind == "topk_over_softmax"


def test_another_activation():
    moe = _moe(small("Mixtral", hidden_act="gelu_pytorch_tanh"))
    assert moe.activation_function is ActivationType.GEGLU_TANH
    with pytest.raises(ValueError, match=r"hidden_act: expected one of silu, .* got tanh"):
        _moe(small("Mixtral", hidden_act="tanh"))
    limited = _moe(small("GptOss", swiglu_limit=5.0)).activation_function
    assert limited is ActivationType.clamped_swiglu(5.0, alpha=1.702, offset=1.0)


def test_jitter_is_refused():
    with pytest.raises(ValueError, match=r"router_jitter_noise: expected 0, got 0\.1"):
        _moe(small("Mixtral", router_jitter_noise=0.1))


def test_wrong_keys_are_named(models):
    weights = _block(models["mixtral"]).state_dict()
    some = {name: t for name, t in weights.items() if name != "gate.weight"}
    with pytest.raises(ValueError, match=r"state_dict: expected a key gate\.weight for mixtral"):
        from_hf(some, "mixtral")
    with pytest.raises(ValueError, match=r"expected a key x\.gate\.weight for mixtral, got 3 oth"):
        from_hf(weights, "mixtral", prefix="x.")
    with pytest.raises(ValueError, match=r"got 1 more: gate\.weight_scale_inv"):
        from_hf({**weights, "gate.weight_scale_inv": torch.ones(1)}, "mixtral")
    ours = from_hf(weights, "mixtral")
    with pytest.raises(ValueError, match=r"expected a key router\.bias for gpt_oss"):
        to_hf(ours, "gpt_oss")
    with pytest.raises(ValueError, match=r"only the weights of one layer of olmoe, got 1 more"):
        to_hf({**ours, "router.bias": torch.ones(4)}, "olmoe")


def test_other_bad_arguments(models):
    with pytest.raises(ValueError, match=r"family: expected one of mixtral, .* got 'llama'"):
        from_hf({}, "llama")
    with pytest.raises(ValueError, match="gate_up: expected 'interleaved'"):
        to_hf({}, "olmoe", gate_up="both")
    ours = from_hf(_block(models["gpt_oss"]).state_dict(), "gpt_oss")
    with pytest.raises(ValueError, match="fused: expected True for gpt_oss"):
        to_hf(ours, "gpt_oss", fused=False)


def test_a_router_of_other_experts_is_refused(models):
    for family in ("mixtral", "gpt_oss"):
        weights = dict(_block(models[family]).state_dict())
        name = "gate.weight" if family == "mixtral" else "router.weight"
        experts = len(weights[name])
        weights[name] = torch.cat([weights[name], weights[name][:1]])
        if family == "gpt_oss":
            weights["router.bias"] = weights["router.bias"].new_zeros(experts + 1)
        with pytest.raises(
            ValueError, match=rf"expected c_proj.weight \(E, H, I\) = \({experts + 1},"
        ):
            from_hf(weights, family)


@pytest.mark.parametrize("fused", [True, False])
def test_an_ungated_layer_is_refused(fused):
    """Its W1 has no gate; half of it is not one."""
    ungated = MoE(4, 2, 32, 16, ActivationType.RELU_SQ).state_dict()
    with pytest.raises(
        ValueError, match=r"expected c_fc.weight \(E, 2I, H\) = \(4, 32, 32\) .* got"
    ):
        to_hf(ungated, "mixtral", fused=fused)


@every_family
def test_every_shape_is_compared(models, family):
    ours = from_hf(_block(models[family]).state_dict(), family)
    for name, t in ours.items():
        with pytest.raises(ValueError, match="state_dict: expected "):
            to_hf({**ours, name: torch.cat([t, t])}, family)


@every_layout
def test_the_order_of_gate_and_up_is_noted(models, gate_up):
    other = LAYOUTS[1 - LAYOUTS.index(gate_up)]
    model = models["qwen2_moe"]
    ours = from_hf(_block(model).state_dict(), "qwen2_moe", gate_up=gate_up)
    for weights in (ours, _moe(model, gate_up=gate_up).state_dict()):
        with pytest.raises(ValueError, match=f"gate_up: expected '{gate_up}', the order of the"):
            to_hf(weights, "qwen2_moe", gate_up=other)
        with pytest.raises(ValueError, match=f"gate_up: expected '{gate_up}', the order of the"):
            _moe(model, gate_up=other).load_state_dict(weights)
        _moe(model, gate_up=gate_up).load_state_dict(weights)
