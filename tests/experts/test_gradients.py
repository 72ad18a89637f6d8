"""The kernels of the layer against fp64, in memory full of NaN; weight gradients of every kind."""

import pytest
import torch
from devices import on, values_on
from helpers import (
    ACTIVATIONS,
    Case,
    check_experts,
    check_fp32_weights,
    check_main_grad,
    compare,
    make_inputs,
    ours,
    plain,
    poisoned,
    run,
    same_bits,
)
from matrix import CASES

import sonicmoe
from sonicmoe import ActivationType
from sonicmoe.kernels import spans
from sonicmoe.launch import grouped_gemm
from sonicmoe.launch import spans as launch_spans
from sonicmoe.tuning import Target

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Below every tile, H and I multiples of 8 alone, T odd. With a third fewer tokens the error of dW2
# scatters beyond its budget now and then, in plain PyTorch by the same amount.
TINY = "33,24,8,3,2"

# dtype, bias, gate/up layout, storage. Activations are computed in fp32 whatever the rest, so pairs
# are enough: each activation meets every value of the four, and each pair of the four meets.
CORNERS = [
    (
        (BF16, True, "interleaved", False),
        (FP16, False, "interleaved", True),
        (FP32, False, "concatenated", False),
    ),
    (
        (BF16, False, "concatenated", True),
        (FP16, True, "concatenated", False),
        (FP32, True, "interleaved", True),
    ),
]
TINY_CASES = [
    Case(TINY, dtype, activation, bias, gate_up, transposed, "dropped")
    for i, activation in enumerate(ACTIVATIONS)
    for dtype, bias, gate_up, transposed in CORNERS[i % 2]
]
SHAPES = {
    "0,16,8,3,2": "uniform",  # no token
    "1,16,8,3,2": "uniform",  # one token
    "9,16,8,4,4": "all_experts",  # K = E
    "40,48,24,5,3": "zipf",  # more than a tile of 32 rows in fp32
    "70,16,8,4,1": "one_expert",
    "13,40,16,5,2": "empty_experts",
    "13,40,24,5,3": "duplicates",
    "6,16,8,3,2": "all_dropped",
}
# With spans of 64 rows: one long expert, one long and three short ones, two long ones side by side.
LONG = {"150,24,16,3,2": "one_expert", "200,24,16,4,2": "zipf", "160,16,8,2,2": "all_experts"}
TINY_EDGES = [
    *(Case(s, dtype, bias=True, routing=r) for s, r in SHAPES.items() for dtype in (BF16, FP32)),
    # H and I past the widest tile, so that every loop over columns turns more than once.
    Case("5,264,264,2,1", FP16, bias=True),
]


@values_on("case", interpreter=[*TINY_CASES, *TINY_EDGES], cuda=CASES)
def test_every_gradient_is_within_the_budget(case, device):
    check_experts(case, device, "triton")


@values_on(
    "case, target",
    interpreter=[
        (Case(TINY, BF16, bias=True, transposed=t, gate_up="concatenated", routing="dropped"),
         Target(arch, 4))
        for arch in (80, 86, 100, 120) for t in (False, True)
    ],
    cuda=[
        (Case("333,264,136,6,3", dtype, bias=True, transposed=True), Target(arch, 100))
        for arch in (80, 86, 100) for dtype in (BF16, FP32)
    ],
)  # fmt: skip
def test_configurations_of_other_devices(case, target, device, monkeypatch):
    """Less shared memory, or no TMA that the kernels use: other tiles, plain loads."""
    monkeypatch.setattr(grouped_gemm, "target_of", lambda t: target)
    check_experts(case, device, "triton")


# --- weight gradients -----------------------------------------------------------------------------
ON_GPU = [("777,264,136,6,2", "uniform"), ("777,264,136,6,2", "empty_experts")]
ON_GPU += [("12000,264,136,6,2", "zipf")]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
@values_on("shape, routing", interpreter=[(TINY, "dropped")], cuda=ON_GPU)
def test_weight_gradients_added_to_a_buffer(dtype, transposed, shape, routing, device):
    check_main_grad(Case(shape, dtype, transposed=transposed, routing=routing), device, "triton")


@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
@values_on(
    "shape, dtype, bias, routing",
    cpu=[("20,16,8,4,2", BF16, True, "zipf")],
    interpreter=[(TINY, dtype, False, "dropped") for dtype in (BF16, FP16)],
    cuda=[(shape, BF16, True, routing) for shape, routing in ON_GPU],
)
def test_gradients_of_fp32_weights(shape, dtype, bias, routing, transposed, device, backend):
    case = Case(shape, dtype, bias=bias, transposed=transposed, routing=routing)
    check_fp32_weights(case, device, backend)


@pytest.fixture
def short_spans(monkeypatch):
    monkeypatch.setattr(launch_spans, "SHORTEST_SPAN", 64)


@on("interpreter")
def test_gradients_of_fp32_weights_of_long_experts(short_spans):
    for shape, routing in LONG.items():
        check_fp32_weights(Case(shape, routing=routing), "cpu", "triton")


@on("interpreter")
@pytest.mark.parametrize(("shape", "routing"), LONG.items())
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("check", [check_experts, check_main_grad])
def test_long_sums_are_split(shape, routing, dtype, check, short_spans):
    check(Case(shape, dtype, routing=routing), "cpu", "triton")


@on("interpreter")
def test_no_program_sums_a_long_expert_alone(short_spans, monkeypatch):
    launch = grouped_gemm.launch

    def without_the_sum(kernel, *args, **options):
        if getattr(kernel, "kernel", kernel) is not spans.sum_spans_kernel:
            launch(kernel, *args, **options)

    monkeypatch.setattr(grouped_gemm, "launch", without_the_sum)
    case = Case("200,24,16,4,2", routing="zipf")
    inputs = make_inputs(case)
    with poisoned():
        got = run(ours(case, "triton"), inputs)
    long = torch.bincount(inputs.ids.flatten(), minlength=4) >= 128
    assert long.any() and not long.all()
    for name in ("dw1", "dw2"):
        assert got[name][long].isnan().all()
        assert not got[name][~long].isnan().any()


# --- ways to call it ------------------------------------------------------------------------------
@on("interpreter")
@pytest.mark.parametrize(
    "wanted", [("x",), ("scores",), ("w1",), ("w2",), ("b1",), ("b2",), ("x", "w2")], ids="+".join
)
def test_what_is_asked_for_does_not_change_with_what_is_not(wanted):
    case = Case(TINY, FP32, bias=True)
    given = make_inputs(case)
    everything = run(ours(case, "triton"), given)
    given.differentiable = wanted
    with poisoned():
        part = run(ours(case, "triton"), given)
    same_bits({name: everything[name] for name in part}, part)


@on("interpreter")
def test_rows_of_many_lengths_to_a_token():
    """Slots named by token, as the published function on a list of pairs makes them."""
    case = Case("6,16,8,3,1", FP32, activation=ActivationType.GEGLU)
    given = make_inputs(case)
    token = torch.tensor([0, 0, 0, 2, 3, 3, 5], dtype=torch.int32)
    expert = torch.tensor([0, 1, 2, 1, 2, 7, -1], dtype=torch.int32)
    scores = torch.rand(7)

    def through(x, ids, scores, w1, w2, b1, b2):
        weights = (w1, w2, b1, b2)
        return ours(case, "triton")(x, expert, scores, *weights, slot_token=token)

    def spread(x, ids, scores, **weights):
        """The same choice as (T, K) with room for the busiest token."""
        ids, wide = torch.full((6, 3), -1), scores.new_zeros(6, 3)
        place = [0, 1, 2, 0, 0, 1, 0]
        ids[token.long(), place] = expert.long()
        wide = wide.index_put((token.long(), torch.tensor(place)), scores)
        return plain(case)(x=x, ids=ids, scores=wide, **weights)

    given.scores = scores
    with poisoned():
        got = run(through, given)
    compare(got, run(spread, given), run(spread, given.double()), case.dtype)


@on("cuda")
@pytest.mark.parametrize("concatenated", [False, True])
def test_published_functions(concatenated, device):
    case = Case(
        "300,256,128,8,2",
        activation=ActivationType.GEGLU,
        gate_up="concatenated" if concatenated else "interleaved",
    )
    given = make_inputs(case, device)

    def published(x, ids, scores, w1, w2, b1, b2):
        order = torch.randperm(600, device=device)
        token = torch.arange(300, device=device, dtype=torch.int32).repeat_interleave(2)
        out, counts = sonicmoe.moe_general_routing_inputs(
            x, scores.flatten()[order], token[order], ids.flatten()[order],
            w1.permute(1, 2, 0), b1, w2.permute(1, 2, 0), b2, 8, None,
            ActivationType.GEGLU, concat_layout=concatenated,
        )  # fmt: skip
        assert torch.equal(counts.long(), ids.flatten().long().bincount(minlength=8))
        return out

    with poisoned():
        got = run(published, given)
    compare(got, run(plain(case), given), run(plain(case), given.double()), case.dtype)
