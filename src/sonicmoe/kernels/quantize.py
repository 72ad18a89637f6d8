"""Quantization to e4m3: see `reference.quantize`.

Largest magnitudes are compared as the integers that encode them, so that NaN is the largest.
"""

import torch
import triton
import triton.language as tl

PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)

# Neighbouring values that a thread holds: 16 bytes of bf16. Without this hint Triton takes the 16
# that one store of e4m3 can write, and neighbouring threads load 32 bytes apart.
_VECTOR: tl.constexpr = tl.constexpr(8)


ROW_FLOOR: tl.constexpr = tl.constexpr(1)  # of the exponent of scales: see `reference.quantize`
BLOCK_FLOOR: tl.constexpr = tl.constexpr(57)


@triton.jit
def is_finite(value):
    return (value.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def scale_and_inverse(bound, FLOOR: tl.constexpr):
    """`power_of_two_scale`, and its inverse, which is finite also where the scale is NaN."""
    bits = bound.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, FLOOR)  # 448 is 1.75·2⁸
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite(bound), scale, float("nan")), inverse


@triton.jit
def power_of_two_scale(bound, FLOOR: tl.constexpr):
    """The smallest power of two s ≥ 2^(FLOOR − 127) with bound ≤ 448·s; NaN unless finite."""
    scale, _ = scale_and_inverse(bound, FLOOR)
    return scale


@triton.jit
def norm_in_e4m3(squares, COUNT: tl.constexpr):
    """See `reference.quantize.norm_in_e4m3`; of the sum of the squares of COUNT values."""
    return tl.sqrt_rn(squares) * 1.0625 + COUNT**0.5 * 0.0009765625


@triton.jit
def magnitude_bits(value):
    """|value| in fp32 as the integer that encodes it."""
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit(do_not_specialize=["tokens"])
def quantize_rows_kernel(
    x, q, scale, norm, tokens, stride,
    H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """q (T, H) e4m3, the scale (T,) of each row of x and, unless None, a bound on q's norm (T,).

    Grid: T/BLOCK_T; a program owns BLOCK_T rows, which stay in registers.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.max_contiguous(tl.arange(0, BLOCK_H), _VECTOR)[None, :]
    row, used = t.to(tl.int64)[:, None], t < tokens
    inside = used[:, None] & (h < H)
    values = tl.load(x + row * stride + h, mask=inside, other=0.0).to(tl.float32)
    s = power_of_two_scale(
        tl.max(magnitude_bits(values), 1).to(tl.float32, bitcast=True), ROW_FLOOR
    )
    scaled = values * tl.div_rn(1.0, s)[:, None]  # plain division is not exact
    tl.store(q + row * H + h, scaled.to(q.dtype.element_ty), mask=inside)
    tl.store(scale + t, s, mask=used)
    if norm is not None:
        tl.store(norm + t, s * norm_in_e4m3(tl.sum(scaled * scaled, 1), H), mask=used)


@triton.jit
def weight_amax_kernel(w, amax, SIZE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """amax (E,) int32, zero before: the bits of the largest magnitude of each expert's weights.

    Grid: (SIZE/(STEPS·BLOCK), E); a program reads STEPS·BLOCK of the expert's SIZE weights.
    """
    expert = tl.program_id(1)
    first = tl.program_id(0) * (STEPS * BLOCK)
    largest = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        i = first + step * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(w + expert.to(tl.int64) * SIZE + i, mask=i < SIZE, other=0.0)
        largest = tl.maximum(largest, magnitude_bits(values))
    tl.atomic_max(amax + expert, tl.max(largest, 0), sem="relaxed")


@triton.jit
def e4m3_word(a, b, c, d):
    """Four fp32 values, rounded to e4m3, as the bytes of an int32.

    In assembly, because ptxas of CUDA 12.8 takes single bytes of conversions that are stored as
    well from a register that was never written.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return _byte(a) | (_byte(b) << 8) | (_byte(c) << 16) | (_byte(d) << 24)


@triton.jit
def _byte(value):
    return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def quantize_weight_kernel(
    w, amax, q, words, scale, squares,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """q (E, N, K) e4m3, its transpose (E, K, N) and scale (E,) of contiguous weights (E, N, K).

    The transpose is given as `words` (E, K, N/4) of four bytes: transposing words takes a quarter
    of the accesses to shared memory. N is a multiple of 4. What is None is not stored. `squares`
    gets the sums of the squares over each tile's rows, (E, N/BLOCK_N, K), if SUM is "n", or over
    its columns, (E, K/BLOCK_K, N), if it is "k". Without `amax` the scale is read.

    Grid: (N/BLOCK_N · K/BLOCK_K, E); a program owns one tile of q and of its transpose.
    """
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    index, expert = tl.program_id(0), tl.program_id(1)
    if amax is None:
        s = tl.load(scale + expert)
    else:
        s = power_of_two_scale(tl.load(amax + expert).to(tl.float32, bitcast=True), ROW_FLOOR)
        if index == 0:
            tl.store(scale + expert, s)
    factor = tl.div_rn(1.0, s)
    word = index // k_tiles * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    k = index % k_tiles * BLOCK_K + tl.max_contiguous(tl.arange(0, BLOCK_K), _VECTOR)
    expert = expert.to(tl.int64)
    offset = expert * (N * K) + (word * 4).to(tl.int64)[:, None] * K + k[None, :]
    inside = (word < N // 4)[:, None] & (k < K)[None, :]
    loaded = ()  # before the first store, so that all loads are in flight at once
    for j in tl.static_range(4):
        loaded = loaded + (tl.load(w + offset + j * K, mask=inside, other=0.0),)
    scaled = ()
    for j in tl.static_range(4):
        scaled = scaled + (loaded[j].to(tl.float32) * factor,)
        if q is not None:
            tl.store(q + offset + j * K, scaled[j].to(q.dtype.element_ty), mask=inside)
    if SUM == "n":
        total = tl.zeros((BLOCK_N // 4, BLOCK_K), tl.float32)
        for j in tl.static_range(4):
            total += scaled[j] * scaled[j]
        plane = squares + (expert * ((N + BLOCK_N - 1) // BLOCK_N) + index // k_tiles) * K
        tl.store(plane + k, tl.sum(total, 0), mask=k < K)
    elif SUM == "k":
        plane = squares + (expert * k_tiles + index % k_tiles) * N
        for j in tl.static_range(4):
            total = tl.sum(scaled[j] * scaled[j], 1)
            tl.store(plane + word * 4 + j, total, mask=word < N // 4)
    if words is not None:
        packed = e4m3_word(scaled[0], scaled[1], scaled[2], scaled[3])
        offset = expert * (N * K // 4) + k.to(tl.int64)[:, None] * (N // 4) + word[None, :]
        inside = (k < K)[:, None] & (word < N // 4)[None, :]
        tl.store(words + offset, tl.trans(packed), mask=inside)


@triton.jit
def column_norms_kernel(
    squares, scale, norm,
    C: tl.constexpr, TILES: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """norm (E, C): `norm_in_e4m3` of COUNT values with the sums `squares` (E, TILES, C), added in
    order.

    Grid: (C/BLOCK, E); a program owns BLOCK norms.
    """
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(TILES):
        total += tl.load(squares + (expert * TILES + i) * C + c, mask=c < C, other=0.0)
    bound = tl.load(scale + expert) * norm_in_e4m3(total, COUNT)
    tl.store(norm + expert * C + c, bound, mask=c < C)


@triton.jit
def checked_scales_kernel(
    w1, q1, scale1, checked1, w2, q2, scale2, checked2, sample, generation, flags,
    SIZE1: tl.constexpr, SAMPLES1: tl.constexpr, SIZE2: tl.constexpr, SAMPLES2: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The scales (E,) of two weights, NaN for experts whose q is not their weights in e4m3.

    An expert has SIZE1 and SIZE2 words of four values. A sample of them is compared: groups of four
    words, every SAMPLES1-th and every SAMPLES2-th, from the first one in `sample` (2, E), which is
    incremented. If an expert changed, `generation` is stored at the address in `flags`, for the
    second weight behind it.

    Grid: (E, 2); a program owns the scale and the sample of one expert of one weight.
    """
    flag = tl.load(flags).to(tl.pointer_type(tl.int32))
    if tl.program_id(1) == 0:
        _check_scale(w1, q1, scale1, checked1, sample, generation, flag, SIZE1, SAMPLES1, BLOCK)
    else:
        sample += tl.num_programs(0)
        _check_scale(w2, q2, scale2, checked2, sample, generation, flag + 1, SIZE2, SAMPLES2, BLOCK)


@triton.jit
def _check_scale(
    w, q, scale, checked, sample, generation, flag,
    SIZE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    first = tl.load(sample + expert)
    # Words, not e4m3: where a mask is always false, ptxas of CUDA 12.8 takes e4m3 for NaN.
    words = q.to(tl.pointer_type(tl.int32))
    s = tl.load(scale + expert)
    factor = tl.div_rn(1.0, s)
    different = tl.zeros((BLOCK, 4), tl.int32)
    for start in range(0, SIZE, 4 * STEP * BLOCK):
        group = start + 4 * (first + STEP * tl.arange(0, BLOCK))
        inside = (group < SIZE)[:, None]
        word = expert.to(tl.int64) * SIZE + group[:, None] + tl.arange(0, 4)[None, :]
        scaled = ()
        for j in tl.static_range(4):
            value = tl.load(w + 4 * word + j, mask=inside, other=0.0)
            scaled = scaled + (value.to(tl.float32) * factor,)
        rounded = e4m3_word(scaled[0], scaled[1], scaled[2], scaled[3])
        different |= rounded ^ tl.load(words + word, mask=inside, other=0)
    is_stale = tl.max(tl.max((different != 0).to(tl.int32), 1), 0)
    tl.store(checked + expert, tl.where(is_stale > 0, float("nan"), s))
    tl.store(sample + expert, (first + 1) % STEP)  # after all threads have read it
    if s != s:
        is_stale = _all_finite(w + expert.to(tl.int64) * (4 * SIZE), 4 * SIZE, 16 * BLOCK)
    tl.store(flag, tl.load(generation), mask=is_stale > 0)


@triton.jit
def _all_finite(w, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """1 if all SIZE values are finite, else 0."""
    finite = tl.full((BLOCK,), 1, tl.int32)
    for start in range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(w + i, mask=i < SIZE, other=0.0).to(tl.float32)
        finite &= is_finite(value).to(tl.int32)
    return tl.min(finite, 0)
