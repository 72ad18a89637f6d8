"""Every configuration that can be selected compiles for its GPU: tensor cores, no spills."""

import re
import struct
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from helpers import SOFT_CAPPED
from machine_code import bounds_from_outside, compiling, cuobjdump, naming, report

from sonicmoe.enums import ActivationType
from sonicmoe.launch import fp8_scales, grouped_gemm, quantize
from sonicmoe.launch import routing as launch_routing
from sonicmoe.tensors import NO_LORA, DzResults, Kept, Permutation, Weight
from sonicmoe.tuning import Target, is_valid, row_config, tile_m, weight_config
from sonicmoe.validation import LAYOUTS

GEMMS = ("up_kernel", "gemm_kernel", "dz_kernel", "wgrad_kernel")
TENSOR_CORES = {80: "mma", 89: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}
WIDE, NARROW = (2048, 1024), (264, 72)  # H, I: every branch of the selection, and odd sizes
LARGE = (4096, 14336)  # tiles in bands
CACHE = 128 * 1024  # of instructions, by guess: dZ with 172 KB spent half its time waiting for them


def compile_gradients(dz, a, x, dout, w1, w2, scores, p):
    """What follows dZ; of biases, if there are `scores`."""
    grouped_gemm.weight_gradient(dout, a, w2, p, "left", False)
    grouped_gemm.dx(dz, Weight(w1), NO_LORA, p, x.shape[0], 1)
    grouped_gemm.weight_gradient(dz, x, w1, p, "right", False)
    if scores is not None:
        grouped_gemm.bias_gradient(dout, scores, p, True, w2.dtype)
        grouped_gemm.bias_gradient(dz, None, p, False, w1.dtype)


def compile_layer(
    arch, dtype, activation, gate_up, transposed, bias, sizes,
    gathered=True, z_dtype=None, whole=True,
):  # fmt: skip
    """All kernels of a forward and backward pass, as compiled for `arch`.

    Unless `whole`, the GEMMs that write and read Z: the others do not depend on `z_dtype`, nor on
    which gated activation it is.
    """
    hidden, intermediate = sizes
    experts, rows, tokens = 2, 64, 32 if gathered else 64
    columns = 2 * intermediate if activation.is_gated else intermediate

    def weights(n, k):
        return new(experts, k, n).mT if transposed else new(experts, n, k)

    def new(*shape, dtype=dtype):
        return torch.zeros(shape, dtype=dtype)

    def index(*shape):
        return torch.zeros(shape, dtype=torch.int32)

    x, w1, w2 = new(tokens, hidden), weights(columns, hidden), weights(hidden, intermediate)
    b1, b2 = (new(experts, columns), new(experts, hidden)) if bias else (None, None)
    scores = new(tokens, 2, dtype=torch.float32) if gathered else None
    maps = index(rows) if gathered else None
    m = tile_m(dtype.itemsize)
    p = Permutation(maps, maps, maps, None, None, index(3), index(4, 4), m)
    needs, act = DzResults(dz=True, dz_t=False, a=True, dscores=gathered), (activation, gate_up)
    with compiling(arch) as compiled:
        z, a, z_scale = grouped_gemm.up(x, Weight(w1), b1, NO_LORA, p, *act, z_dtype or dtype)
        if whole:
            grouped_gemm.down(a, Weight(w2), b2, None, NO_LORA, p)
        dz, a, _ = grouped_gemm.dz(x, z, z_scale, Weight(w2), b2, scores, NO_LORA, p, *act, needs)
        if whole:
            compile_gradients(dz, a, x, x, w1, w2, scores if bias else None, p)
    return compiled


def check(compiled, arch, tensor_cores, gemms=6):
    """Returns how many of the GEMMs TMA feeds."""
    counted = copied = 0
    for kernel in compiled:
        found, name = report(kernel), kernel.metadata.name
        assert found["spills"] == 0, f"{name} spills: {found}"
        assert found["bytes"] < CACHE, f"{name} waits for its instructions: {found}"
        if name.endswith(GEMMS):
            counted += 1
            copied += found["TMA loads"] > 0
            assert not tensor_cores or found[TENSOR_CORES[arch]], (
                f"{name} misses tensor cores: {found}"
            )
            assert not bounds_from_outside(kernel), name
    assert counted == gemms
    return copied


@triton.jit
def _crowded_kernel(x, SIZE: tl.constexpr):
    values = tl.load(x + tl.arange(0, SIZE))
    tl.store(x + tl.arange(0, SIZE), values / tl.sum(values))


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_report_agrees_with_a_disassembler(arch):
    instructions = {"mma": "HMMA", "wgmma": "HGMMA", "tcgen05": "UTCHMMA", "TMA loads": "UTMALDG"}
    hidden, intermediate = WIDE
    a, w2 = torch.zeros(64, intermediate), torch.zeros(2, hidden, intermediate)
    maps, tiles = torch.zeros(64, dtype=torch.int32), torch.zeros(4, 4, dtype=torch.int32)
    p = Permutation(maps, maps, maps, None, None, maps[:3], tiles, 128)
    with compiling(arch) as compiled:
        grouped_gemm.down(a.bfloat16(), Weight(w2.bfloat16()), None, None, NO_LORA, p)
        _crowded_kernel[(1,)](torch.zeros(1 << 13), 1 << 13, num_warps=1, maxnreg=64)
    for kernel, spills in zip(compiled, (False, True), strict=True):
        found, code = report(kernel), cuobjdump(kernel, "-sass")
        assert found["bytes"] == 16 * len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE))
        assert (found["spills"] > 0) == bool(re.search(r"\b(LDL|STL)\b", code)) == spills
        for name, instruction in instructions.items():
            assert (found[name] > 0) == bool(re.search(rf"\b{instruction}\b", code)), name


@pytest.mark.parametrize(
    ("gate_up", "transposed", "bias", "sizes"),
    [  # each two of the layouts, the storage and the sizes
        (LAYOUTS[0], False, False, WIDE),
        (LAYOUTS[1], True, False, WIDE),
        (LAYOUTS[0], True, True, NARROW),
        (LAYOUTS[1], False, False, NARROW),
    ],
    ids=str,
)
def test_hopper(gate_up, transposed, bias, sizes):
    activation = ActivationType.SWIGLU
    check(
        compile_layer(90, torch.bfloat16, activation, gate_up, transposed, bias, sizes),
        90,
        True,
    )


def test_hopper_with_large_experts():
    swiglu = ActivationType.SWIGLU
    check(compile_layer(90, torch.bfloat16, swiglu, LAYOUTS[0], False, False, LARGE), 90, True)


@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
def test_hopper_where_rows_arrive_sorted(transposed):
    swiglu, sizes = ActivationType.SWIGLU, WIDE
    check(
        compile_layer(
            90, torch.bfloat16, swiglu, LAYOUTS[0], transposed, False, sizes, gathered=False
        ),
        90,
        True,
    )


@pytest.mark.parametrize(
    ("activation", "whole"),
    [
        (ActivationType.SWIGLU_CLAMPED, True),
        (ActivationType.clamped_swiglu(10.0), False),
        (SOFT_CAPPED, False),
        (ActivationType.GELU, True),
    ],
)
def test_hopper_with_bias(activation, whole):
    layer = (90, torch.float16, activation, LAYOUTS[0], False, True, WIDE)
    compiled = compile_layer(*layer, whole=whole)
    check(compiled, 90, True, gemms=6 if whole else 2)
    if activation.clamp:  # keeps NaN, which the interpreter always does
        names = ("hopper_up_kernel", "hopper_dz_kernel")
        clamps = [k.asm["ptx"] for k in compiled if k.metadata.name in names]
        assert len(clamps) == 2
        for ptx in clamps:
            assert "min.NaN.f" in ptx and "max.NaN.f" in ptx
            limit = struct.pack(">f", activation.clamp.limit).hex().upper()
            assert f"0f{limit}" in ptx
            assert not re.search(r"\b(min|max)\.(ftz\.)?b?f(16|32)", ptx)


@pytest.mark.parametrize(
    ("arch", "activation", "whole"),
    [
        *product([80, 100, 120], [ActivationType.SWIGLU, ActivationType.GELU], [True]),
        (80, ActivationType.SWIGLU_CLAMPED, False),  # stored registers away in two slices
        (89, ActivationType.SWIGLU, True),
    ],
)
def test_other_architectures(arch, activation, whole):
    layer = (arch, torch.bfloat16, activation, LAYOUTS[0], False, not activation.is_gated, WIDE)
    compiled = compile_layer(*layer, whole=whole)
    assert check(compiled, arch, True, gemms=6 if whole else 2) == (6 if arch == 100 else 0)


@pytest.mark.parametrize(
    ("arch", "dtype", "activation", "gate_up", "sizes", "bias"),
    [
        (90, torch.bfloat16, ActivationType.SWIGLU, LAYOUTS[0], WIDE, True),
        (90, torch.bfloat16, ActivationType.SWIGLU, LAYOUTS[1], WIDE, False),
        (90, torch.float16, ActivationType.SWIGLU_CLAMPED, LAYOUTS[0], WIDE, True),
        (90, torch.float16, ActivationType.GELU, LAYOUTS[0], WIDE, False),
        # Rows of Z have 72 bytes.
        (90, torch.bfloat16, ActivationType.SWIGLU, LAYOUTS[1], NARROW, True),
        (90, torch.bfloat16, ActivationType.GELU, LAYOUTS[0], (2048, 272), False),
        (90, torch.bfloat16, ActivationType.GELU, LAYOUTS[0], (2048, 272), True),  # is masked
        (90, torch.bfloat16, ActivationType.SWIGLU, LAYOUTS[1], (2048, 272), False),
        (90, torch.bfloat16, ActivationType.SWIGLU, LAYOUTS[0], (264, 48), False),  # one block of N
        (90, torch.float32, ActivationType.SWIGLU, LAYOUTS[1], NARROW, True),
        (89, torch.bfloat16, ActivationType.SWIGLU, LAYOUTS[1], WIDE, True),
        (100, torch.bfloat16, ActivationType.SWIGLU, LAYOUTS[0], WIDE, False),
    ],
)
def test_z_in_e4m3(arch, dtype, activation, gate_up, sizes, bias):
    whole = not bias and sizes in ((2048, 272), (264, 48))  # which no other test compiles
    layer = (arch, dtype, activation, gate_up, False, bias, sizes)
    compiled = compile_layer(*layer, z_dtype=torch.float8_e4m3fn, whole=whole)
    check(compiled, arch, dtype.itemsize == 2, gemms=6 if whole else 2)
    gemms = [k for k in compiled if k.metadata.name.endswith(("up_kernel", "dz_kernel"))]
    up, dz = (k.asm["ptx"] for k in gemms)
    if arch >= 90:
        assert "cvt.rn.satfinite.e4m3x2.f32" in up and "cvt.rn.f16x2.e4m3x2" in dz
    aligned = sizes == WIDE or (sizes == (2048, 272) and activation.is_gated)
    hopper = arch == 90 and dtype.itemsize == 2 and aligned
    assert gemms[0].metadata.name.startswith("hopper_") == hopper


@pytest.mark.parametrize(
    ("arch", "dtype", "activation", "gate_up"),
    [
        (90, torch.float32, ActivationType.SWIGLU, "interleaved"),
        (90, torch.bfloat16, ActivationType.SWIGLU, "concatenated"),
        (100, torch.bfloat16, ActivationType.GELU, "interleaved"),
    ],
)
def test_columns_that_do_not_exist_are_zero_in_e4m3(arch, dtype, activation, gate_up):
    """ptxas makes constants of them, and wrong ones: as NaN they would reach dS."""
    layer = (arch, dtype, activation, gate_up, False, False, (264, 24))
    compiled = compile_layer(*layer, z_dtype=torch.float8_e4m3fn, whole=False)
    (dz,) = (k for k in compiled if k.metadata.name == "dz_kernel")
    converted = re.findall(r"E4M3\.UNPACK_B \w+, (\w+)", cuobjdump(dz, "-sass"))
    assert converted and all(re.fullmatch(r"R\d+", source) for source in converted)


@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
@pytest.mark.parametrize("arch", [90, 100])
def test_slices_of_h_read_views_of_the_weights(arch, transposed):
    """TMA takes them as they lie; slices of one width share a kernel."""
    a, b2 = torch.zeros(64, 512).bfloat16(), torch.zeros(2, 328).bfloat16()
    w2 = torch.zeros(2, 512, 328).mT if transposed else torch.zeros(2, 328, 512)
    maps, tiles = torch.zeros(64, dtype=torch.int32), torch.zeros(4, 4, dtype=torch.int32)
    p = Permutation(maps, maps, maps, None, None, maps[:3], tiles, 128)
    with compiling(arch) as compiled:
        out = grouped_gemm.down_and_combine(a, Weight(w2.bfloat16()), b2, None, NO_LORA, p, 32, 3)
    assert out.shape == (32, 328)
    gemms = [k for k in compiled if k.metadata.name.endswith("gemm_kernel")]
    assert len(compiled) == 6 and len(gemms) == 3  # 128, 128 and 72 columns
    assert len({id(k) for k in gemms}) == 2
    for kernel in gemms:
        found = report(kernel)
        assert found["TMA loads"] > 0 and found["spills"] == 0


@pytest.mark.parametrize("arch", [80, 90])
def test_fp32(arch):
    activation, bias = ActivationType.SWIGLU, arch == 90
    check(
        compile_layer(arch, torch.float32, activation, LAYOUTS[1], False, bias, NARROW),
        arch,
        False,
    )


@pytest.mark.parametrize(("arch", "experts"), [(80, 128), (90, 1000), (100, 512)])
def test_routing(arch, experts):
    logits = torch.zeros(64, experts)
    with compiling(arch) as compiled:
        scores, ids = launch_routing.topk(logits, 8, True)
        launch_routing.topk_backward(scores, scores, ids, logits, False)
        counts = launch_routing.permute(ids, experts, None, 128)[3]  # one chunk
        launch_routing.permute(ids.repeat(4, 1), experts, None, 128)
        launch_routing.tiles(torch.zeros(experts + 1, dtype=torch.int32), 512, 128)
        launch_routing.count(ids, experts)
        scores, affinity, ids = launch_routing.sigmoid_topk(logits, logits[0], 8, 8, 4, True, 2.5)
        launch_routing.sigmoid_topk_backward(scores, affinity, ids, logits, True, 2.5)
        loss, slope = launch_routing.balance(logits, counts, 1.0, 0.1)
        launch_routing.balance_backward(loss, slope, logits, 0.1)
    for kernel in compiled:
        found = report(kernel)
        assert found["spills"] == 0, f"{kernel.metadata.name} spills: {found}"
    assert len(compiled) == 13


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_quantizers(arch):
    """FP8 runs on Hopper. For sm_80 the scales only: Triton has no e4m3 there."""

    def kernels(tokens):
        def new(*shape, dtype=torch.float32):
            return torch.zeros(shape, dtype=dtype)

        maps, per_token, per_row = new(2 * tokens, dtype=torch.int32), new(tokens), (8, 2 * tokens)
        tiles = new(4, 4, dtype=torch.int32)
        p = Permutation(maps, maps, maps, None, None, tiles[0, :3], tiles, 128)
        with compiling(arch) as compiled:
            for hidden in (77, 1536, 4096, 16384) if arch > 80 else ():
                quantize.quantize_rows(new(tokens, hidden, dtype=torch.bfloat16), True)
            for shape in ((512, 256), (256, 512), (76, 132)) if arch > 80 else ():
                for transposed in (True, False):
                    options = (transposed, transposed)
                    quantize.quantize_weight(new(2, *shape, dtype=torch.bfloat16), *options)
                    quantize.quantize_weight(new(2, *shape).mT, *options)
                    w = new(2, *shape)
                    quantize.quantize_again(w.mT if transposed else w, new(2))
            for dtype in (torch.bfloat16, torch.float32) if arch > 80 else ():
                quantized = (new(2, 512, 256).to(torch.float8_e4m3fn), new(2))
                weight = (new(2, 512, 256, dtype=dtype), *quantized)
                state = (new(2, 2, dtype=torch.int32), new(1, dtype=torch.int32))
                quantize.checked_scales(*weight, *weight, *state, new(1, dtype=torch.int64))
            for activation in (ActivationType.SWIGLU, ActivationType.GELU) if arch > 80 else ():
                z = new(2 * tokens, 512 if activation.is_gated else 256, dtype=torch.bfloat16)
                scored = (new(2, 2 * tokens), new(tokens, 2), p, activation, "interleaved")
                quantize.scored_activation(z, *scored)
                z8 = z.to(torch.float8_e4m3fn)
                quantize.dequantize_rows(z8, new(2 * tokens))
                quantize.dequantize_rows(z8, new(z.shape[1] // 128, 2 * tokens))
                grouped_gemm.bias_gradient(z8, new(2 * tokens), p, False, torch.bfloat16)
            for activation in (ActivationType.SWIGLU, ActivationType.GELU):
                z = new(2 * tokens, 2048 if activation.is_gated else 1024)
                kept = Kept(z, new(*per_row), new(2, 1024), new(*per_row), per_token)
                w = Weight(None, w_scale=new(2), w_norm=new(2, 1024))
                rows = (new(tokens, 2), per_token, per_token)
                fp8_scales.dz_scales(*rows, kept, w, p, activation, "interleaved", True)
        return compiled

    compiled = kernels(496)
    assert len(compiled) == (54 if arch > 80 else 4)
    for kernel in compiled:
        found = report(kernel)
        assert found["spills"] == 0, f"{kernel.metadata.name} spills: {found}"
    for tokens in (333, 1):
        assert all(a is b for a, b in zip(compiled, kernels(tokens), strict=True))


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_only_valid_configurations_are_selected(arch, itemsize):
    target = Target(arch, 100)
    for n in (64, 128, 256, 768, 4096):
        for k in (64, 256, 1024):
            for gated in (True, False):
                for kernel in ("up", "down", "dx", "dz"):
                    config = row_config(kernel, itemsize, k, n, gated, target)
                    assert is_valid(config, itemsize, target, kernel), (kernel, k, n, config)
                    assert config.block_m == (128 if itemsize == 2 else 32)
            for left, right in ((True, False), (False, True), (False, False)):
                config = weight_config(itemsize, k, n, left, right, target)
                assert is_valid(config, itemsize, target), (k, n, config)


@pytest.mark.parametrize("counts", [(496, 333, 1), (4096, 3333, 513)], ids=["short", "long"])
@pytest.mark.parametrize("bias", [False, True])
def test_another_number_of_tokens_compiles_nothing(bias, counts):
    """16 | T, T odd and T = 1 take the same kernels: a new T must not stop a training step.

    What long batches need beside them is compiled ahead: `test_warmup`.
    """

    def kernels(tokens):
        hidden, intermediate, experts, k = 64, 32, 48, 2

        def new(*shape, dtype=torch.bfloat16):
            return torch.zeros(shape, dtype=dtype)

        x, w1, w2 = (
            new(tokens, hidden),
            new(experts, 64, hidden),
            new(experts, hidden, intermediate),
        )
        b1, b2 = (new(experts, 64), new(experts, hidden)) if bias else (None, None)
        with naming(90) as named:
            scores, ids = launch_routing.topk(new(tokens, experts), k, True)
            row_token, row_slot, slot_row, counts, *rest = launch_routing.permute(
                ids, experts, None, 128
            )
            p = Permutation(row_token, row_slot, slot_row, None, counts, *rest, 128)
            act, needs = (ActivationType.SWIGLU, LAYOUTS[0]), DzResults(True, False, True, True)
            z, a, _ = grouped_gemm.up(x, Weight(w1), b1, NO_LORA, p, *act, x.dtype)
            y = grouped_gemm.down(a, Weight(w2), b2, None, NO_LORA, p)
            grouped_gemm.combine(y, scores, slot_row, None, tokens)
            dz, a, _ = grouped_gemm.dz(x, z, None, Weight(w2), b2, scores, NO_LORA, p, *act, needs)
            compile_gradients(dz, a, x, x, w1, w2, scores if bias else None, p)
            launch_routing.topk_backward(scores, scores, ids, new(tokens, experts), True)
        return named

    first, *others = map(kernels, counts)
    names = [k.metadata.name for k in first]
    long = {"count_kernel", "scan_kernel", "place_kernel", "sum_spans_kernel"}
    if max(counts) < 512:
        assert "one_chunk_kernel" in names and not long & set(names)
    else:
        assert "one_chunk_kernel" not in names and long <= set(names)
    for other in others:
        assert [k.metadata.name for k in other] == names
        changed = [a.metadata.name for a, b in zip(first, other, strict=True) if a is not b]
        assert not changed


def test_multiplying_and_adding_is_one_step_whatever_the_default():
    """Triton 3.10 is to leave it to whoever asks."""
    with triton.knobs.language.scope(), compiling(90) as compiled:
        triton.knobs.language.default_fp_fusion = False
        y, slot_row = torch.zeros(64, 72, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int32)
        grouped_gemm.combine(y, torch.zeros(32, 2), slot_row, None, 32)
    assert [k.metadata.enable_fp_fusion for k in compiled] == [True]
