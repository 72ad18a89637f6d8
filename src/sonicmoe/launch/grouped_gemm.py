"""Launches of the grouped GEMMs: pick a configuration, allocate, launch."""

from functools import cache
from typing import NamedTuple

import torch

from ..enums import ActivationType
from ..kernels import combine
from ..kernels.activation import derivative_of, value_of
from ..kernels.spans import sum_spans_kernel
from ..kernels.triton.dz import dz_kernel
from ..kernels.triton.gemm import gemm_kernel, up_kernel
from ..kernels.triton.wgrad import bias_gradient_kernel, wgrad_kernel
from ..shapes import ceil_div
from ..tuning import RowConfig, WeightConfig, row_config, weight_config
from . import memory
from .descriptors import descriptor
from .launcher import Bound, dot_precision, launch, power_of_two, target_of

_SLOTS = 1024  # slots per program of `sum_partials_kernel`
SHORTEST_SPAN = 1024  # least rows of a span, see `kernels.spans`


@cache
def _hopper():
    from . import grouped_gemm_hopper

    return grouped_gemm_hopper


def _stored_transposed(w: torch.Tensor) -> bool:
    """Whether (E, N, K) weights lie in memory as (E, K, N)."""
    return w.stride(2) != 1


def _weight_layout(w: torch.Tensor) -> str:
    """WEIGHT_LAYOUT of (E, N, K) weights: "kn" if they lie in memory as (E, K, N)."""
    return "kn" if _stored_transposed(w) else "nk"


def gate_up_of(activation: ActivationType, concatenated: bool) -> str | None:
    """GATE_UP: the order of gate and up columns; None for an activation without a gate."""
    if not activation.is_gated:
        return None
    return "concatenated" if concatenated else "interleaved"


def _weight_source(w: torch.Tensor, config: RowConfig, two_halves: bool = False):
    """(E, N, K) weights as a kernel takes them: a TMA descriptor, or the tensor itself."""
    if not config.tma:
        return w
    stored = w.mT if _stored_transposed(w) else w
    n, k = config.block_n, config.block_k
    if not two_halves:
        return descriptor(stored, [1, k, n] if _stored_transposed(w) else [1, n, k])
    # One box holds the gate and the up half of a tile.
    experts, columns = w.shape[0], w.shape[1] // 2
    if _stored_transposed(w):
        return descriptor(stored.view(experts, w.shape[2], 2, columns), [1, k, 2, n // 2])
    return descriptor(stored.view(experts, 2, columns, w.shape[2]), [1, 2, n // 2, k])


def _row_source(t: torch.Tensor, config: RowConfig, row_token):
    """Rows as a kernel takes them, and whether that is a TMA descriptor: not if gathered."""
    if not config.tma or row_token is not None:
        return t, False
    return descriptor(t, [config.block_m, config.block_k]), True


def _unroll(t: torch.Tensor) -> int:
    """Blocks of K summed before they join the accumulator, see `kernels.triton.tile`."""
    return 2 if t.dtype == torch.float32 else 1


def _options(config: RowConfig | WeightConfig) -> dict:
    return dict(
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def _grid(config: RowConfig | WeightConfig, work: int, target) -> tuple[int]:
    return (max(1, min(work, config.programs * target.processors)),)


class Adapter(NamedTuple):
    """LoRA: U (R, r), contiguous, and B (E, N, r); U Bᵀ is added in a GEMM's accumulator."""

    u: torch.Tensor | None = None
    factor: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return 0 if self.u is None else self.u.shape[1]

    def in_order(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """U and B, both contiguous, as the portable kernels read them."""
        return self.u, None if self.factor is None else self.factor.contiguous()

    @property
    def options(self) -> dict[str, int]:
        """RANK, and BLOCK_R, the columns of U and B that a step multiplies."""
        if self.u is None:
            return {"RANK": 0, "BLOCK_R": 0}
        narrow = self.rank <= 16 and self.u.element_size() == 2
        return {"RANK": self.rank, "BLOCK_R": 16 if narrow else 32}


NO_ADAPTER = Adapter()


def up(
    x, w1, b1, row_token, expert_start, tiles, tile_height, activation, concatenated, keep_z,
    config=None, adapter=NO_ADAPTER,
):  # fmt: skip
    """Z (None unless `keep_z`) and A, for Z = X W1ᵀ + b1 plus the adapter's U Bᵀ."""
    _, n, hidden = w1.shape
    count = (x if row_token is None else row_token).shape[0]
    z = memory.empty((count, n), x.dtype, x.device) if keep_z else None
    a = memory.empty((count, n // 2 if activation.is_gated else n), x.dtype, x.device)
    if count == 0:
        return z, a
    target = target_of(x)
    config = config or row_config("up", x.element_size(), hidden, n, activation.is_gated, target)
    two_halves = activation.is_gated and concatenated
    grid = _grid(config, (tiles.shape[0] - 1) * ceil_div(n, config.block_n), target)
    if config.hopper:
        _hopper().up(
            x, w1, b1, row_token, z, a, tiles, activation, concatenated, keep_z, config, *grid,
            adapter,
        )  # fmt: skip
        return z, a
    source, a_tma = _row_source(x, config, row_token)
    launch(
        up_kernel, grid,
        source, row_token, _weight_source(w1, config, two_halves), b1, *adapter.in_order(),
        z if keep_z else a,  # not stored: any valid address will do
        a, tiles, *w1.stride(),
        H=hidden, N=n, **adapter.options, GATE_UP=gate_up_of(activation, concatenated),
        ACTIVATION=value_of(activation), KEEP_Z=keep_z,
        A_TMA=a_tma, W_TMA=config.tma, WEIGHT_LAYOUT=_weight_layout(w1),
        PRECISION=dot_precision(x), UNROLL=_unroll(x), **_options(config),
    )  # fmt: skip
    return z, a


def _product(kernel, a, w, bias, row_scores, tiles, config=None, adapter=NO_ADAPTER):
    """Y (R, N) = A Wᵀ for (E, N, K) weights, plus the adapter's U Bᵀ."""
    _, n, k = w.shape
    y = memory.empty((a.shape[0], n), a.dtype, a.device)
    if a.shape[0] == 0:
        return y
    target = target_of(a)
    config = config or row_config(kernel, a.element_size(), k, n, True, target)
    grid = _grid(config, (tiles.shape[0] - 1) * ceil_div(n, config.block_n), target)
    if config.hopper:
        _hopper().product(a, w, bias, row_scores, y, tiles, config, *grid, adapter)
        return y
    source, a_tma = _row_source(a, config, None)
    launch(
        gemm_kernel, grid,
        source, _weight_source(w, config), bias, row_scores, *adapter.in_order(), y, tiles,
        *w.stride(),
        K=k, N=n, **adapter.options, A_TMA=a_tma, W_TMA=config.tma,
        WEIGHT_LAYOUT=_weight_layout(w), PRECISION=dot_precision(a), UNROLL=_unroll(a),
        **_options(config),
    )  # fmt: skip
    return y


def down(a, w2, b2, row_scores, expert_start, tiles, tile_height, zero_tail, config=None):
    """Y; its rows past the last expert are zero if `zero_tail`."""
    y = _product("down", a, w2, b2, row_scores, tiles, config)
    return _zero_tail(y, expert_start, tiles) if zero_tail else y


@cache
def _bound_aggregate(hidden: int, per_token: int) -> tuple[int, Bound]:
    """Programs per token, and the kernel."""
    block = min(power_of_two(hidden), 1024)
    return ceil_div(hidden, block), Bound(
        combine.combine_kernel,
        H=hidden, UNROLL=min(power_of_two(max(per_token, 1)), 8), BLOCK_H=block, num_warps=4,
    )  # fmt: skip


def aggregate(y, scores, slot_row, token_start, tokens):
    hidden = y.shape[1]
    out = memory.empty((tokens, hidden), y.dtype, y.device)
    slots = slot_row.shape[0]
    if tokens == 0:
        return out
    per_token = slots // tokens if token_start is None else 0
    programs, kernel = _bound_aggregate(hidden, per_token)
    launch(kernel, (tokens, programs), y, scores, slot_row, token_start, out, per_token, slots)
    return out


def down_backward(
    dout, z, w2, b2, scores, row_token, row_slot, slot_row, expert_start, tiles, tile_height,
    activation, concatenated, need_dz, need_dw2, need_db2, need_dscores, config=None, weights=None,
    main_grad=None, wide=False,
):  # fmt: skip
    """dZ, dW2, db2, dscores; dW2 in fp32 if `wide`, or added to `main_grad` if there is one."""
    dz = a = dscores = dw2 = db2 = None
    if need_dz or need_dw2 or need_dscores:
        dz, a, dscores = _score_gradient(
            dout, z, w2, b2, scores, row_token, row_slot, slot_row, expert_start, tiles,
            tile_height, activation, concatenated, need_dz, need_dw2, need_dscores, config,
        )  # fmt: skip
    if need_dw2:
        dw2 = _weight_gradient(
            dout, row_token, a, None, w2, expert_start, tiles, weights, main_grad, wide
        )
    if need_db2:
        db2 = _bias_gradient(dout, row_token, scores, row_slot, b2, expert_start)
    return dz, dw2, db2, dscores


@cache
def _bound_sum_partials(planes: int) -> Bound:
    return Bound(combine.sum_partials_kernel, PARTS=planes, BLOCK=_SLOTS)


def _score_gradient(
    dout, z, w2, b2, scores, row_token, row_slot, slot_row, expert_start, tiles, tile_height,
    activation, concatenated, need_dz, need_a, need_dscores, config,
    adapter=NO_ADAPTER,
):  # fmt: skip
    """dZ, A' and dscores, None where not needed."""
    count, device = z.shape[0], z.device
    experts, hidden, intermediate = w2.shape
    target = target_of(z)
    config = config or row_config(
        "dz", z.element_size(), hidden, intermediate, activation.is_gated, target
    )
    # The Hopper kernel always stores dZ.
    dz = memory.empty(z.shape, z.dtype, device) if need_dz or config.hopper else None
    a = memory.empty((count, intermediate), z.dtype, device) if need_a else None
    dscores = memory.empty(scores.shape, torch.float32, device) if need_dscores else None
    if count == 0:
        return (dz if need_dz else None), a, dscores
    parts = ceil_div(intermediate, config.block_n)
    slots = scores.numel() if scores is not None else count
    planes = parts + (b2 is not None)
    plane = 4 * ceil_div(slots, 4)  # every plane is aligned to 16 bytes for every T
    partial = memory.empty((planes if need_dscores else 0, plane), torch.float32, device)
    grid = _grid(config, (tiles.shape[0] - 1) * parts, target)
    if config.hopper:
        _hopper().score_gradient(
            dout, row_token, w2, scores, row_slot, z, dz, a, partial, plane, tiles,
            activation, concatenated, need_a, need_dscores, config, *grid, adapter,
        )  # fmt: skip
    else:
        source, a_tma = _row_source(dout, config, row_token)
        w2t = w2.mT  # the GEMM sums over H: (E, I, H) weights
        launch(
            dz_kernel, grid,
            source, row_token, _weight_source(w2t, config), *adapter.in_order(),
            scores, row_slot, z, dz, a, partial, tiles, plane, *w2t.stride(),
            H=hidden, I=intermediate, **adapter.options,
            GATE_UP=gate_up_of(activation, concatenated), BACKWARD=derivative_of(activation),
            STORE_DZ=need_dz, STORE_A=need_a, STORE_PARTIAL=need_dscores, SLICES=config.slices,
            A_TMA=a_tma, W_TMA=config.tma, WEIGHT_LAYOUT=_weight_layout(w2t),
            PRECISION=dot_precision(z), UNROLL=_unroll(z), **_options(config),
        )  # fmt: skip
    if need_dscores:
        if b2 is not None:
            launch(
                combine.bias_score_kernel, (tiles.shape[0] - 1,),
                dout, row_token, row_slot, b2, partial[parts], tiles,
                H=hidden, BLOCK_M=tile_height, BLOCK_H=64, num_warps=8,
            )  # fmt: skip
        launch(
            _bound_sum_partials(planes), (ceil_div(slots, _SLOTS),),
            partial, slot_row, expert_start, dscores, slots, plane, experts,
        )  # fmt: skip
    return (dz if need_dz else None), a, dscores


def up_backward(
    dz, x, w1, row_token, slot_row, token_start, expert_start, tiles, tile_height,
    need_dx, need_dw1, need_db1, config=None, weights=None, main_grad=None, wide=False,
):  # fmt: skip
    """dX, dW1, db1; dW1 in fp32 if `wide`, or added to `main_grad` if there is one."""
    dx = dw1 = db1 = None
    if need_dx:
        dx = _product("dx", dz, w1.mT, None, None, tiles, config)
        if row_token is not None:
            dx = aggregate(dx, None, slot_row, token_start, x.shape[0])
        else:
            dx = _zero_tail(dx, expert_start, tiles)
    if need_dw1:
        dw1 = _weight_gradient(
            dz, None, x, row_token, w1, expert_start, tiles, weights, main_grad, wide
        )
    if need_db1:
        like = memory.empty(w1.shape[:2], w1.dtype, w1.device)
        db1 = _bias_gradient(dz, None, None, None, like, expert_start)
    return dx, dw1, db1


def _zero_tail(y, expert_start, tiles) -> torch.Tensor:
    """Zero the rows of no expert in place; they become NaN if the tile table is invalid."""
    count, n = y.shape
    if count:
        launch(
            combine.zero_tail_kernel, (ceil_div(count, 32),),
            y, expert_start, tiles, count, expert_start.shape[0] - 1,
            N=n, BLOCK_M=32, BLOCK_N=128, num_warps=4,
        )  # fmt: skip
    return y


def _weight_gradient(
    left, left_token, right, right_token, w, expert_start, tiles, config=None, main_grad=None,
    wide=False,
):  # fmt: skip
    """(E, M, N) = Σ over an expert's rows of leftᵀ right, with the strides of `w`.

    In fp32 if `wide`; added to `main_grad`, fp32 with the same strides, if there is one.
    """
    dw = main_grad
    if dw is None:
        dw = memory.empty_like(w, torch.float32 if wide else w.dtype)
    out = dw
    if _stored_transposed(dw):
        # Compute the transpose, so that rows of the store are contiguous.
        left, left_token, right, right_token, out = right, right_token, left, left_token, dw.mT
    experts, m, n = out.shape
    target = target_of(left)
    config = config or weight_config(
        left.element_size(), m, n, left_token is not None, right_token is not None, target
    )
    per_expert = ceil_div(m, config.block_m) * ceil_div(n, config.block_n)
    rows = (left if left_token is None else left_token).shape[0]
    spans = _spans(rows, out.shape, per_expert, config.programs * target.processors, left.device)
    grid = _grid(config, (experts + spans.places) * per_expert, target)
    if config.hopper and left.shape[0] and right.shape[0]:
        _hopper().weight_gradient(
            left, left_token, right, right_token, out, main_grad is not None,
            expert_start, tiles, *spans, config, *grid,
        )  # fmt: skip
    else:
        l_tma = config.tma and left_token is None and left.shape[0] > 0
        r_tma = config.tma and right_token is None and right.shape[0] > 0
        launch(
            wgrad_kernel, grid,
            descriptor(left, [config.block_k, config.block_m]) if l_tma else left, left_token,
            descriptor(right, [config.block_k, config.block_n]) if r_tma else right, right_token,
            out, spans.partial, expert_start, tiles, experts, spans.rows, spans.places,
            M=m, N=n, L_TMA=l_tma, R_TMA=r_tma, PRECISION=dot_precision(left),
            ADD=main_grad is not None, **_options(config),
        )  # fmt: skip
    if spans.places:
        launch(
            _bound_sum_spans(m * n, main_grad is not None), (target.processors,),
            spans.partial, out, expert_start, tiles, experts, spans.rows, spans.places,
        )  # fmt: skip
    return dw


@cache
def _bound_sum_spans(size: int, add: bool) -> Bound:
    return Bound(sum_spans_kernel, SIZE=size, BLOCK=2048, ADD=add, num_warps=4)


class Spans(NamedTuple):
    """How the rows of long experts are split: see `kernels.spans`."""

    partial: torch.Tensor | None = None  # (places, M·N)
    rows: int = 0
    places: int = 0


def _spans(rows: int, shape, tiles: int, programs: int, device) -> Spans:
    """Spans of a quarter of the rows that a program gets with balanced routing; none if one expert
    has tiles for all programs. The partial sums take at most four fp32 tiles per program, 69 MB on
    an H200."""
    if tiles >= programs:
        return Spans()
    experts, m, n = shape
    span = max(SHORTEST_SPAN, 64 * ceil_div(rows * tiles, 4 * 64 * programs))
    work = experts * tiles
    if work >= 0.9 * programs * ceil_div(work, programs):
        # Balanced experts keep all programs busy without spans: split only much longer ones.
        span = max(span, 64 * ceil_div(5 * rows, 8 * 64 * experts))
    places = rows // span
    return Spans(memory.empty((max(places, 1), m * n), torch.float32, device), span, places)


def _bias_gradient(source, row_token, scores, row_slot, bias, expert_start):
    experts, n = bias.shape
    out = memory.empty(bias.shape, bias.dtype, bias.device)
    launch(
        bias_gradient_kernel, (experts, ceil_div(n, 64)),
        source, row_token, scores, row_slot, out, expert_start,
        N=n, BLOCK_M=64, BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    return out
