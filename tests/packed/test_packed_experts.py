"""Experts on packed weights: `torch.equal` to experts on the decoded ones."""

import gc
from functools import partial

import pytest
import torch
from packed_checks import check_experts
from packed_weights import FORMATS, random_packed
from research.memory import saved_bytes
from torch.utils.flop_counter import FlopCounterMode

from sonicmoe import ActivationType, Fp8Weights, Mxfp4, experts
from sonicmoe.reference.quantize import quantize_weight

CLAMPED, GELU = ActivationType.SWIGLU_CLAMPED, ActivationType.GELU


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("transposed", [(False, False), (True, True)], ids=["nk", "kn"])
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format, transposed, precision):
    check_experts(format, transposed=transposed, precision=precision)


@pytest.mark.parametrize("precision", [None, "fp8", "fp8_bf16_dw"])
@pytest.mark.parametrize(
    "case",
    [
        {"lora": False},
        {"lora": False, "bias": True},
        {"bias": True, "activation": CLAMPED},
        {"bias": True, "activation": CLAMPED, "gate_up": "concatenated"},
        {"activation": GELU, "is_sorted": True},
        {"counts": (0, 39, 1, 0)},
        {"memory": "recompute", "bias": True},
        {"memory": "e4m3"},
        {"packed": (True, False)},
        {"packed": (True, False), "trains_the_other": True},
        {"packed": (False, True), "trains_the_other": True},
    ],
    ids=str,
)
def test_cases(case, precision):
    check_experts(precision=precision, **case)


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
@pytest.mark.parametrize("transposed", [(False, True), (True, False)], ids=str)
@pytest.mark.parametrize("format", ["int4", "nf4 nested", "fp8"])
def test_biases_and_orders(format, transposed, gate_up, precision):
    """Of the formats that `test_cases` has not."""
    options = {"bias": True, "gate_up": gate_up, "precision": precision}
    check_experts(format, transposed=transposed, **options)
    check_experts(format, CLAMPED, transposed=transposed, **options, outliers=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype):
    check_experts("nf4", dtype=dtype)


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("memory", ["keep", "recompute"])
def test_autograd_keeps_packed_tensors_alone(precision, memory):
    """As many bytes as with dense weights, of which the caller owns those of the weights."""
    shapes, kept = ((4, 64, 64), (4, 64, 32)), []
    packed = [random_packed("nf4", shape).for_fp8() for shape in shapes]
    dense = [w.dequantize() for w in packed]
    x, scores = torch.randn(6, 64).bfloat16().requires_grad_(), torch.rand(6, 2)
    ids = torch.tensor([[0, 1], [1, 2], [3, 0]] * 2)
    options = {"precision": precision, "memory": memory}
    owned = [t for w in packed for t in (*dict(w.tensors()).values(), *w.fp8)]
    for weights in (packed, dense):
        step = partial(experts, x, ids, scores, *weights, **options)
        sizes = {w.numel() for w in dense}
        before = _tensors_of(sizes)
        held, out = saved_bytes(step, [x, *owned, *dense])
        found = [t for t in _tensors_of(sizes) if not any(t is known for known in before)]
        assert weights is dense or not found
        out.sum().backward()
        kept.append(held)
    more = 0
    if precision == "fp8":
        more = 4 * (4 + 4 + 4 * 32)  # the scales and the norms of W2
        more += sum(w.numel() for w in dense) if memory == "keep" else 0  # the transposes in e4m3
    assert kept[1] - kept[0] == more


def test_flops_are_those_of_dense_weights():
    given, counts = arguments(), []
    given["x"].requires_grad_()
    for weights in (("w1", "w2"), ()):
        dense = {n: given[n].dequantize() for n in ("w1", "w2") if n not in weights}
        for precision in (None, "fp8"):
            with FlopCounterMode(display=False) as counted:
                experts(**given | dense, precision=precision).sum().backward()
            counts.append(counted.get_total_flops())
    assert counts[:2] == counts[2:] and counts[0] > 0


def _tensors_of(sizes: set[int]) -> list[torch.Tensor]:
    """All that are alive, of floating point."""
    alive = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    return [t for t in alive if t.numel() in sizes and t.is_floating_point()]


# --- errors ---------------------------------------------------------------------------------------
def arguments(**changes):
    found = {"x": torch.randn(6, 64).bfloat16(), "ids": torch.zeros(6, 2, dtype=torch.int32)}
    found |= {"scores": torch.rand(6, 2), "w1": random_packed("mxfp4", (4, 64, 64))}
    return found | {"w2": random_packed("mxfp4", (4, 64, 32))} | changes


BAD = {
    r"w1: expected shape \(E, 2I, H\)": {"w1": random_packed("mxfp4", (4, 64, 32))},
    "x: expected .* H = 96": {"w2": random_packed("mxfp4", (4, 96, 32))},
    "w2: expected the device of x": {"w2": random_packed("mxfp4", (4, 64, 32)).to("meta")},
    "fp8_weights: expected None with packed": {"fp8_weights": Fp8Weights(), "precision": "fp8"},
    "H of w2: expected a positive multiple of 8": {
        "x": torch.randn(6, 36).bfloat16(),
        "w1": random_packed("nf4", (16, 64, 36)),
        "w2": random_packed("nf4", (16, 36, 32)),
    },
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_the_argument(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        experts(**arguments(**BAD[message]))


def test_wide_experts():
    """Exponents that span 14 are exact in e4m3, one more is not; zeros have no exponent."""
    codes, exponents = torch.tensor([1, 7], dtype=torch.uint8), torch.tensor([100, 114, 115, 40])
    blocks = torch.zeros(4, 32, 1, 16, dtype=torch.uint8)
    blocks[:, :2, :, 0] = codes[:, None]
    scales = torch.full((4, 32, 1), 100, dtype=torch.uint8)
    scales[1:, 1, 0], scales[:, 2, 0] = exponents[1:].byte(), 0
    w = Mxfp4(blocks, scales)
    assert w.wide_experts() == 2
    exact = [torch.equal(*_e4m3_and_weight(w, e)) for e in range(4)]
    assert exact == [True, True, False, False]
    with pytest.warns(UserWarning, match="2 of 4 experts have MXFP4 exponents"):
        w.for_fp8()


def _e4m3_and_weight(w: Mxfp4, e: int) -> tuple[torch.Tensor, torch.Tensor]:
    dense = w.dequantize()[e : e + 1]
    q, _, scale, _ = quantize_weight(dense, False, False)
    return q.float() * scale, dense.float()


def test_scales_that_were_computed_before():
    """The same bits with and without `for_fp8`."""
    given = arguments()
    found = experts(**given, precision="fp8")
    kept = {name: given[name].for_fp8() for name in ("w1", "w2")}
    assert kept["w1"].fp8.scale.shape == (4,) and kept["w2"].fp8.norm.shape == (4, 32)
    assert torch.equal(experts(**given | kept, precision="fp8"), found)


def test_scales_of_a_weight_in_parts(monkeypatch):
    """The same scales and norms, decoded an expert at a time."""
    w = random_packed("nf4", (3, 64, 96))
    want = w.for_fp8().fp8
    monkeypatch.setattr("sonicmoe.tensors.DECODED_BYTES", 1)
    found = w.for_fp8().fp8
    assert not torch.equal(want.norm[0], want.norm[1])
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
