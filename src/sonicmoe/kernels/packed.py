"""Decoding of packed weights to bf16 or e4m3: the formats of `tensors.Packed`.

A word is eight neighbouring weights: an int32 of nibbles, or an int64 of e4m3. A thread decodes a
word at a time, so that what it stores, 16 bytes of bf16, lies beside what its neighbours store.
Bits become floating point by shifts and masks, then by a multiplication that is exact.
"""

import triton
import triton.language as tl

from .quantize import PTX, e4m3_word, is_finite


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _shifted(word, LEFT: tl.constexpr):
    """Bits above are not cleared if they are shifted right."""
    if LEFT >= 0:
        return word << LEFT
    else:
        return word >> -LEFT


@triton.jit
def _e8m0(byte):
    """2^(byte − 127), NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return _as_float(tl.where(byte == 255, 0x7FC00000, bits))


@triton.jit
def load_scale(
    scale, scale_table, scale2, offset, expert, word, inside,
    P: tl.constexpr, Q: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """The scale of the weights of each word of an expert; for MXFP4 the biased exponent."""
    if FORMAT == "fp8":
        row, column = word // (Q // 8), word % (Q // 8) * 8
        blocks: tl.constexpr = (Q + 127) // 128
        rows: tl.constexpr = (P + 127) // 128
        block = expert * (rows * blocks) + row // 128 * blocks + column // 128
        found = tl.load(scale + block, mask=inside, other=0)
        return _e8m0(found.to(tl.int32)) if scale.dtype.element_ty == tl.uint8 else found
    elif FORMAT == "nf4":
        block = (expert * (P * Q // 8) + word) // 8
        found = tl.load(scale + block, mask=inside, other=0)
        if scale_table is None:
            return found
        else:
            nested = tl.load(scale2 + block // 256, mask=inside, other=0.0)
            return tl.load(scale_table + found.to(tl.int32)) * nested + tl.load(offset)
    else:
        block = (expert * (P * Q // 8) + word) // 4
        found = tl.load(scale + block, mask=inside, other=0)
        return found.to(tl.int32) if FORMAT == "mxfp4" else found.to(tl.float32)


@triton.jit
def decoded(
    word, scale, table, factor, I: tl.constexpr, FORMAT: tl.constexpr, WITH_NAN: tl.constexpr
):
    """Weight I of each word in fp32; of MXFP4 times `factor`, a power of two.

    Without WITH_NAN, NaN in e4m3 becomes a number.
    """
    if FORMAT == "mxfp4":
        # As fp32, sign, two bits of exponent and one of mantissa are e2m1 · 2⁻¹²⁶, zero and 0.5
        # included. That and the scale are factors of at most 2¹²⁷, so that no finite one overflows.
        bits = (_shifted(word, 28 - 4 * I) & -0x80000000) | (_shifted(word, 22 - 4 * I) & 0x1C00000)
        low = tl.minimum(scale, 128)
        high = _as_float((scale - low + 127) << 23) * factor
        return _as_float(bits) * _as_float((low + 126) << 23) * high
    elif FORMAT == "nf4":
        return tl.load(table + ((word >> (4 * (I ^ 1))) & 15)) * scale  # the high nibble first
    elif FORMAT == "int4":
        # 2²³ + n, as the bits of fp32.
        return (_as_float(((word >> (4 * I)) & 15) | 0x4B000000) - 8388616.0) * scale
    else:
        # As fp32, sign, four bits of exponent and three of mantissa are e4m3 · 2⁻¹²⁰.
        half = word.to(tl.int32) if I < 4 else (word >> 32).to(tl.int32)
        i: tl.constexpr = I % 4
        bits = (_shifted(half, 24 - 8 * i) & -0x80000000) | (_shifted(half, 20 - 8 * i) & 0x7F00000)
        value = _as_float(bits) * 1.3292279957849159e36
        if WITH_NAN:
            value = tl.where((bits & 0x7F00000) == 0x7F00000, float("nan"), value)
        return value * scale


@triton.jit
def _interleaved(a, b, c, d, e, f, g, h):
    """(…, 8): eight tensors side by side."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd)


@triton.jit(do_not_specialize=["first"])
def dequantize_kernel(
    codes, scale, table, scale_table, scale2, offset, out, first,
    P: tl.constexpr, Q: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (count, P, Q) in its dtype: the weights of the experts from `first` on.

    Grid: (P·Q/8/BLOCK, count); a program owns BLOCK words.
    """
    WORDS: tl.constexpr = P * Q // 8
    expert = (first + tl.program_id(1)).to(tl.int64)
    # Without the hint a thread would load four adjacent words and store 64 bytes apart.
    word = tl.program_id(0) * BLOCK + tl.max_contiguous(tl.arange(0, BLOCK), 1)
    inside = word < WORDS
    w = tl.load(codes + expert * WORDS + word, mask=inside, other=0)
    s = load_scale(scale, scale_table, scale2, offset, expert, word, inside, P, Q, FORMAT)
    values = ()
    for i in tl.static_range(8):
        values = values + (decoded(w, s, table, 1.0, i, FORMAT, True).to(out.dtype.element_ty),)
    rows = _interleaved(*values).reshape(BLOCK * 8)
    i = tl.program_id(0) * (BLOCK * 8) + tl.arange(0, BLOCK * 8)
    out += tl.program_id(1).to(tl.int64) * (P * Q)
    tl.store(out + i, rows, mask=i < P * Q)


@triton.jit
def _inverse(scale):
    """Of a power of two, exactly; NaN stays."""
    inverse = _as_float(0x7F000000 - scale.to(tl.int32, bitcast=True))
    return tl.where(is_finite(scale), inverse, float("nan"))


@triton.jit
def _rounded(a, b):
    """a and b rounded to bf16. Converted one by one, they would take three times as long."""
    if PTX:
        pair = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
        return _as_float(pair << 16), _as_float(pair & -0x10000)
    else:
        return a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _scaled_pair(word, scale, table, factor, I: tl.constexpr, FORMAT: tl.constexpr):
    """Weights I and I + 1 of each word as they are in bf16, times `factor`, the inverse scale of
    the expert: NaN if one of its weights is."""
    a = decoded(word, scale, table, factor, I, FORMAT, False)
    b = decoded(word, scale, table, factor, I + 1, FORMAT, False)
    if FORMAT == "mxfp4":  # all its values are in bf16, or infinite there too
        return a, b
    else:
        a, b = _rounded(a, b)
        return a * factor, b * factor


@triton.jit
def _scaled_word(word, scale, table, factor, FORMAT: tl.constexpr):
    """All weights of each word."""
    a, b = _scaled_pair(word, scale, table, factor, 0, FORMAT)
    c, d = _scaled_pair(word, scale, table, factor, 2, FORMAT)
    e, f = _scaled_pair(word, scale, table, factor, 4, FORMAT)
    g, h = _scaled_pair(word, scale, table, factor, 6, FORMAT)
    return a, b, c, d, e, f, g, h


@triton.jit(do_not_specialize=["first"])
def quantize_packed_kernel(
    codes, scale, table, scale_table, scale2, offset, w_scale, out, first,
    P: tl.constexpr, Q: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (count, P, Q/4): e4m3 in words of four; else as `dequantize_kernel`."""
    WORDS: tl.constexpr = P * Q // 8
    expert = (first + tl.program_id(1)).to(tl.int64)
    word = tl.program_id(0) * BLOCK + tl.max_contiguous(tl.arange(0, BLOCK), 2)
    inside = word < WORDS
    w = tl.load(codes + expert * WORDS + word, mask=inside, other=0)
    s = load_scale(scale, scale_table, scale2, offset, expert, word, inside, P, Q, FORMAT)
    factor = _inverse(tl.load(w_scale + expert))
    v = _scaled_word(w, s, table, factor, FORMAT)
    pair = tl.join(e4m3_word(v[0], v[1], v[2], v[3]), e4m3_word(v[4], v[5], v[6], v[7]))
    i = tl.program_id(0) * (BLOCK * 2) + tl.arange(0, BLOCK * 2)
    out += tl.program_id(1).to(tl.int64) * (P * Q // 4)
    tl.store(out + i, pair.reshape(BLOCK * 2), mask=i < P * Q // 4)


@triton.jit(do_not_specialize=["first"])
def quantize_transposed_kernel(
    codes, scale, table, scale_table, scale2, offset, w_scale, out, first,
    P: tl.constexpr, Q: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """out (count, Q, P/4): the transpose in e4m3, in words of four.

    Grid: (P/BLOCK_P · Q/BLOCK_Q, count); a program owns one tile.
    """
    q_tiles: tl.constexpr = (Q + BLOCK_Q - 1) // BLOCK_Q
    index = tl.program_id(0)
    expert = (first + tl.program_id(1)).to(tl.int64)
    factor = _inverse(tl.load(w_scale + expert))
    four = index // q_tiles * (BLOCK_P // 4) + tl.arange(0, BLOCK_P // 4)
    column = index % q_tiles * (BLOCK_Q // 8) + tl.max_contiguous(tl.arange(0, BLOCK_Q // 8), 1)
    inside = (four < P // 4)[:, None] & (column < Q // 8)[None, :]
    words, scales = (), ()
    for j in tl.static_range(4):  # before the first is used, so that all loads are in flight
        word = (4 * four + j)[:, None] * (Q // 8) + column[None, :]
        words = words + (tl.load(codes + expert * (P * Q // 8) + word, mask=inside, other=0),)
        s = load_scale(scale, scale_table, scale2, offset, expert, word, inside, P, Q, FORMAT)
        scales = scales + (s,)
    a = _scaled_word(words[0], scales[0], table, factor, FORMAT)
    b = _scaled_word(words[1], scales[1], table, factor, FORMAT)
    c = _scaled_word(words[2], scales[2], table, factor, FORMAT)
    d = _scaled_word(words[3], scales[3], table, factor, FORMAT)
    packed = ()
    for i in tl.static_range(8):
        packed = packed + (e4m3_word(a[i], b[i], c[i], d[i]),)
    tile = _interleaved(*packed).reshape(BLOCK_P // 4, BLOCK_Q)
    q = index % q_tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    out += tl.program_id(1).to(tl.int64) * (P * Q // 4)
    inside = (q < Q)[:, None] & (four < P // 4)[None, :]
    tl.store(out + q[:, None] * (P // 4) + four[None, :], tl.trans(tile), mask=inside)


@triton.jit(do_not_specialize=["first", "count", "size"])
def part_of_tiles_kernel(tiles, out, first, count, size, BLOCK: tl.constexpr):
    """out (1+size, 4): the tiles of `count` experts from `first` on, which count from 0 then.

    Grid: (size/BLOCK,); a program owns BLOCK entries, and counts the tiles of all.
    """
    total = tl.load(tiles)
    i = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    until = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, total, BLOCK):
        expert = tl.load(tiles + 4 + 4 * (start + i), mask=start + i < total, other=0x7FFFFFFF)
        before += (expert < first).to(tl.int32)
        until += (expert < first + count).to(tl.int32)
    skipped = tl.sum(before, 0)
    found = tl.sum(until, 0) - skipped
    index = tl.program_id(0) * BLOCK + i
    inside = (index < found)[:, None]
    field = tl.arange(0, 4)[None, :]
    values = tl.load(tiles + 4 + 4 * (skipped + index)[:, None] + field, mask=inside, other=0)
    values -= tl.where(field == 0, first, 0)
    tl.store(out + 4 + 4 * index[:, None] + field, values, mask=inside)
    if tl.program_id(0) == 0:
        head = tl.load(tiles + tl.arange(0, 4))
        tl.store(out + tl.arange(0, 4), tl.where(tl.arange(0, 4) == 0, found, head))
