"""The error budget for values like those of trained models, by token, row and column."""

import math

import pytest
import torch
from devices import on, values_on
from helpers import SOFT_CAPPED, Case, make_inputs, ours, plain, relative_error, run, same_bits
from memory_policies import EXACT, results
from value_checks import check_values, compare_slices

from sonicmoe import ActivationType
from sonicmoe.tools.slices import errors_by_slice, slices
from sonicmoe.tools.values import TRAINED

DTYPES = (torch.bfloat16, torch.float16)
# On the CPU the errors of some distributions hang on few neurons and tokens: several seeds make
# them many.
SHAPE, SEEDS = "192,32,104,4,4", {"cpu": 2}
LARGE = ("1024,2048,768,8,2", "768,2880,720,4,2", "768,7168,256,4,2")
TINY = "64,32,72,3,2"
# Kernels do not know the values: fp16 is tried where it overflows, underflows, and between.
IN_FP16 = ("rows_30", "channels_100", "tokens_2e20", "tiny", "huge")
IN_E4M3 = ("rows_100", "channels_30", "weights_300", "log_normal", "huge", "zero_rows")


@values_on(
    "case",
    cpu=[Case(SHAPE, dtype, values=v) for v in TRAINED for dtype in DTYPES],
    interpreter=[
        *(Case(TINY, values=v) for v in TRAINED),
        *(Case(TINY, torch.float16, values=v) for v in IN_FP16),
        *(Case(TINY, activation=SOFT_CAPPED, values=v) for v in IN_E4M3),
    ],
    cuda=[
        *(Case(s, dtype, values=v) for s in LARGE for v in TRAINED for dtype in DTYPES),
        *(Case(LARGE[0], dtype, SOFT_CAPPED, values=v) for v in TRAINED for dtype in DTYPES),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where fp16 overflows
def test_every_slice_is_within_the_budget(case, device, backend, on_device):
    check_values(case, device, backend, seeds=SEEDS.get(on_device, 1))


@values_on(
    "case",
    cpu=[Case(SHAPE, values=v) for v in TRAINED],
    interpreter=[Case(TINY, values=v) for v in IN_E4M3],
    cuda=[Case(s, values=v) for s in LARGE for v in TRAINED],
)
def test_fp8_z_errs_as_three_bits_do(case, device, backend, on_device):
    """Kernels as the reference does, which errs so."""
    check_values(case, device, backend, memory="e4m3", seeds=SEEDS.get(on_device, 1))


@on("cuda")
@pytest.mark.parametrize("values", TRAINED)
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_other_layouts(values, gate_up):
    """Portable kernels (H = 200), biases, weights stored (E, K, N)."""
    case = Case("1500,200,136,5,3", bias=True, gate_up=gate_up, transposed=True, values=values)
    check_values(case, "cuda", "triton")


@values_on(
    "case",
    cpu=[
        Case("24,72,40,3,2", DTYPES[i % 2], ActivationType.SWIGLU, True, values=v)
        for i, v in enumerate(TRAINED)
    ],
    cuda=[Case(LARGE[0], values=v) for v in TRAINED],
)
def test_recompute_and_slices_change_no_bit(case, device, backend):
    keep = results(case, "keep", device, backend)
    for memory in EXACT:
        same_bits(keep, results(case, memory, device, backend))


# --- the judges -----------------------------------------------------------------------------------
def test_an_error_by_slice():
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    got = torch.tensor([[3.0, 4.5], [0.0, 0.0], [0.0, 1e-30], [math.nan, 0.0]])
    assert errors_by_slice(got, exact).tolist() == [0.1, 0.0, math.inf, math.inf]
    assert errors_by_slice(got[:1].mT, exact[:1].mT, -2).tolist() == [0.1]


def test_overflow_of_plain_or_exact_results_is_left_out():
    exact = torch.tensor([[1.0], [2.0], [1e6], [4.0]], dtype=torch.float64)
    plain = torch.tensor([[1.0], [math.inf], [65504.0], [4.0]]).half()
    got = torch.tensor([[1.0], [math.nan], [math.inf], [math.inf]]).half()
    found = slices(got, plain, exact, -1)
    assert found.judged.tolist() == [True, False, False, True]
    assert found.skipped == 2 and found.wrong() == 1  # the last one is ours alone


def _results():
    case = Case(SHAPE, values="rows_100")
    inputs = make_inputs(case)
    return (
        run(ours(case, "torch"), inputs), run(plain(case), inputs),
        run(plain(case), inputs.double()),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["out", "dx", "dw1", "dw2"])
def test_small_slices_that_are_lost_are_seen(name):
    """The smaller half of the tokens, rows or columns is zero; the norm does not show it."""
    got, rough, exact = _results()
    compare_slices(got, rough, exact, torch.bfloat16)
    along = -2 if name == "dw2" else -1
    size = exact[name].norm(dim=along, keepdim=True)
    lost = size < size.flatten().quantile(0.6)
    got[name] = got[name].masked_fill(lost, 0)
    if name in ("dw1",):
        assert relative_error(got[name], exact[name]) < 0.05
    with pytest.raises(AssertionError, match=f"{name}(, quantile|: relative error)"):
        compare_slices(got, rough, exact, torch.bfloat16)


@pytest.mark.parametrize("name", ["out", "dx", "dw1", "dw2", "dscores"])
def test_an_error_of_the_norm_is_seen(name):
    got, rough, exact = _results()
    got[name] = got[name] * 1.03
    with pytest.raises(AssertionError, match=f"{name}: relative error"):
        compare_slices(got, rough, exact, torch.bfloat16)


def test_overflow_of_ours_alone_is_seen():
    got, rough, exact = _results()
    got["dx"][5, 3] = math.inf
    with pytest.raises(AssertionError, match="dx: 1 slices not zero, or not finite"):
        compare_slices(got, rough, exact, torch.bfloat16)
