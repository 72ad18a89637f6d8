"""Every kernel of the GEMMs on tiny shapes, in memory full of NaN, against fp64."""

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl
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
from value_checks import check_values

import sonicmoe
from sonicmoe import ActivationType
from sonicmoe.bench.values import TRAINED
from sonicmoe.kernels import spans
from sonicmoe.launch import grouped_gemm
from sonicmoe.tuning import Target

# Below every tile, H and I multiples of 8 alone, T odd. With a third fewer tokens the error of dW2
# scatters beyond its budget now and then, in plain PyTorch by the same amount.
TINY = "33,24,8,3,2"

# dtype, bias, gate/up layout, storage. Activations are computed in fp32 whatever the rest, so pairs
# are enough: each activation meets every value of the four, and each pair of the four meets.
CORNERS = [
    (
        (torch.bfloat16, True, "interleaved", False),
        (torch.float16, False, "interleaved", True),
        (torch.float32, False, "concatenated", False),
    ),
    (
        (torch.bfloat16, False, "concatenated", True),
        (torch.float16, True, "concatenated", False),
        (torch.float32, True, "interleaved", True),
    ),
]
CASES = [
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_gradient_is_within_the_budget(case):
    check_experts(case, "cpu", "triton")


# Kernels do not know the values: fp16 is tried where it overflows, underflows, and between.
IN_FP16 = ("rows_30", "channels_100", "tokens_2e20", "tiny", "huge")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [*((v, torch.bfloat16) for v in TRAINED), *((v, torch.float16) for v in IN_FP16)],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where fp16 overflows
def test_values_of_trained_models(values, dtype):
    check_values(Case("64,32,72,3,2", dtype, values=values), backend="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
def test_weight_gradients_added_to_a_buffer(dtype, transposed):
    check_main_grad(Case(TINY, dtype, transposed=transposed, routing="dropped"), "cpu", "triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
def test_gradients_of_fp32_weights(dtype, transposed):
    check_fp32_weights(Case(TINY, dtype, transposed=transposed, routing="dropped"), "cpu", "triton")


def test_gradients_of_fp32_weights_of_long_experts(monkeypatch):
    monkeypatch.setattr(grouped_gemm, "SHORTEST_SPAN", 64)
    for shape, routing in LONG.items():
        check_fp32_weights(Case(shape, routing=routing), "cpu", "triton")


@pytest.mark.parametrize(("shape", "routing"), SHAPES.items())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_shapes_and_routings(shape, routing, dtype):
    check_experts(Case(shape, dtype, bias=True, routing=routing), "cpu", "triton")


# With spans of 64 rows: one long expert, one long and three short ones, two long ones side by side.
LONG = {"150,24,16,3,2": "one_expert", "200,24,16,4,2": "zipf", "160,16,8,2,2": "all_experts"}


@pytest.mark.parametrize(("shape", "routing"), LONG.items())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("check", [check_experts, check_main_grad])
def test_long_sums_are_split(shape, routing, dtype, check, monkeypatch):
    monkeypatch.setattr(grouped_gemm, "SHORTEST_SPAN", 64)
    check(Case(shape, dtype, routing=routing), "cpu", "triton")


def test_no_program_sums_a_long_expert_alone(monkeypatch):
    monkeypatch.setattr(grouped_gemm, "SHORTEST_SPAN", 64)
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


@triton.jit
def _groups_kernel(expert_start, num_experts, span, groups, out):
    for group in range(groups):
        here = group < num_experts
        start = tl.load(expert_start + group, mask=here, other=0)
        end = tl.load(expert_start + group + 1, mask=here, other=0)
        expert, start, end = spans.rows_of(group, start, end, expert_start, num_experts, span)
        tl.store(out + 3 * group, expert)
        tl.store(out + 3 * group + 1, start)
        tl.store(out + 3 * group + 2, end)


@pytest.mark.parametrize("seed", range(60))
def test_every_row_is_summed_once_and_no_span_is_long(seed):
    draw = random.Random(seed)
    span = draw.choice([1, 2, 3, 8])
    counts = [draw.choice([0, 1, 5, draw.randrange(40)]) for _ in range(draw.randint(1, 9))]
    starts = [0, *itertools.accumulate(counts)]
    places = (starts[-1] + draw.choice([0, 7])) // span
    groups = len(counts) + places
    out = torch.empty(groups, 3, dtype=torch.int32)
    _groups_kernel[(1,)](torch.tensor(starts, dtype=torch.int32), len(counts), span, groups, out)
    summed = []
    for group, (expert, start, end) in enumerate(out.tolist()):
        if start < 0:
            continue
        assert starts[expert] <= start and end <= starts[expert + 1]
        if group < len(counts):
            assert (start, end) == (starts[group], starts[group + 1])
        assert end - start < 2 * span
        summed += range(start, end)
    assert sorted(summed) == list(range(starts[-1]))


@pytest.mark.parametrize("arch", [80, 86, 100, 120])
@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
def test_configurations_of_other_devices(arch, transposed, monkeypatch):
    """Less shared memory, or no copy engine that the kernels use: other tiles, plain loads."""
    monkeypatch.setattr(grouped_gemm, "target_of", lambda t: Target(arch, 4))
    case = Case(TINY, bias=True, transposed=transposed, gate_up="concatenated", routing="dropped")
    check_experts(case, "cpu", "triton")


@pytest.mark.parametrize("where", ["rows", "weights"])
def test_nan_of_one_expert_reaches_no_other(where):
    case = Case("40,16,8,3,1", bias=True, routing="uniform")
    clean, dirty = make_inputs(case), make_inputs(case)
    hit = clean.ids[:, 0] == 1
    for name in ("x", "dout") if where == "rows" else ("w1", "w2", "b1", "b2"):
        getattr(dirty, name)[hit if where == "rows" else 1] = float("nan")
    want, got = run(ours(case, "triton"), clean), run(ours(case, "triton"), dirty)
    others = torch.arange(3) != 1
    for name in want:
        keep = ~hit if name in ("out", "dx", "dscores") else others
        assert torch.equal(want[name][keep], got[name][keep]), name
    assert got["out"][hit].isnan().all()


def test_a_clamp_keeps_nan():
    activation = sonicmoe.ActivationType.SWIGLU_CLAMPED
    case = Case("40,16,8,3,1", activation=activation, bias=True, routing="uniform")
    given = make_inputs(case)
    hit = given.ids[:, 0] == 1
    given.x[hit] = float("nan")
    got = run(ours(case, "triton"), given)
    assert torch.equal(got["out"].isnan().all(-1), hit)
    assert torch.equal(got["db1"].isnan().all(-1), torch.arange(3) == 1)  # a sum of dZ


def test_more_columns_than_a_tile():
    """H and I past the widest tile, so that every loop over columns turns more than once."""
    check_experts(Case("5,264,264,2,1", torch.float16, bias=True), "cpu", "triton")


@pytest.mark.parametrize("with_scores", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 9], [0, 0, 0], [0, 20, 0]], ids=str)
def test_grouped_rows_and_a_tail_of_garbage(counts, with_scores):
    case, used = Case("20,24,16,3,1", bias=True), sum(counts)
    given, sizes = make_inputs(case), torch.tensor(counts)
    given.ids.fill_(-1)
    given.ids[:used, 0] = torch.arange(3).repeat_interleave(sizes)
    if not with_scores:
        given.scores = torch.ones_like(given.scores)
    rough, exact = run(plain(case), given), run(plain(case), given.double())
    for t in (given.x, given.scores, given.dout):
        t[used:] = float("nan")

    def grouped(x, ids, scores, **weights):
        scores = scores.squeeze(1) if with_scores else None
        return sonicmoe.grouped_experts(x, sizes, scores=scores, backend="triton", **weights)

    if not with_scores:
        given.differentiable = ("x", "w1", "w2", "b1", "b2")
    with poisoned():
        got = run(grouped, given)
    compare(got, rough, exact, case.dtype)
    assert (got["out"][used:] == 0).all() and (got["dx"][used:] == 0).all()


def test_rows_before_the_first_offset_are_a_tail_too():
    given = make_inputs(Case("20,24,16,3,1", torch.float32))
    given.x[:4] = float("nan")
    rows, scores = given.x.requires_grad_(), torch.rand(20).requires_grad_()
    with poisoned():
        out = sonicmoe.grouped_experts(
            rows, None, given.w1, given.w2, scores=scores,
            offsets=torch.tensor([4, 8, 8, 15]), backend="triton",
        )  # fmt: skip
        grads = torch.autograd.grad(out, [rows, scores], given.dout)
    for got in (out, *grads):
        assert (got[:4] == 0).all() and (got[15:] == 0).all()


@pytest.mark.parametrize(
    "wanted", [("x",), ("scores",), ("w1",), ("w2",), ("b1",), ("b2",), ("x", "w2")], ids="+".join
)
def test_what_is_asked_for_does_not_change_with_what_is_not(wanted):
    case = Case(TINY, torch.float32, bias=True)
    given = make_inputs(case)
    everything = run(ours(case, "triton"), given)
    given.differentiable = wanted
    with poisoned():
        part = run(ours(case, "triton"), given)
    same_bits({name: everything[name] for name in part}, part)


def test_rows_of_many_lengths_to_a_token():
    """Slots named by token, as the published function on a list of pairs makes them."""
    case = Case("6,16,8,3,1", torch.float32, activation=ActivationType.GEGLU)
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
