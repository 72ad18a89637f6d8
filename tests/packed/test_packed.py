"""Packed weights: the classes, and their decoders in plain PyTorch."""

from dataclasses import fields

import pytest
import torch
from packed_weights import FORMATS, NF4, decoded, random_packed

from sonicmoe import Fp8Blocks, Int4, Mxfp4, Nf4
from sonicmoe.packed import NestedAbsmax
from sonicmoe.shapes import Problem
from sonicmoe.tools import cost

SHAPE = (3, 64, 96)


@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize(format, transposed):
    w = random_packed(format, SHAPE, transposed)
    assert w.shape == SHAPE and w.dtype == torch.bfloat16 and not w.requires_grad
    assert torch.equal(w.dequantize(), decoded(w).bfloat16())
    assert torch.equal(w.dequantize(torch.float32), decoded(w).float())
    assert w.mT.shape == (3, 96, 64)
    assert torch.equal(w.mT.dequantize(), w.dequantize().mT)
    assert w.mT.mT.shape == w.shape


def test_every_value_of_mxfp4():
    """All exponents: subnormal bf16 at the lower end, infinity at the upper one, never NaN."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    w = Mxfp4(blocks, scales)
    assert torch.equal(w.dequantize(), decoded(w).bfloat16())
    assert not w.dequantize().isnan().any()


def test_blocks_of_nf4_run_over_the_flattened_weight():
    w = random_packed("nf4", (2, 8, 40))
    assert torch.equal(w.dequantize(), decoded(w).bfloat16())


def test_the_bytes_of_each_format():
    """Of bf16, with blocks of 128 rows and columns."""
    shape, bf16 = (4, 1024, 512), 2 * 4 * 1024 * 512
    found = {name: random_packed(name, shape).nbytes / bf16 for name in FORMATS}
    limits = {"mxfp4": 0.27, "nf4": 0.29, "nf4 nested": 0.27, "fp8": 0.51, "fp8 e8m0": 0.51}
    assert all(found[name] <= limits.get(name, 0.29) for name in FORMATS), found


def test_the_cost_model_knows_them():
    """W1 (4, 1024, 512) and W2 (4, 512, 512), to the byte."""
    names = {"mxfp4": "MXFP4", "nf4": "NF4", "int4": "INT4", "fp8": "FP8"}
    expected = cost.weight_bytes(Problem(8, 512, 512, 4, 2))
    for format, name in names.items():
        weights = [random_packed(format, shape) for shape in ((4, 1024, 512), (4, 512, 512))]
        tables = sum(w.code.nbytes for w in weights if format == "nf4")
        assert expected[name] == sum(w.nbytes for w in weights) - tables
    nested = [random_packed("nf4 nested", (4, n, 512)) for n in (1024, 512)]
    found = sum(w.codes.nbytes + w.absmax.nbytes + w.nested.absmax2.nbytes for w in nested)
    assert expected["NF4, nested"] == found
    assert expected["dense"] == 2 * 4 * 512 * (1024 + 512)


def test_to_a_device():
    w = random_packed("nf4 nested", SHAPE).to("meta")
    assert w.device.type == "meta" and {t.device.type for _, t in w.tensors()} == {"meta"}


# Tensors of the same values that are not contiguous.
LAYOUTS = {
    "strided": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda t: torch.cat([t[:1], t, t[:1]])[1:-1],
    "transposed": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "broadcast": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_tensors_in_any_layout(format, layout):
    w = random_packed(format, SHAPE)
    change = LAYOUTS[layout]

    def changed(value):
        if isinstance(value, torch.Tensor):
            return change(value) if value.ndim and value.dtype != torch.float8_e8m0fnu else value
        return type(value)(*map(changed, value)) if isinstance(value, NestedAbsmax) else value

    given = {f.name: changed(getattr(w, f.name)) for f in fields(w)}
    wants = {f.name: copied(given[f.name]) for f in fields(w)}
    found, want = type(w)(**given), type(w)(**wants)
    assert torch.equal(found.dequantize(), want.dequantize())
    assert torch.equal(found.dequantize(), w.dequantize()) == (layout != "broadcast")
    assert all(t.is_contiguous() for _, t in found.tensors())
    same = type(w)(**wants)  # what is contiguous is not copied
    assert [t.data_ptr() for _, t in same.tensors()] == [t.data_ptr() for _, t in want.tensors()]


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    return type(value)(*map(copied, value)) if isinstance(value, NestedAbsmax) else value


def test_the_bits_of_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    w = random_packed("mxfp4", SHAPE)
    assert torch.equal(w.dequantize().mT, mxfp4.convert_moe_packed_tensors(w.blocks, w.scales))
    from packed_checkpoints import skip_if_too_old

    skip_if_too_old("fp8")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    for format in ("fp8", "fp8 e8m0"):
        w = random_packed(format, (2, 256, 128))
        load = fp8.Fp8Dequantize(None)._dequantize_one
        found = torch.stack(
            [load(*pair, torch.bfloat16) for pair in zip(w.weight, w.scale_inv, strict=True)]
        )
        assert torch.equal(w.dequantize(), found)


# --- errors ---------------------------------------------------------------------------------------
def u8(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


def _sharded(t):
    t.placements = ()  # as a DTensor has them
    return t


E4M3, CODE = torch.float8_e4m3fn, torch.tensor(NF4)
BAD = {
    "blocks: expected uint8": lambda: Mxfp4(u8(2, 8, 1, 16).int(), u8(2, 8, 1)),
    "blocks: expected a tensor": lambda: Mxfp4([1], u8(2, 8, 1)),  # type: ignore[arg-type]
    "blocks: expected 4 dimensions": lambda: Mxfp4(u8(2, 8, 16), u8(2, 8, 1)),
    r"blocks: expected shape .*, got \(2, 8, 1, 8\)": lambda: Mxfp4(u8(2, 8, 1, 8), u8(2, 8, 1)),
    r"scales: expected shape \(E, N, K/32\)": lambda: Mxfp4(u8(2, 8, 1, 16), u8(2, 8, 2)),
    "blocks: expected a plain tensor": lambda: Mxfp4(_sharded(u8(2, 8, 1, 16)), u8(2, 8, 1)),
    "scales: expected the device": lambda: Mxfp4(u8(2, 8, 1, 16), u8(2, 8, 1).to("meta")),
    "shape: expected sizes": lambda: Nf4(u8(48), torch.ones(2), (3, 4, 8), CODE),
    "codes: expected shape": lambda: Nf4(u8(64), torch.ones(1), (1, 8, 8), CODE),
    "absmax: expected 1 values": lambda: Nf4(u8(32), torch.ones(2), (1, 8, 8), CODE),
    "absmax: expected float32": lambda: Nf4(u8(32), u8(1), (1, 8, 8), CODE),
    "absmax: expected a tensor without gradient": lambda: Nf4(
        u8(32), torch.ones(1, requires_grad=True), (1, 8, 8), CODE
    ),
    "code: expected shape": lambda: Nf4(u8(32), torch.ones(1), (1, 8, 8), CODE[:8]),
    "nested: expected a NestedAbsmax": lambda: Nf4(
        u8(32),
        u8(1),
        (1, 8, 8),
        CODE,
        (1, 2, 3),  # type: ignore[arg-type]
    ),
    "absmax2: expected shape": lambda: Nf4(
        u8(32), u8(1), (1, 8, 8), CODE, NestedAbsmax(torch.ones(256), torch.ones(2), 0.0)
    ),
    "blocksize: expected 256": lambda: Nf4(
        u8(32), u8(1), (1, 8, 8), CODE, NestedAbsmax(torch.ones(256), torch.ones(1), 0.0, 128)
    ),
    "weight: expected float8_e4m3fn": lambda: Fp8Blocks(torch.ones(1, 8, 8), torch.ones(1, 1, 1)),
    "weight: expected a tensor without gradient": lambda: Fp8Blocks(
        torch.ones(1, 8, 8).to(E4M3).requires_grad_(), torch.ones(1, 1, 1)
    ),
    "scale_inv: expected float32 or float8_e8m0fnu": lambda: Fp8Blocks(
        torch.ones(1, 8, 8).to(E4M3), torch.ones(1, 1, 1).bfloat16()
    ),
    "scale_inv: expected shape": lambda: Fp8Blocks(
        torch.ones(1, 136, 8).to(E4M3), torch.ones(1, 1, 1)
    ),
    "packed: expected int32": lambda: Int4(u8(1, 8, 4), torch.ones(1, 8, 1).bfloat16()),
    "packed: expected .* K a multiple of 32": lambda: Int4(
        u8(1, 8, 3).int(), torch.ones(1, 8, 1).bfloat16()
    ),
    "scale: expected bfloat16": lambda: Int4(u8(1, 8, 4).int(), torch.ones(1, 8, 1)),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_the_argument(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        BAD[message]()
