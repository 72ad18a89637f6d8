"""Memory policies in plain PyTorch: results, what is kept, and the ways to run a layer."""

import copy
from functools import partial

import pytest
import torch
from helpers import Case, make_inputs, ours, plain, run, same_bits
from memory_policies import CASES, POLICIES
from research.memory import saved_bytes
from torch.utils.checkpoint import checkpoint

import sonicmoe
from sonicmoe import ActivationType, MemoryPolicy, MoE, errors
from sonicmoe.layer.memory import memory_policy
from sonicmoe.layer.run import permute
from sonicmoe.reference.quantize import (
    BLOCK_FLOOR,
    dequantize_blocks,
    power_of_two_scale,
    quantize_blocks,
)
from sonicmoe.shapes import Problem, slice_width
from sonicmoe.tools import cost


# --- the argument ---------------------------------------------------------------------------------
def test_a_word_is_a_policy():
    assert memory_policy("e4m3") == MemoryPolicy("e4m3", 1)
    assert MoE(4, 2, 16, 8).memory == MemoryPolicy("keep", 1)
    assert MoE(4, 2, 16, 8, memory=MemoryPolicy(slices=4)).memory.slices == 4


def test_the_old_word_for_e4m3():
    errors.say_once.cache_clear()
    with pytest.warns(UserWarning, match="memory='fp8' is now called 'e4m3'") as said:
        for memory in ("fp8", MemoryPolicy("fp8", 2)):
            assert memory_policy(memory).in_e4m3
    assert len(said) == 1


@pytest.mark.parametrize("memory", ["fp16", MemoryPolicy("none"), None, 3, ("keep", 1)])
def test_what_is_no_policy(memory):
    with pytest.raises(ValueError, match=r"memory: expected one of 'keep', 'e4m3', 'recompute'"):
        MoE(4, 2, 16, 8, memory=memory)


@pytest.mark.parametrize("slices", [0, -1, 2.0, True])
def test_what_is_no_number_of_slices(slices):
    with pytest.raises(ValueError, match="slices of memory: expected a positive integer"):
        sonicmoe.experts(**make_inputs(CASES[0]).arguments(), memory=MemoryPolicy(slices=slices))


def test_slices_are_multiples_of_64_columns():
    assert [slice_width(4096, c) for c in (1, 2, 3, 4, 64, 100)] == [4096, 2048, 1408, 1024, 64, 64]
    assert slice_width(200, 2) == 128 and slice_width(40, 3) == 40


# --- the format of Z ------------------------------------------------------------------------------
def test_scale_is_the_least_power_of_two():
    values = torch.tensor([448.0, 448.01, 1.75, 1.76, 1e-18, 0.0, 3e38])
    scale = power_of_two_scale(values)
    assert scale[5] == 2.0**-126 and power_of_two_scale(values, BLOCK_FLOOR)[5] == 2.0**-70
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    assert (values <= 448 * scale.double()).all()
    assert (values > 224 * scale.double())[[0, 1, 2, 3, 4, 6]].all()
    assert scale[0] == 1 and scale[1] == 2 and scale[2] == 2**-8


@pytest.mark.parametrize("concatenated", [False, True])
def test_blocks_have_scales_of_their_own(concatenated):
    z = torch.randn(5, 320) * torch.logspace(-6, 6, 5)[:, None]
    z[:, 64:128] *= 2.0**20
    z8, scale = quantize_blocks(z, concatenated)
    assert z8.dtype == torch.float8_e4m3fn and z8.shape == (5, 320) and scale.shape == (3, 5)
    back = dequantize_blocks(z8, scale, concatenated)
    # A normal e4m3 number has three bits behind the point; the block's largest is one.
    if concatenated:  # columns 64..127 and 224..287 are one block
        others = (
            torch.cat([z[:, :64], z[:, 160:224]], 1),
            torch.cat([back[:, :64], back[:, 160:224]], 1),
        )
    else:
        others = z[:, 128:256], back[:, 128:256]
    exact, found = others
    assert ((found - exact).abs() <= exact.abs() / 16 + exact.abs().amax(1, True) * 2.0**-17).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_row(bad):
    z = torch.randn(4, 256)
    z[2, 70] = bad
    back = dequantize_blocks(*quantize_blocks(z, False), False)
    assert not back[2, 70].isfinite()
    assert back[[0, 1, 3]].isfinite().all() and back[2, 128:].isfinite().all()


# --- results --------------------------------------------------------------------------------------
def test_a_clamp_that_is_seldom_reached_costs_no_accuracy():
    """Rounding to e4m3 moves values across the limit, where the slope jumps."""
    case = Case("256,64,136,5,3", torch.float32, ActivationType.SWIGLU_CLAMPED)
    inputs = make_inputs(case)
    inputs.w1 = inputs.w1 / 6  # Z of order one, the limit is 7
    exact = run(plain(case), inputs.double())
    got = run(partial(ours(case, "torch"), memory="e4m3"), inputs)
    for name, error in {n: (got[n] - exact[n]).norm() / exact[n].norm() for n in exact}.items():
        assert error <= 0.047, name


@pytest.mark.parametrize("memory", ["e4m3", "recompute"])
@pytest.mark.parametrize("scored", [False, True])
def test_sorted_rows(memory, scored):
    case = Case("40,64,72,4,1", torch.float32, bias=True)
    inputs = make_inputs(case)
    counts = torch.tensor([7, 0, 30, 2])
    scores = torch.rand(40) if scored else None

    def gradients(memory):
        leaves = [inputs.x, inputs.w1, inputs.w2, inputs.b1, inputs.b2]
        leaves = [t.detach().requires_grad_() for t in leaves]
        x, w1, w2, b1, b2 = leaves
        out = sonicmoe.grouped_experts(x, counts, w1, w2, b1, b2, scores, memory=memory)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)]

    for got, want in zip(gradients(memory), gradients("keep"), strict=True):
        assert (got - want).norm() <= (0.047 * want.norm() if memory == "e4m3" else 0)


# --- ways to run a layer --------------------------------------------------------------------------
def gradients_of(moe: MoE, x: torch.Tensor, forward) -> list[torch.Tensor]:
    moe.zero_grad()
    x = x.detach().requires_grad_()
    out = forward(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in moe.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("memory", POLICIES, ids=str)
@pytest.mark.parametrize("mode", ["checkpointed", "compiled", "compiled checkpoint"])
def test_modes(mode, memory):
    """Every mode has the gradients of the layer as it is."""
    torch.manual_seed(0)
    moe, x = MoE(8, 2, 200, 72, add_bias=True, memory=memory), torch.randn(40, 200)

    def plain_forward(x):
        return moe(x)[0]

    def checkpointed(x):
        return checkpoint(plain_forward, x, use_reentrant=False)

    forward = plain_forward if mode == "compiled" else checkpointed
    if mode != "checkpointed":
        torch._dynamo.reset()
        forward = torch.compile(forward, backend="aot_eager", fullgraph=True)
    want = gradients_of(moe, x, plain_forward)
    for a, b in zip(gradients_of(moe, x, forward), want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("memory", POLICIES, ids=str)
def test_autocast_and_main_grad(memory):
    """The weights are rounded to bf16 again for `recompute`; gradients go to the buffers."""
    torch.manual_seed(0)
    moe, x = MoE(8, 2, 200, 72, add_bias=True, memory=memory), torch.randn(96, 200)
    kept = copy.deepcopy(moe)
    kept.memory = MemoryPolicy()
    for layer in (moe, kept):
        for weight in (layer.c_fc.weight, layer.c_proj.weight):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)[0].float().square().sum().backward()
    for got, want in ((moe.c_fc, kept.c_fc), (moe.c_proj, kept.c_proj)):
        assert got.weight.grad is None
        error = (got.weight.main_grad - want.weight.main_grad).norm()
        assert error <= (0.047 * want.weight.main_grad.norm() if memory == "e4m3" else 0)


def test_frozen_weights_recompute_for_the_scores():
    case = Case("40,64,72,4,2", torch.float32)
    inputs = make_inputs(case)
    inputs.differentiable = ("scores",)
    keep = run(ours(case, "torch"), inputs)
    same_bits(keep, run(partial(ours(case, "torch"), memory="recompute"), inputs))


# --- memory ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("memory", POLICIES, ids=str)
@pytest.mark.parametrize("activation", [ActivationType.SWIGLU, ActivationType.GELU])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kept_bytes_to_the_byte(memory, activation, dtype):
    p = Problem(96, 64, 72, 8, 4, activation.is_gated)
    moe = MoE(p.E, p.K, p.H, p.I, activation, memory=memory, dtype=dtype)
    x = torch.randn(p.T, p.H, dtype=dtype, requires_grad=True)
    tile_m = permute(torch.zeros(p.T, p.K, dtype=torch.int32), p.E, dtype=dtype).tile_m
    kept = cost.kept_bytes(p, dtype.itemsize, tile_m, memory=memory_policy(memory))
    held, _ = saved_bytes(lambda: moe(x, is_inference_mode=False)[0], [x, *moe.parameters()])
    aux = p.T * p.E * dtype.itemsize + 4 * p.E  # the auxiliary loss keeps its logits and slope
    assert held == sum(kept.values()) + aux


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "share"), [("keep", 1.1), ("e4m3", 0.6), ("recompute", 0.1)])
def test_a_compiler_keeps_no_more(memory, share):
    """Its partitioner must not move the second `up` into the forward pass."""
    torch._dynamo.reset()
    moe, x = MoE(8, 4, 64, 256, memory=memory).bfloat16(), torch.randn(256, 64).bfloat16()
    partition = "aot_eager_decomp_partition"
    compiled = torch.compile(lambda x: moe(x)[0], backend=partition, fullgraph=True)
    held, _ = saved_bytes(lambda: compiled(x), [x, *moe.parameters()])
    z = 256 * 4 * 512 * 2
    assert held <= share * z


def test_peak_of_each_policy():
    p = Problem.parse("32768,4096,256,256,16")
    peak = {memory: cost.peak_bytes(p, memory=memory_policy(memory)) for memory in POLICIES}
    z, rows_h = 2 * p.R * p.N, 2 * p.R * p.H
    keep = peak["keep"]
    assert keep.forward - peak["recompute"].forward == z
    assert keep.forward - peak["e4m3"].forward == z // 2 - p.R * 4 * 4
    assert keep.backward == peak["e4m3"].backward == peak["recompute"].backward  # dX̃ is the peak
    halves = peak[MemoryPolicy(slices=2)]
    assert keep.forward - halves.forward == keep.backward - halves.backward == rows_h // 2
    assert cost.peak_bytes(p, memory=MemoryPolicy(slices=4)).backward <= 3000 * 2**20
    small = Problem.parse("4096,256,4096,4,4")  # Z is the peak
    again = cost.peak_bytes(small, memory=MemoryPolicy("recompute")).backward
    assert again == cost.peak_bytes(small).backward
    fp8 = cost.peak_bytes(small, memory=MemoryPolicy("e4m3")).backward
    assert cost.peak_bytes(small).backward - fp8 == small.R * small.N - small.R * 64 * 4


def test_stages_of_each_policy():
    p = Problem.parse("32768,4096,256,256,16")

    def stages(memory):
        memory = memory_policy(memory)
        return {
            s.name: s
            for s in cost.forward_stages(p, memory=memory) + cost.backward_stages(p, memory=memory)
        }

    keep, fp8, again, sliced = map(stages, ("keep", "e4m3", "recompute", MemoryPolicy(slices=4)))
    z, z8 = 2 * p.R * p.N, p.R * p.N + p.R * 4 * 4
    assert keep["up"].written - fp8["up"].written == keep["dZ"].read - fp8["dZ"].read == z - z8
    assert keep["up"].written - again["up"].written == z
    assert again.keys() - keep.keys() == {"up again"}
    assert again["up again"] == keep["up"].__class__(
        "up again", keep["up"].flops, keep["up"].read, keep["up"].written
    )
    assert again["dZ"] == keep["dZ"]
    assert sliced["down"].read - keep["down"].read == 3 * 2 * p.R * p.I
    assert sliced["dX rows"].read - keep["dX rows"].read == 3 * z
    assert sliced["combine"].read - keep["combine"].read == 3 * (4 + 4) * p.R
    assert sliced["dX combine"].read - keep["dX combine"].read == 3 * 4 * p.R
    other = {"down", "dX rows", "combine", "dX combine"}
    assert {name for name in keep if sliced[name] != keep[name]} == other


@pytest.mark.parametrize("precision", ["fp8", "fp8_bf16_dw"])
def test_stages_and_peak_of_slices_in_fp8(precision):
    p = Problem.parse("32768,4096,256,256,16")
    whole, sliced = (
        {s.name: s.read for s in cost.backward_stages(p, memory=memory, precision=precision)}
        for memory in (MemoryPolicy(), MemoryPolicy(slices=4))
    )
    more = {name: sliced[name] - whole[name] for name in whole}
    assert more == dict.fromkeys(more, 0) | {
        "dX rows": 3 * p.R * p.N,
        "dX combine": 3 * 4 * p.R,
    }
    one, four = (
        cost.peak_bytes(p, memory=MemoryPolicy(slices=n), precision=precision) for n in (1, 4)
    )
    assert one.forward - four.forward == 2 * p.R * p.H * 3 // 4
