"""The FP8 kernels compile for Hopper: tensor cores, no spills, vectorized loads and stores."""

import re

import pytest
import torch
from adapters import adapter
from helpers import Case, make_inputs
from machine_code import bounds_from_outside, compiling, report

from sonicmoe import ActivationType, KernelBackendMoE, MemoryPolicy, MoE, experts, validation
from sonicmoe.kernels.hopper.fp8_wgrad import exchange
from sonicmoe.launch import fp8, fp8_wgrad, grouped_gemm
from sonicmoe.layer.run import permute
from sonicmoe.reference import fp8 as reference
from sonicmoe.tensors import NO_LORA, Lora, Permutation, Weight
from sonicmoe.tuning import Target

CACHE = 128 * 1024  # of instructions
BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def count(kernel, pattern):
    return len(re.findall(pattern, kernel.asm["ptx"]))


def check(kernel, lora=False):
    found = report(kernel)
    assert found["spills"] == 0 and found["bytes"] < CACHE, found
    assert found["shared"] <= Target(90, 132).shared_memory, found
    in_bf16 = count(kernel, r"wgmma\.mma_async\S*\.bf16\.bf16")
    assert found["wgmma"] - in_bf16 == count(kernel, r"wgmma\.mma_async\S*\.e4m3\.e4m3") > 0
    assert (in_bf16 > 0) == lora
    assert not bounds_from_outside(kernel)


@pytest.mark.parametrize(
    ("m", "n", "transposed", "dtype", "add", "gathered"),
    [
        (2048, 2048, True, BF16, False, True),
        (4096, 2048, False, BF16, False, True),  # tiles for all programs: no spans
        (1536, 512, True, FP32, False, True),
        (4096, 512, False, FP32, True, True),
        (272, 144, True, FP32, True, False),
        (272, 144, False, BF16, False, False),
    ],
    ids=str,
)
def test_weight_gradient(m, n, transposed, dtype, add, gathered):
    experts, rows = 2, 64
    rows8 = torch.zeros(rows, m, dtype=torch.float8_e4m3fn)
    other_t = torch.zeros(n, reference.padded_rows(rows, experts), dtype=rows8.dtype)
    row_token = torch.zeros(rows, dtype=torch.int32) if gathered else None
    start, tiles = torch.zeros(3, dtype=torch.int32), torch.zeros(4, 4, dtype=torch.int32)
    p = Permutation(row_token, row_token, row_token, None, None, start, tiles, 128)
    shape = (experts, n, m) if transposed else (experts, m, n)
    dw = torch.zeros(shape, dtype=dtype)
    with compiling(90) as compiled:
        scale = torch.ones(experts, n)
        fp8_wgrad.weight_gradient(rows8, other_t, scale, dw.mT if transposed else dw, p, add)
    (kernel,) = compiled
    check(kernel)
    # Each of two consumers loads 128×128 bytes and stores 128×128 numbers with 128 threads.
    assert count(kernel, r"ldmatrix\S*\.x4\.trans") == 2 * 8
    assert count(kernel, r"\bprmt\.b32 %r\d+, %r\d+, %r\d+, 0x(6420|7531);") == 2 * 32
    assert count(kernel, r"cp\.async\.cg\.shared\.global .*, 0x10, ") == 16
    bf16, split = dtype == BF16, n * m < 132 * 256 * 128
    assert count(kernel, r"\bstmatrix\S*\.x4") == (2 * 16 if bf16 and not transposed else 0)
    assert (count(kernel, r"\bst\.shared\.b32") >= 2 * 64) == (bf16 and transposed)
    assert count(kernel, r"atom\.\S*\.add\.v2\.f32") == (2 * 64 if add else 0)
    in_pairs = count(kernel, r"st\.global\.v2\.b32")
    assert in_pairs == 2 * 64 * (split + (not bf16 and not add))
    assert count(kernel, r"\b(atom|red|st\.global)\.") == in_pairs + (2 * 64 if add else 0)


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize("z_dtype", [torch.bfloat16, torch.float8_e4m3fn, None])
def test_up(z_dtype, gathered):
    maps = torch.zeros(64, dtype=torch.int32) if gathered else None
    start, tiles = torch.zeros(3, dtype=torch.int32), torch.zeros(4, 4, dtype=torch.int32)
    p = Permutation(maps, maps, maps, None, None, start, tiles, 128)
    x8, w8 = (torch.zeros(*s, dtype=torch.float8_e4m3fn) for s in ((64, 2048), (2, 2048, 2048)))
    w = Weight(None, w8, None, torch.ones(2))
    with compiling(90) as compiled:
        act = (ActivationType.SWIGLU, "interleaved")
        fp8.up(x8, torch.ones(64), w, None, NO_LORA, p, *act, z_dtype)
    (kernel,) = compiled
    check(kernel)
    assert "st.shared.b8" not in kernel.asm["ptx"]
    # Maxima of columns: each of two consumers has four slices of 7 shuffles and an atomic maximum.
    slices = 0 if z_dtype is None else 2 * 4
    assert count(kernel, r"\batom\.global\.\S*\.max\.s32") == slices
    assert count(kernel, r"\bshfl\.") <= 17 + 7 * slices


def make_bias(columns, bias):
    return torch.zeros(2, columns, dtype=BF16) if bias else None


def make_lora(columns, rank):
    if not rank:
        return NO_LORA
    return Lora(torch.zeros(64, rank, dtype=BF16), torch.zeros(2, columns, rank, dtype=BF16))


def make_permutation(gathered):
    maps = torch.zeros(64, dtype=torch.int32) if gathered else None
    start, tiles = torch.zeros(3, dtype=torch.int32), torch.zeros(4, 4, dtype=torch.int32)
    return Permutation(maps, maps, maps, None, None, start, tiles, 128)


@pytest.mark.parametrize(
    ("bias", "rank", "activation", "gate_up", "z_dtype", "gathered"),
    [
        (True, 0, ActivationType.SWIGLU, "interleaved", BF16, True),
        (True, 0, ActivationType.SWIGLU_CLAMPED, "concatenated", E4M3, False),
        (False, 16, ActivationType.SWIGLU, "concatenated", BF16, True),
        (True, 80, ActivationType.SWIGLU_CLAMPED, "interleaved", E4M3, True),
        (True, 16, ActivationType.GELU, "interleaved", BF16, False),
        (True, 80, ActivationType.SWIGLU_CLAMPED, "interleaved", None, True),
    ],
    ids=str,
)
def test_up_with_biases_and_adapters(bias, rank, activation, gate_up, z_dtype, gathered):
    columns = 2048 if activation.is_gated else 1024
    x8, w8 = (torch.zeros(*s, dtype=E4M3) for s in ((64, 2048), (2, columns, 2048)))
    given = (make_bias(columns, bias), make_lora(columns, rank), make_permutation(gathered))
    with compiling(90) as compiled:
        w = Weight(None, w8, None, torch.ones(2))
        fp8.up(x8, torch.ones(64), w, *given, activation, gate_up, z_dtype)
    (kernel,) = compiled
    check(kernel, lora=rank > 0)
    assert "st.shared.b8" not in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("bias", "rank", "blocks", "block_n"),
    [
        (True, 0, 1, 128),
        (True, 0, 8, 256),
        (False, 16, 1, 256),
        (True, 80, 1, 256),
        (True, 80, 8, 256),
    ],
)
def test_gemm_with_biases_and_adapters(bias, rank, blocks, block_n):
    w = Weight(None, torch.zeros(2, 2048, 1024, dtype=E4M3), None, torch.ones(2))
    given = (make_bias(2048, bias), torch.ones(64), make_lora(2048, rank), make_permutation(False))
    with compiling(90) as compiled:
        a8 = torch.zeros(64, 1024, dtype=E4M3)
        fp8.down(a8, torch.ones(blocks, 64), w, *given, block_n=block_n)
    kernel = compiled[0]
    check(kernel, lora=rank > 0)


def test_order_of_rows_in_weight_gradients():
    """Where the consumers find a row of a block is where the transposed operand has it."""
    in_shared_memory = torch.arange(128).view(8, 2, 4, 2).permute(0, 2, 1, 3).flatten()
    found = [exchange.fn(row) for row in in_shared_memory.tolist()]
    assert found == reference.row_of_column().tolist()
    assert found != in_shared_memory.tolist()


def test_slices_read_views_of_the_weights(monkeypatch):
    """Each slice has its own rows of W2, of the adapter and the bias, and its own columns of O."""
    launched = []
    monkeypatch.setattr(fp8, "launch", lambda kernel, grid, *args: launched.append(args))
    monkeypatch.setattr(grouped_gemm, "launch", lambda kernel, grid, *args: launched.append(args))
    monkeypatch.setattr(grouped_gemm, "target_of", lambda t: Target(90, 132))
    p = permute(torch.zeros(40, 2, dtype=torch.int32), 4, backend="torch")
    w = Weight(None, torch.empty(4, 320, 256, dtype=torch.float8_e4m3fn), None, torch.ones(4))
    a8, a_scale = torch.empty(80, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 80)
    lora = Lora(torch.empty(80, 8, dtype=BF16), torch.empty(4, 320, 8, dtype=BF16))
    bias = torch.arange(4.0 * 320).view(4, 320)
    given = (a8, a_scale, w, bias, torch.ones(40, 2), lora)
    out = fp8.down_and_combine(*given, p, 40, 4)
    gemms, combined = launched[::2], launched[1::2]
    weights = [args[1] for args in gemms]
    columns = [args[3][0].shape[1:] for args in gemms]  # B of the adapter
    assert columns == [(128, 8), (128, 8), (64, 8)]
    assert [float(args[7][1, 0]) for args in gemms] == [320, 448, 576]  # of the bias
    assert [t.shape[1] for t, _ in weights] == [128, 128, 64]
    assert [t.data_ptr() - w.w8.data_ptr() for t, _ in weights] == [0, 128 * 256, 256 * 256]
    assert all(boxes.strides == [320 * 256, 256, 1] for _, boxes in weights)
    starts = [args[4].data_ptr() - out.data_ptr() for args in combined]
    assert starts == [0, 2 * 128, 2 * 256]


@pytest.mark.parametrize(
    ("activation", "gate_up", "memory", "spills"),
    [
        (ActivationType.SWIGLU, "interleaved", MemoryPolicy("recompute", 4), 0),
        # Of the dZ GEMM; 16 bytes without adapters.
        (ActivationType.SWIGLU_CLAMPED, "concatenated", MemoryPolicy(), 32),
    ],
    ids=str,
)
def test_steps_with_biases_and_adapters(activation, gate_up, memory, spills, monkeypatch):
    """Weights are frozen, so dZ and dscores are all that the dZ GEMM stores."""
    monkeypatch.setattr(validation, "_interpreting", lambda: True)
    monkeypatch.setattr("sonicmoe.ops.fp8.fp8_backend", lambda backend, x: backend)
    case = Case("300,512,256,8,2", activation=activation, gate_up=gate_up, bias=True)
    given = make_inputs(case).arguments()
    given |= {name: given[name].requires_grad_() for name in ("x", "scores")}
    loras = {"lora1": adapter(given["w1"], 12, 0.5), "lora2": adapter(given["w2"], 70, 2.0)}
    options = {"precision": "fp8", "memory": memory, "backend": "triton"} | case.options
    with compiling(90) as compiled:
        experts(**given, **loras, **options).float().sum().backward()
    names = [kernel.metadata.name for kernel in compiled]
    assert names.count("fp8_gemm_kernel") == 2 * memory.slices
    assert names.count("fp8_up_kernel") == 1 + memory.recompute
    assert names.count("scored_activation_kernel") == 1  # for dA2
    assert names.count("dequantize_rows_kernel") == 2  # A for U2, dZ for V1
    assert names.count("bias_score_kernel") == 1 and "hopper_fp8_wgrad_kernel" not in names
    for kernel in compiled:
        name, found = kernel.metadata.name, report(kernel)
        assert found["spills"] <= (spills if name == "hopper_fp8_dz_kernel" else 0), name


def test_steps_with_memory_policies(monkeypatch):
    """Nothing spills."""
    monkeypatch.setattr(validation, "_interpreting", lambda: True)
    monkeypatch.setattr("sonicmoe.ops.fp8.fp8_backend", lambda backend, x: backend)
    memory = MemoryPolicy("recompute", 4)
    moe = MoE(8, 2, 512, 256, precision="fp8_bf16_dw", memory=memory, dtype=BF16)
    x = torch.zeros(300, 512, dtype=torch.bfloat16, requires_grad=True)
    with compiling(90) as compiled:
        out, _ = moe(x, KernelBackendMoE.sonicmoe)
        out.sum().backward()
    names = [kernel.metadata.name for kernel in compiled]
    assert names.count("fp8_gemm_kernel") == 2 * memory.slices
    assert names.count("fp8_up_kernel") == 2
    assert names.count("scored_activation_kernel") == names.count("dequantize_rows_kernel") == 1
    for kernel in compiled:
        assert report(kernel)["spills"] == 0, kernel.metadata.name
