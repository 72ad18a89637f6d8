"""Cost of one layer call: FLOPs, bytes kept, peak, traffic, padding, roofline time on a GPU.

Pure Python; the formulas are nowhere else. Sizes come as a `Problem`; `itemsize` is
the bytes of one activation or weight element (2 for bf16). Indices are int32, scores fp32 or wider.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..capability import check_fp8_experts, check_z_in_e4m3
from ..errors import bad_argument
from ..layer.memory import KEEP, MemoryPolicy
from ..shapes import BLOCK, Problem, ceil_div, max_tiles, padded_rows, slice_width

__all__ = ["Gpu", "Problem", "find_gpu", "kept_bytes"]

INDEX = 4  # bytes of an index
SCALE = 4  # bytes of a scale of Z in e4m3
FP8_DZ_COLUMNS = 256  # of A in a tile of the dZ GEMM in FP8
ROUTERS_THAT_KEEP_LOGITS = ("topk_over_softmax",)


# --- FLOPs ----------------------------------------------------------------------------------------
def forward_flops(p: Problem) -> int:
    """6·R·H·I gated, 4·R·H·I plain: the GEMMs up and down."""
    return 2 * p.R * p.H * (p.N + p.I)


def backward_flops(p: Problem) -> int:
    """Two GEMMs of the same size for each one of the forward pass."""
    return 2 * forward_flops(p)


# --- memory ---------------------------------------------------------------------------------------
def caller_bytes(p: Problem, itemsize: int = 2) -> int:
    """X, which the backward pass reads and the caller keeps alive anyway."""
    return p.T * p.H * itemsize


# Bytes of a weight with its scales: MXFP4 and INT4 have one for 32 weights, NF4 for 64, FP8 for
# 128×128. A nested absmax of NF4 takes a byte, and four bytes for 256 of them.
PACKED_BYTES = {
    "MXFP4": 1 / 2 + 1 / 32,
    "NF4": 1 / 2 + 4 / 64,
    "NF4, nested": 1 / 2 + (1 + 4 / 256) / 64,
    "INT4": 1 / 2 + 2 / 32,
    "FP8": 1 + 4 / 128**2,
}


def weight_bytes(p: Problem, itemsize: int = 2) -> dict[str, int]:
    """Bytes of W1 and W2 as they are, and in each packed format."""
    weights = p.E * p.H * (p.N + p.I)
    packed = {name: round(weights * size) for name, size in PACKED_BYTES.items()}
    return {"dense": weights * itemsize} | packed


def kept_bytes(
    p: Problem,
    itemsize: int = 2,
    tile_m: int = 128,
    router: str | None = "softmax_over_topk",
    memory: MemoryPolicy = KEEP,
    precision: str | None = None,
) -> dict[str, int]:
    """Bytes kept from forward to backward in addition to X, tensor by tensor.

    `router` None: the caller chose the experts and keeps the ids. In bf16 nothing here grows
    with H, so at fixed K·I the sum does not depend on how fine the experts are; in FP8 transposed
    weights are kept too, unless Z is recomputed.
    """
    score = max(4, itemsize)
    kept = _kept_z(p, itemsize, memory, precision) | {
        "scores": p.R * score,
        "ids": p.R * INDEX,
        "row_token": p.R * INDEX,
        "row_slot": p.R * INDEX,
        "slot_row": p.R * INDEX,
        "expert_start": (p.E + 1) * INDEX,
        "tiles": 4 * (1 + max_tiles(p.R, p.E, tile_m)) * INDEX,
    }
    if router is None:
        del kept["ids"]
    if router in ROUTERS_THAT_KEEP_LOGITS:
        kept["logits"] = p.T * p.E * itemsize
    if router == "sigmoid":
        kept["sigmoids"] = p.R * score
    return kept


def _kept_z(
    p: Problem, itemsize: int, memory: MemoryPolicy, precision: str | None = None
) -> dict[str, int]:
    """Z, its scales, and in FP8 the weights, norms and other scales that are kept with them."""
    columns, weights = p.E * p.I * SCALE, {}
    if precision is not None:
        weights = {"w_scales": 2 * p.E * SCALE, "w2_norm": columns}
        if memory.keeps_transposes:
            weights |= {"w1_t": p.E * p.N * p.H, "w2_t": p.E * p.H * p.I}
    if memory.recompute:
        return weights
    kept = {"z": p.R * p.N * (1 if memory.in_e4m3 else itemsize)} | weights
    if precision is not None:
        blocks = p.R * ceil_div(p.I, BLOCK) * SCALE
        kept |= {"zmax": blocks, "zmax_columns": columns, "a_scale": blocks}
        kept |= {"x_scale": p.T * SCALE}
    elif memory.in_e4m3:
        kept["z_scale"] = p.R * ceil_div(p.N, BLOCK) * SCALE
    return kept


@dataclass(frozen=True, slots=True)
class Peak:
    """Most bytes alive at once beside X, the weights and dO, which exist before the call."""

    forward: int
    backward: int


def peak_bytes(
    p: Problem,
    itemsize: int = 2,
    tile_m: int = 128,
    router: str | None = "softmax_over_topk",
    memory: MemoryPolicy = KEEP,
    precision: str | None = None,
) -> Peak:
    """Peak by the lifetimes of the tensors, with every gather fused into its GEMM.

    Forward: what is kept, A, Y and the output. Backward, in two steps, the output still held: dZ,
    A' and dW2 while Z is alive, kept or recomputed; then, without Z, A' and the map from rows to
    slots, dX with the larger of dX̃ and dW1. Of Y and dX̃ one slice is alive. The allocator
    of an H200 agreed at five shapes (2026-11-15).
    """
    if precision is not None:
        return _fp8_peak_bytes(p, tile_m, router, memory, precision)
    kept = kept_bytes(p, itemsize, tile_m, router, memory)
    total = sum(kept.values())
    logits = 0 if router is None or "logits" in kept else p.T * p.E * itemsize
    rows_h = p.R * slice_width(p.H, memory.slices) * itemsize
    rows_i, tokens_h = p.R * p.I * itemsize, p.T * p.H * itemsize
    dz, dw1, dw2 = p.R * p.N * itemsize, p.E * p.N * p.H * itemsize, p.E * p.H * p.I * itemsize
    gradients = dz + kept["scores"] + dw2
    recomputed = dz if memory.recompute else 0
    later = total - sum(_kept_z(p, itemsize, memory).values()) - kept["row_slot"]
    first, second = total + recomputed + rows_i, later + tokens_h + max(rows_h, dw1)
    return Peak(
        forward=total + logits + rows_i + rows_h + tokens_h,
        backward=tokens_h + gradients + max(first, second),
    )


def _fp8_peak_bytes(
    p: Problem, tile_m: int, router: str | None, memory: MemoryPolicy, precision: str
) -> Peak:
    """`peak_bytes` in FP8, with weights in bf16 that are not cached.

    Forward: the weights in e4m3 as well. Backward: dO in e4m3, the factors of dZ, dZ in both orders
    and A'; then dW2; then dX with dX̃, then dW1 with X in e4m3. Recomputing Z takes less than dZ.
    """
    kept = kept_bytes(p, 2, tile_m, router, memory, precision)
    total, of_z = sum(kept.values()), sum(_kept_z(p, 2, memory, precision).values())
    logits = 0 if router is None or "logits" in kept else p.T * p.E * 2
    rows_h, tokens_h = 2 * p.R * slice_width(p.H, memory.slices), 2 * p.T * p.H
    w1, w2 = p.E * p.N * p.H, p.E * p.H * p.I
    columns = padded_rows(p.R, p.E)  # of dZᵀ and A'ᵀ
    bf16_dw = precision == "fp8_bf16_dw"
    dz = p.R * p.N + p.R * SCALE + (0 if bf16_dw else (columns + p.E * SCALE) * p.N)
    partial = ceil_div(p.I, FP8_DZ_COLUMNS) * p.R * SCALE  # sums of dS
    a_t = 0 if bf16_dw else columns * p.I
    factors = 5 * p.R * SCALE + (0 if bf16_dw else 2 * p.E * p.I * SCALE)  # and a_t_scale
    x8 = p.T * (p.H + SCALE)
    a8 = p.R * p.I + (0 if "a_scale" in kept else p.R * ceil_div(p.I, BLOCK) * SCALE)
    gradients = dz + kept["scores"]
    recomputed = w1_t = w2_t = 0
    if memory.recompute:
        again = _kept_z(p, 2, KEEP, precision)
        names = ("z", "zmax", "zmax_columns", "a_scale", "x_scale")
        recomputed = sum(again[name] for name in names)
    if not memory.keeps_transposes:
        w1_t, w2_t = w1, w2
    do8 = x8 + p.T * SCALE  # with norms
    of_dz = w2_t + do8 + factors + a_t + partial
    of_dw2 = 2 * w2 + (2 * p.R * p.I if bf16_dw else p.T * p.H + a_t + p.E * p.I * SCALE)
    of_down = total + recomputed + gradients + max(of_dz, of_dw2)
    later = total - of_z + kept.get("w1_t", 0) - kept["row_slot"] + tokens_h + gradients + 2 * w2
    # W1 that was quantized again is freed before dX is allocated, unless dX comes in slices.
    if w1_t and memory.slices == 1:
        w1_t = max(0, w1_t + p.E * SCALE - tokens_h)
    of_up = later + max(rows_h + w1_t, 2 * w1 + (2 * p.R * p.N if bf16_dw else x8))
    return Peak(
        forward=total + logits + w1 + w2 + a8 + rows_h + tokens_h,
        backward=tokens_h + max(of_down, of_up),
    )


def padding_share(counts: Sequence[int], tile_m: int) -> float:
    """Share of the rows in tiles that belong to no token, for the rows of each expert."""
    padded = sum(ceil_div(count, tile_m) * tile_m for count in counts)
    return 1 - sum(counts) / padded if padded else 0.0


# --- stages ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the layer: its FLOPs, and its bytes with every operand read or written once.

    `fp8`: a GEMM on e4m3 operands.
    """

    name: str
    flops: int
    read: int
    written: int
    fp8: bool = False

    @property
    def traffic(self) -> int:
        return self.read + self.written


def forward_stages(
    p: Problem,
    itemsize: int = 2,
    router: bool = True,
    memory: MemoryPolicy = KEEP,
    precision: str | None = None,
) -> list[Stage]:
    """In FP8 without scales, and without the quantization of X and the weights."""
    s, kept = _sizes(p, itemsize), _kept_z(p, itemsize, memory)
    fp8 = precision is not None
    z = kept.get("z", 0) if fp8 else sum(kept.values())
    q = _sizes(p, 1) if fp8 else s  # operands of the experts' GEMMs
    slices = ceil_div(p.H, slice_width(p.H, memory.slices))
    routing = [
        Stage("router", 2 * p.T * p.H * p.E, s["x"] + s["router_w"], s["logits"]),
        Stage("top-k", 0, s["logits"], s["scores"] + s["index"]),
    ]
    stages = [
        Stage("permutation", 0, s["index"], 3 * s["index"]),
        Stage("up", 2 * p.R * p.H * p.N, q["x"] + q["w1"], z + q["a"], fp8),
        Stage("down", 2 * p.R * p.H * p.I, slices * q["a"] + q["w2"], s["y"], fp8),
        Stage("combine", 0, s["y"] + slices * (s["scores"] + s["index"]), s["x"]),
    ]
    return routing + stages if router else stages


def backward_stages(
    p: Problem,
    itemsize: int = 2,
    router: bool = True,
    memory: MemoryPolicy = KEEP,
    precision: str | None = None,
) -> list[Stage]:
    """As `forward_stages`, in FP8 also without the quantization of dO."""
    s, kept = _sizes(p, itemsize), _kept_z(p, itemsize, memory)
    fp8, fp8_dw = precision is not None, precision == "fp8"
    z = kept.get("z", 0) if fp8 else sum(kept.values())
    q, dw = (_sizes(p, 1) if e4m3 else s for e4m3 in (fp8, fp8_dw))  # operands, those of dW
    dz = q["z"] + (q["z"] if fp8_dw else 0)  # e4m3 transposed, too
    slices = ceil_div(p.H, slice_width(p.H, memory.slices))
    small, large = 2 * p.R * p.H * p.I, 2 * p.R * p.H * p.N
    stages = []
    if memory.recompute:
        z = s["z"]
        stages = [Stage("up again", large, q["x"] + q["w1"], s["z"] + q["a"], fp8)]
    stages += [
        Stage("dZ", small, q["x"] + q["w2"] + z + s["scores"], dz + dw["a"] + s["scores"], fp8),
        Stage("dW2", small, dw["x"] + dw["a"], s["w2"], fp8_dw),
        Stage("dX rows", large, slices * q["z"] + q["w1"], s["y"], fp8),
        Stage("dW1", large, dw["z"] + dw["x"], s["w1"], fp8_dw),
        Stage("dX combine", 0, s["y"] + slices * s["index"], s["x"]),
    ]
    flops = 2 * p.T * p.H * p.E
    routing = [
        Stage("top-k backward", 0, 2 * s["scores"] + s["index"], s["logits"]),
        Stage("router dX", flops, s["logits"] + s["router_w"] + s["x"], s["x"]),
        Stage("router dW", flops, s["logits"] + s["x"], s["router_w"]),
    ]
    return stages + routing if router else stages


def _sizes(p: Problem, itemsize: int) -> dict[str, int]:
    elements = {
        "x": p.T * p.H,
        "router_w": p.E * p.H,
        "logits": p.T * p.E,
        "w1": p.E * p.N * p.H,
        "w2": p.E * p.H * p.I,
        "z": p.R * p.N,
        "a": p.R * p.I,
        "y": p.R * p.H,
    }
    sizes = {name: count * itemsize for name, count in elements.items()}
    return sizes | {"scores": p.R * max(4, itemsize), "index": p.R * INDEX}


# --- roofline -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Power:
    """Power limit of a board (W), and energy (J) per FLOP and byte at two bytes per element."""

    watts: float
    flop: float
    byte_read: float
    byte_written: float

    def joules(self, stage: Stage) -> float:
        moved = stage.read * self.byte_read + stage.written * self.byte_written
        return stage.flops * self.flop + moved


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data sheet of one GPU; `arch`: its compute capability × 10.

    `half`, `single` and `fp8`: dense FLOP/s at two and four bytes per element and in e4m3 (0:
    no e4m3). `bandwidth` (bytes/s) and `memory` (bytes) of the device.
    """

    name: str
    half: float
    single: float
    bandwidth: float
    source: str
    power: Power | None = None
    memory: float = 0
    fp8: float = 0
    arch: int = 0

    def check(self, memory: MemoryPolicy, precision: str | None) -> None:
        """Raise a ValueError if a layer with these options cannot run on this GPU."""
        if precision is not None:
            check_fp8_experts(self.arch)
        if memory.in_e4m3:
            check_z_in_e4m3(self.arch)

    def limits(self, stage: Stage, itemsize: int = 2) -> dict[str, float]:
        """Roofline time of a stage in seconds, by each limit of the GPU."""
        peak = self.half if itemsize <= 2 else self.single
        if stage.fp8:
            if not self.fp8:
                having = ", ".join(name for name, gpu in GPUS.items() if gpu.fp8)
                remedy = "Choose one of them, or omit precision."
                raise bad_argument("gpu", f"one with FP8 ({having})", self.name, remedy)
            peak = self.fp8
        found = {"compute": stage.flops / peak, "memory": stage.traffic / self.bandwidth}
        if self.power is not None and itemsize == 2 and not stage.fp8:
            found["power"] = self.power.joules(stage) / self.power.watts
        return found

    def seconds(self, stage: Stage, itemsize: int = 2) -> float:
        """Roofline time of a stage in seconds: that of the tightest limit."""
        return max(self.limits(stage, itemsize).values())

    def bound(self, stage: Stage, itemsize: int = 2) -> str:
        limits = self.limits(stage, itemsize)
        return max(limits, key=lambda name: limits[name])


# Dense rates without sparsity, per GPU. From NVIDIA's data sheets: A100 80 GB SXM (312, 19.5,
# 2.039), H100 SXM (989, 67, 3.35), H200 SXM (989, 67, 4.8), GB200 (2500, 80, 8); the Blackwell
# architecture brief for an HGX B200 at 1000 W (2250, 80, up to 8; by its bus and clock a B200
# reaches 7.67, pytorch/ao#4002).
# FP8: H100 and H200 1979, B200 4500, GB200 5000.
# h200-measured: the fastest GEMMs and a copy of 1 GiB on one H200, and the energy of 54 dense bf16
# GEMMs, which the three coefficients reproduce within 5.5%, 1.5% on average. FP8: row-wise cuBLAS,
# 1270 to 1290 at 685 W, so the rate includes the power limit.
GPUS = {
    "a100": Gpu(
        "A100", 312e12, 19.5e12, 2.039e12, "data sheet, SXM 80 GB",
        memory=80e9, arch=80,
    ),
    "h100": Gpu(
        "H100", 989e12, 67e12, 3.35e12, "data sheet, SXM",
        memory=80e9, fp8=1979e12, arch=90,
    ),
    "h200": Gpu(
        "H200", 989e12, 67e12, 4.8e12, "data sheet",
        memory=141e9, fp8=1979e12, arch=90,
    ),
    "h200-measured": Gpu(
        "H200", 790e12, 67e12, 4.3e12, "measured: GEMMs, device copy, energy; 700 W",
        Power(700, flop=0.955e-12, byte_read=42e-12, byte_written=135e-12),
        memory=141e9, fp8=1290e12, arch=90,
    ),
    "b200": Gpu(
        "B200", 2250e12, 80e12, 8.0e12, "architecture brief",
        memory=180e9, fp8=4500e12, arch=100,
    ),
    "gb200": Gpu(
        "GB200", 2500e12, 80e12, 8.0e12, "data sheet",
        memory=186e9, fp8=5000e12, arch=100,
    ),
}  # fmt: skip


def find_gpu(name: str) -> Gpu:
    """The entry of `GPUS` for its key in any case, or for the name that the driver reports."""
    words = [name.lower(), *re.split(r"[^a-z0-9]+", name.lower())]
    for word in words:
        if word in GPUS:
            return GPUS[word]
    remedy = "Any other card: its dense TFLOP/s and GB/s, for example --gpu 165,1008."
    raise bad_argument("gpu", f"one of {', '.join(GPUS)}", repr(name), remedy)


def gpu_of_numbers(text: str) -> Gpu | None:
    """A card by its dense TFLOP/s, at the dtype in question, and GB/s; None for a name."""
    rate, comma, bandwidth = text.partition(",")
    try:
        flops, moved = float(rate) * 1e12, float(bandwidth) * 1e9
    except ValueError:
        if comma:
            raise bad_argument("gpu", "TFLOP/s,GB/s", repr(text), "Write --gpu 165,1008.") from None
        return None
    if not all(0 < n < math.inf for n in (flops, moved)):
        raise bad_argument("gpu", "two numbers above 0", repr(text), "Write --gpu 165,1008.")
    return Gpu("card", flops, flops, moved, f"{rate} TFLOP/s, {bandwidth} GB/s, as given")
