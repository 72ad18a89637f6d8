"""Launches of the grouped GEMMs: pick a configuration, allocate, launch.

Functions without an underscore have the names, parameters and results of the operators in
`ops.grouped_gemm`, and take configurations to measure.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from ..enums import ActivationType
from ..kernels import combine as combine_kernels
from ..kernels.activation import derivative_of, value_of
from ..kernels.transpose import transpose_kernel
from ..kernels.triton.dz import dz_kernel
from ..kernels.triton.gemm import gemm_kernel, up_kernel
from ..kernels.triton.wgrad import bias_gradient_kernel, wgrad_kernel
from ..shapes import BLOCK, ceil_div, slice_width
from ..tensors import E4M3, NO_LORA, Lora, Permutation, Weight
from ..tuning import RowConfig, WeightConfig, row_config, weight_config
from ..tuning.select import default_row_config, e4m3_row_config
from . import memory
from .descriptors import descriptor, weight_layout
from .launcher import Bound, dot_precision, launch, power_of_two, target_of
from .spans import spans_of, sum_spans
from .weights import decoded_once, parts

SLOTS = 1024  # slots per program of `sum_partials_kernel`


@cache
def _hopper():
    from . import grouped_gemm_hopper

    return grouped_gemm_hopper


def _weight_source(w: torch.Tensor, config: RowConfig, gate_up: str | None = None):
    """(E, N, K) weights as a kernel takes them: a TMA descriptor, or the tensor itself."""
    if not config.tma:
        return w
    experts, columns, depth = w.shape
    n, k = config.block_n, config.block_k
    in_order = weight_layout(w) == "nk"
    if gate_up != "concatenated":
        return descriptor(w, [1, n, k]) if in_order else descriptor(w.mT, [1, k, n])
    # One box holds the gate and the up half of a tile.
    if in_order:
        return descriptor(w.view(experts, 2, columns // 2, depth), [1, 2, n // 2, k])
    return descriptor(w.mT.view(experts, depth, 2, columns // 2), [1, k, 2, n // 2])


def _row_source(t: torch.Tensor, config: RowConfig, gathered: bool):
    """Rows as a kernel takes them: a TMA descriptor, or the tensor itself if they are gathered."""
    if gathered or not config.tma:
        return t
    return descriptor(t, [config.block_m, config.block_k])


def _gemm_options(rows: torch.Tensor, source, w: torch.Tensor, config: RowConfig) -> dict:
    """Compile-time options of all portable GEMMs over rows."""
    return {
        "A_TMA": source is not rows,
        "W_TMA": config.tma,
        "WEIGHT_LAYOUT": weight_layout(w),
        "PRECISION": dot_precision(rows),
        # fp32: two blocks of K are summed before they join the accumulator, see triton.tile.
        "UNROLL": 2 if rows.dtype == torch.float32 else 1,
        **_tile_options(config),
    }


def _tile_options(config: RowConfig | WeightConfig) -> dict:
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    return {**blocks, "num_warps": config.warps, "num_stages": config.stages}


def _grid(config: RowConfig | WeightConfig, work: int, target) -> tuple[int]:
    return (min(work, config.programs * target.processors) or 1,)


def _row_grid(config: RowConfig, p: Permutation, columns: int, target) -> tuple[int]:
    return _grid(config, (p.tiles.shape[0] - 1) * ceil_div(columns, config.block_n), target)


def _low_rank(lora: Lora) -> tuple[Tensor | None, Tensor | None]:
    """U and B as the portable kernels read them."""
    return lora.lora_u, None if lora.lora_b is None else lora.lora_b.contiguous()


def _lora_options(lora: Lora) -> dict[str, int]:
    """RANK, and BLOCK_R, the columns of U and B that a step multiplies."""
    if lora.lora_u is None:
        return {"RANK": 0, "BLOCK_R": 0}
    narrow = lora.rank <= 16 and lora.lora_u.element_size() == 2
    return {"RANK": lora.rank, "BLOCK_R": 16 if narrow else 32}


def _row_config(kernel: str, itemsize: int, k: int, n: int, gated: bool, target, lora) -> RowConfig:
    config = row_config(kernel, itemsize, k, n, gated, target)
    if lora.lora_u is None or config.hopper:
        return config
    # Portable kernels with LoRA have a configuration whose epilogue does not spill.
    config = default_row_config(kernel, itemsize, k, n, target._replace(gluon=False))
    # With a gate two slices spill up to 18 registers in the clamped activation.
    return replace(config, slices=4 if gated else 2) if kernel == "dz" else config


def up(
    x, w1, b1, lora, p: Permutation, activation: ActivationType, gate_up, z_dtype, config=None
):  # fmt: skip
    rows, (_, n, hidden) = p.rows_of(x), w1.shape
    a = memory.empty((rows, activation.intermediate_size(n)), x.dtype, x.device)
    gated, target = activation.is_gated, target_of(x)
    gate_up = gate_up if gated else None
    config = config or _row_config("up", x.element_size(), hidden, n, gated, target, lora)
    z = None if z_dtype is None else memory.empty((rows, n), z_dtype, x.device)
    z_scale = None
    if z_dtype == E4M3:
        config = e4m3_row_config(config, "up", hidden, a.shape[1], gate_up, target)
        z_scale = memory.empty((ceil_div(n, BLOCK), rows), torch.float32, x.device)
    if rows == 0:
        return z, a, z_scale
    outputs = (a if z is None else z, z_scale, a)  # if Z is not stored, any valid address will do
    grid = _row_grid(config, p, n, target)
    keep_z = z is not None
    for part in parts(w1, x.dtype, b1, lora, p):
        w, bias, low, q, _ = part
        if config.hopper:
            given = (outputs, activation, gate_up, keep_z, config, low)
            kernel, args = _hopper().up(x, w, bias, q, *given)
            launch(kernel, grid, *args)
        else:
            source = _row_source(x, config, p.is_gathered)
            weights = _weight_source(w, config, gate_up)
            args = (source, p.row_token, weights, bias, *_low_rank(low), *outputs, q.tiles, rows)
            options = {"GATE_UP": gate_up, "ACTIVATION": value_of(activation, x.dtype)}
            options |= _lora_options(low) | _gemm_options(x, source, w, config)
            launch(up_kernel, grid, *args, *w.stride(), H=hidden, N=n, KEEP_Z=keep_z, **options)
            del weights
        del part, w, args
    return z, a, z_scale


def gathered_gemm(x, w, p: Permutation):
    """By the kernel of up, which gathers; the activation of these few columns is not used."""
    relu = (ActivationType.RELU, "interleaved")
    return up(x, Weight(w), None, NO_LORA, p, *relu, x.dtype)[0]


def down(
    a, w2, b2, row_scores, lora, p: Permutation, config=None, kernel="down", columns=slice(None)
):  # fmt: skip
    """Also the GEMM of dX, which is the same on other operands: kernel "dx".

    b2 and the adapter have the `columns` of Y that are computed; w2 has all.
    """
    _, n, k = w2.shape
    n = len(range(n)[columns])
    y = memory.empty((a.shape[0], n), a.dtype, a.device)
    if a.shape[0] == 0:
        return y
    target = target_of(a)
    config = config or _row_config(kernel, a.element_size(), k, n, True, target, lora)
    grid = _row_grid(config, p, n, target)
    for part in parts(w2, a.dtype, b2, lora, p):
        w, bias, low, q, _ = part
        w = w if n == w.shape[1] else w[:, columns]
        if config.hopper:
            hopper_kernel, args = _hopper().down(a, w, bias, row_scores, y, q, config, low)
            launch(hopper_kernel, grid, *args)
        else:
            source = _row_source(a, config, gathered=False)
            weights = _weight_source(w, config)
            args = (source, weights, bias, row_scores, *_low_rank(low), y, q.tiles)
            options = _lora_options(low) | _gemm_options(a, source, w, config)
            launch(gemm_kernel, grid, *args, *w.stride(), K=k, N=n, **options)
            del weights
        del part, w, args
    if not p.is_gathered:
        zero_tail(y, p)
    return y


def zero_tail(y: torch.Tensor, p: Permutation) -> None:
    """Zero the rows of no expert; they become NaN if the tile table is invalid."""
    rows, n = y.shape
    kernel, experts = combine_kernels.zero_tail_kernel, p.expert_start.shape[0] - 1
    args = (y, p.expert_start, p.tiles, rows, experts)
    launch(kernel, (ceil_div(rows, 32),), *args, N=n, BLOCK_M=32, BLOCK_N=128, num_warps=4)


@cache
def _combine_kernel(hidden: int, stride: int, per_token: int) -> tuple[int, Bound]:
    """Programs per token, and the kernel."""
    block = min(power_of_two(hidden), 1024)
    unroll = min(power_of_two(max(per_token, 1)), 8)
    kernel = combine_kernels.combine_kernel
    options = {"H": hidden, "OUT_STRIDE": stride, "UNROLL": unroll, "BLOCK_H": block}
    return ceil_div(hidden, block), Bound(kernel, **options, num_warps=4)


def combine(y, scores, slot_row, token_start, tokens, out=None):
    """`out` may be columns of a wider tensor."""
    hidden = y.shape[1]
    if out is None:
        out = memory.empty((tokens, hidden), y.dtype, y.device)
    slots = slot_row.shape[0]
    if tokens == 0:
        return out
    per_token = slots // tokens if token_start is None else 0
    programs, kernel = _combine_kernel(hidden, out.stride(0), per_token)
    launch(kernel, (tokens, programs), y, scores, slot_row, token_start, out, per_token, slots)
    return out


def down_and_combine(a, w2, b2, scores, lora, p: Permutation, tokens, slices, kernel="down"):
    """Also dX, kernel "dx". Sorted rows are not combined, and come in one piece."""
    if not p.is_gathered or slices == 1:
        y = down(a, w2, b2, None, lora, p, kernel=kernel)
        return combine(y, scores, p.slot_row, p.token_start, tokens) if p.is_gathered else y
    hidden, k = w2.shape[1:]
    # One configuration for all slices: in fp32, another block_k would sum in another order.
    config = _row_config(kernel, a.element_size(), k, hidden, True, target_of(a), lora)
    out = memory.empty((tokens, hidden), a.dtype, a.device)
    w2 = decoded_once(w2, a.dtype)
    for columns, bias, factor in column_slices(hidden, slices, b2, lora):
        y = down(a, w2, bias, None, factor, p, config, kernel, columns)
        combine(y, scores, p.slot_row, p.token_start, tokens, out[:, columns])
        del y  # before the next one is allocated
    return out


def column_slices(
    hidden: int, slices: int, bias: Tensor | None, lora: Lora
) -> Iterator[tuple[slice, Tensor | None, Lora]]:
    """Slices of H, with their columns of the bias and of the adapter's B."""
    width = slice_width(hidden, slices)
    for first in range(0, hidden, width):
        columns = slice(first, first + width)
        of_bias = None if bias is None else bias[:, columns].contiguous()
        of_b = None if lora.lora_b is None else lora.lora_b[:, columns]
        yield columns, of_bias, lora._replace(lora_b=of_b)


@cache
def sum_partials(planes: int) -> Bound:
    return Bound(combine_kernels.sum_partials_kernel, PARTS=planes, BLOCK=SLOTS)


def dz(
    dout, z, z_scale, w2, b2, scores, lora, p: Permutation, activation, gate_up, needs, config=None
):  # fmt: skip
    if not any(needs):
        return None, None, None
    rows, dtype, device = z.shape[0], dout.dtype, z.device
    _, hidden, intermediate = w2.shape
    target = target_of(z)
    gate_up = gate_up if activation.is_gated else None
    config = config or _row_config(
        "dz", dtype.itemsize, hidden, intermediate, activation.is_gated, target, lora
    )
    if z_scale is not None:
        config = e4m3_row_config(config, "dz", hidden, intermediate, gate_up, target)
    # The Hopper kernel always stores dZ.
    dz = memory.empty(z.shape, dtype, device) if needs.dz or config.hopper else None
    a = memory.empty((rows, intermediate), dtype, device) if needs.a else None
    dscores = memory.empty(scores.shape, torch.float32, device) if needs.dscores else None
    if rows == 0:
        return (dz if needs.dz else None), a, dscores
    tiles_n = ceil_div(intermediate, config.block_n)
    partial = partial_scores(tiles_n, b2, dscores, device)
    grid = _row_grid(config, p, intermediate, target)
    outputs = (dz, a, partial)
    for part in parts(w2, dtype, None, lora, p):
        w, _, low, q, _ = part
        if config.hopper:
            inputs = (dout, z, z_scale, w, scores, q)
            kernel, args = _hopper().dz_gemm(
                *inputs, outputs, activation, gate_up, needs.dscores, config, low
            )
            launch(kernel, grid, *args)
            del inputs
        else:
            w = w.mT  # the GEMM sums over H: (E, I, H) weights
            source, weights = _row_source(dout, config, p.is_gathered), _weight_source(w, config)
            args = (source, p.row_token, weights, *_low_rank(low), scores, p.row_slot)
            args = (*args, z, z_scale, *outputs, q.tiles, partial.shape[1], rows)
            stored = {"STORE_DZ": needs.dz, "STORE_A": needs.a, "STORE_PARTIAL": needs.dscores}
            options = {"GATE_UP": gate_up, "SLICES": config.slices, **stored}
            options |= {"BACKWARD": derivative_of(activation, dout.dtype), **_lora_options(low)}
            options |= _gemm_options(dout, source, w, config)
            sizes = {"H": hidden, "I": intermediate}
            launch(dz_kernel, grid, *args, *w.stride(), **sizes, **options)
            del weights
        del part, w, args
    sum_partial_scores(partial, dout, b2, p, dscores)
    return (dz if needs.dz else None), a, dscores


def partial_scores(parts: int, b2: Tensor | None, dscores: Tensor | None, device) -> Tensor:
    """Planes for partial sums of dscores: `parts` of a dZ GEMM, and one of b2; none if there are no
    dscores."""
    if dscores is None:
        return memory.empty((0, 0), torch.float32, device)
    # Every plane is aligned to 16 bytes for every T.
    shape = (parts + (b2 is not None), 4 * ceil_div(dscores.numel(), 4))
    return memory.empty(shape, torch.float32, device)


def sum_partial_scores(partial, dout, b2, p: Permutation, dscores) -> None:
    """Write dscores, unless they are None: the sum of all planes. This fills that of b2."""
    if dscores is None:
        return
    planes, plane = partial.shape
    if b2 is not None:
        _bias_scores(dout, b2, p, partial[-1])
    slots, experts = dscores.numel(), p.expert_start.shape[0] - 1
    args = (partial, p.slot_row, p.expert_start, dscores, slots, plane, experts)
    launch(sum_partials(planes), (ceil_div(slots, SLOTS),), *args)


def _bias_scores(dout, b2, p: Permutation, out) -> None:
    """The bias's part of the score gradient, ⟨dO, b2⟩ of each slot."""
    kernel = combine_kernels.bias_score_kernel
    args = (dout, p.row_token, p.row_slot, b2, out, p.tiles)
    sizes = {"H": b2.shape[1], "BLOCK_M": p.tile_m, "BLOCK_H": 64}
    launch(kernel, (p.tiles.shape[0] - 1,), *args, **sizes, num_warps=8)


def dx(dz, w1, lora, p: Permutation, tokens, slices):
    return down_and_combine(dz, w1.mT, None, None, lora, p, tokens, slices, "dx")


def weight_gradient(left, right, w, p: Permutation, gathered, fp32):
    dw = memory.empty_like(w, torch.float32 if fp32 else w.dtype)
    write_weight_gradient(left, right, dw, p, gathered)
    return dw


def weight_gradient_into(main_grad, left, right, p: Permutation, gathered):
    write_weight_gradient(left, right, main_grad, p, gathered, add=True)


def write_weight_gradient(
    left, right, dw, p: Permutation, gathered: str, add=False, config=None
) -> None:
    """dw (E, M, N) = Σ over an expert's rows of leftᵀ right; added to what is there if `add`.

    `gathered` names the operand whose rows are tokens, unless rows arrive sorted.
    """
    if weight_layout(dw) == "kn":
        # Compute the transpose, so that rows of the store are contiguous.
        left, right, dw = right, left, dw.mT
        gathered = "right" if gathered == "left" else "left"
    gather = p.is_gathered and gathered == "left", p.is_gathered and gathered == "right"
    experts, m, n = dw.shape
    target = target_of(left)
    config = config or weight_config(left.element_size(), m, n, *gather, target)
    per_expert = ceil_div(m, config.block_m) * ceil_div(n, config.block_n)
    rows = p.rows_of(left)
    longest = p.most_rows_of_an_expert(left if gather[0] else right)
    programs = config.programs * target.processors
    spans = spans_of(rows, longest, dw.shape, per_expert, programs, left.device)
    grid = _grid(config, (experts + spans.places) * per_expert, target)
    if config.hopper and left.shape[0] and right.shape[0]:
        kernel, args = _hopper().weight_gradient(left, right, dw, add, p, gather, spans, config)
        launch(kernel, grid, *args)
    else:
        l_tma, r_tma = (
            config.tma and not gathers and t.shape[0] > 0
            for t, gathers in zip((left, right), gather, strict=True)
        )
        operands = (
            descriptor(left, [config.block_k, config.block_m]) if l_tma else left,
            p.row_token if gather[0] else None,
            descriptor(right, [config.block_k, config.block_n]) if r_tma else right,
            p.row_token if gather[1] else None,
        )
        args = (dw, spans.partial, p.expert_start, p.tiles, experts, spans.rows, spans.places)
        options = {"L_TMA": l_tma, "R_TMA": r_tma, "PRECISION": dot_precision(left), "ADD": add}
        options |= _tile_options(config)
        launch(wgrad_kernel, grid, *operands, *args, M=m, N=n, **options)
    if spans.places:
        args = (spans.partial, dw, p.expert_start, p.tiles, experts, spans.rows, spans.places)
        launch(sum_spans(m * n, add), (target.processors,), *args)


def bias_gradient(rows, scores, p: Permutation, gathered, dtype):
    experts, n = p.expert_start.shape[0] - 1, rows.shape[1]
    out = memory.empty((experts, n), dtype, rows.device)
    row_token, row_slot = (p.row_token, p.row_slot) if gathered else (None, None)
    grid = (experts, ceil_div(n, 64))
    args = (rows, row_token, scores, row_slot, out, p.expert_start)
    launch(bias_gradient_kernel, grid, *args, N=n, BLOCK_M=64, BLOCK_N=64, num_warps=4)
    return out


def scaled_transpose(t, scale, dtype):
    rows, columns = t.shape
    out = memory.empty((columns, rows), dtype, t.device)
    if t.numel():
        grid, sizes = (ceil_div(rows, 64), ceil_div(columns, 64)), {"BLOCK_P": 64, "BLOCK_Q": 64}
        launch(transpose_kernel, grid, t, out, scale, rows, columns, **sizes, num_warps=4)
    return out
