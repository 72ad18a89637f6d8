"""FP8 layers and the GEMMs they are made of: this package, PyTorch and torchao, on the same inputs.

A layer of torchao is its grouped GEMM inside the usual parts: router, sort, gather, compiled
SwiGLU, `index_add`. torchao quantizes weights and activations in every call. Bare GEMMs have their
operands quantized beforehand.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sonicmoe import MoE, graphed, ops
from sonicmoe.reference.fp8 import power_of_two_scale, to_e4m3
from sonicmoe.shapes import ceil_div
from sonicmoe.tools.candidates import OURS, Candidate, leaves_of
from sonicmoe.tools.inputs import Inputs

from . import dense
from .capture import captured
from .peers import routed
from .timing import is_cuda

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
OURS_FP8, OURS_FP8_Z, WEIGHTS = "sonicmoe_fp8", "sonicmoe_fp8_z", "weights"
OURS_GRAPHED, OURS_FP8_GRAPHED = "sonicmoe_graphed", "sonicmoe_fp8_graphed"
OURS_STEP, OURS_FP8_STEP = "sonicmoe_step", "sonicmoe_fp8_step"
OF_BF16 = (OURS, OURS_GRAPHED, OURS_STEP)
MINE = (*OF_BF16, OURS_FP8, OURS_FP8_GRAPHED, OURS_FP8_STEP, OURS_FP8_Z)
Call = Callable[[], object]
# (rows, weights (E, N, K), ends of the groups) → rows
GroupedGemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# --- this package ---------------------------------------------------------------------------------
def bf16_layer(inputs: Inputs) -> Candidate:
    return _moe(OURS, inputs)


def bf16_layer_graphed(inputs: Inputs) -> Candidate:
    return _moe(OURS_GRAPHED, inputs, is_graphed=True)


def bf16_step(inputs: Inputs) -> Candidate:
    return _one_graph(_moe(OURS_STEP, inputs))


# Weights are quantized in the first call and cached while they do not change.
_FP8: dict[str, Any] = {"precision": "fp8", "cache_fp8_weights": True}


def fp8_layer(inputs: Inputs) -> Candidate:
    return _moe(OURS_FP8, inputs, **_FP8)


def fp8_layer_graphed(inputs: Inputs) -> Candidate:
    return _moe(OURS_FP8_GRAPHED, inputs, is_graphed=True, **_FP8)


def fp8_step(inputs: Inputs) -> Candidate:
    return _one_graph(_moe(OURS_FP8_STEP, inputs, **_FP8))


def fp8_layer_with_fp8_z(inputs: Inputs) -> Candidate:
    return _moe(OURS_FP8_Z, inputs, **_FP8, memory="e4m3")


def _moe(name: str, inputs: Inputs, is_graphed: bool = False, **options: Any) -> Candidate:
    p = inputs.case.problem
    options |= {"aux_loss_coef": 0.0, "device": inputs.x.device, "dtype": inputs.x.dtype}
    moe = MoE(p.E, p.K, p.H, p.I, **options)
    leaves = {"x": inputs.x}
    for leaf, module in (("w1", moe.c_fc), ("w2", moe.c_proj), ("router_w", moe.router)):
        module.weight = torch.nn.Parameter(getattr(inputs, leaf).detach())
        leaves[leaf] = module.weight
    layer: torch.nn.Module = moe
    if is_graphed:
        moe(inputs.x)  # quantizes
        layer = graphed(moe, inputs.x, other="error")
    return Candidate(name, True, lambda: layer(inputs.x)[0], leaves, inputs.dout)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OneGraph(Candidate):
    """Its `forward` replays both passes, for its own upstream gradient alone."""

    found: dict[str, torch.Tensor] = field(repr=False)
    eager: Candidate = field(repr=False)  # holds the quantized weights, which the graph reads

    def gradients(
        self, out: torch.Tensor, dout: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        if dout is not None and dout is not self.dout:
            raise RuntimeError("the graph has another upstream gradient")
        return self.found


def _one_graph(eager: Candidate) -> Candidate:
    """Both passes in one graph, which copies nothing, as in the graph of a whole training step."""
    eager.forward()  # quantizes

    def step() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        out = eager.forward()
        return out.detach(), eager.gradients(out)

    graph, (out, found) = captured(step)

    def forward() -> torch.Tensor:
        graph.replay()
        return out

    return _OneGraph(eager.name, True, forward, eager.leaves, eager.dout, found=found, eager=eager)


def quantize_weights(inputs: Inputs) -> Call:
    """What the FP8 layer does once per optimizer step."""
    operators: Any = ops
    backend = "triton" if is_cuda(inputs.x.device) else "torch"
    quantize, weights = operators.quantize_weight, (inputs.w1.detach(), inputs.w2.detach())
    return lambda: [quantize(w, True, w is weights[1], backend) for w in weights]


# --- bare GEMMs -----------------------------------------------------------------------------------
def dense_bf16(inputs: Inputs) -> Call:
    return dense.dense(inputs.case.problem, inputs.x.device, inputs.x.dtype)[1]


def dense_fp8(inputs: Inputs) -> Call:
    """`torch._scaled_mm` row-wise with the FLOPs, the results and the depth of the six GEMMs.

    It knows no batches. So the rows of all experts meet one weight, and a weight gradient is one
    GEMM with T·K/E terms in a sum, whose result is as large as that of all experts.
    """
    p, device = inputs.case.problem, inputs.x.device

    def gemm(m: int, n: int, k: int) -> Call:
        a, b = _random(device, m, k), _random(device, n, k)
        scales = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
        return lambda: torch._scaled_mm(a, b.t(), *scales, out_dtype=BF16, use_fast_accum=True)

    rows = p.R // p.E
    return _all(
        gemm(p.R, p.N, p.H), gemm(p.R, p.H, p.I), gemm(p.R, p.I, p.H), gemm(p.R, p.H, p.N),
        gemm(p.E * p.H, p.I, rows), gemm(p.E * p.N, p.H, rows),
    )  # fmt: skip


def grouped_fp8(inputs: Inputs) -> Call:
    """`torch._scaled_grouped_mm` row-wise, with equal experts."""
    p, device = inputs.case.problem, inputs.x.device
    rows = p.R // p.E * p.E
    ends = torch.arange(1, p.E + 1, device=device, dtype=torch.int32) * (rows // p.E)

    def scaled(a: torch.Tensor, b: torch.Tensor, a_scales: int, *b_scales: int) -> Call:
        scales = torch.ones(a_scales, device=device), torch.ones(b_scales, device=device)
        return lambda: torch._scaled_grouped_mm(
            a, b.mT, *scales, offs=ends, out_dtype=BF16, use_fast_accum=True
        )

    def of_rows(n: int, k: int) -> Call:
        return scaled(_random(device, rows, k), _random(device, p.E, n, k), rows, p.E, n)

    def of_weights(m: int, n: int) -> Call:
        return scaled(_random(device, m, rows), _random(device, n, rows), p.E * m, p.E * n)

    return _all(
        of_rows(p.N, p.H), of_rows(p.H, p.I), of_rows(p.I, p.H), of_rows(p.H, p.N),
        of_weights(p.H, p.I), of_weights(p.N, p.H),
    )  # fmt: skip


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    """As after quantization: normally distributed, some values near the largest, 448."""
    return torch.randn(shape, device=device, dtype=BF16).mul_(100).clamp_(-448, 448).to(E4M3)


def _all(*calls: Call) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


# --- layers of torchao ----------------------------------------------------------------------------
def torchao_rowwise(inputs: Inputs) -> Candidate:
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as gemm

    _shorten_autotuning()
    # Its own padding is refused by an assertion in 0.18.0.
    given = {"pad_token_groups_for_grouped_mm": False}
    return padded_layer("torchao_rowwise", inputs, lambda a, w, e: gemm(a, w.mT, e, **given), 16)


def torchao_blockwise(inputs: Inputs) -> Candidate:
    from torchao.prototype.blockwise_fp8_training import deepgemm_grouped_kernels as deepgemm
    from torchao.prototype.moe_training.blockwise_fp8 import grouped_mm

    deepgemm._require_deep_gemm()  # says why DeepGEMM cannot be imported
    if not deepgemm.can_use_deepgemm_grouped_training(inputs.x, BF16, 128):
        raise RuntimeError("torchao would emulate the GEMMs: DeepGEMM needs a Hopper GPU")
    rows = sum(ceil_div(count, 128) * 128 for count in inputs.counts(router=True))
    if rows * inputs.case.problem.H >= 2**31:  # an illegal access would end every candidate
        raise RuntimeError("torchao's quantizers have 32-bit offsets, and rows · H is 2³¹ or more")
    _shorten_autotuning()
    _leave_out_equal_configurations()
    gemm = grouped_mm._to_fp8_blockwise_then_scaled_grouped_mm
    # Its own padding is written for Blackwell; on Hopper it copies one expert after the other.
    given = {"pad_token_groups_for_grouped_mm": False}
    return padded_layer("torchao_blockwise", inputs, lambda a, w, e: gemm(a, w.mT, e, **given), 128)


def _shorten_autotuning() -> None:
    """Time a configuration for 25 ms instead of 125: torchao tries some 400 in all."""
    from triton.runtime import driver
    from triton.testing import do_bench

    driver.active.get_benchmarker = lambda: partial(do_bench, warmup=5, rep=20)


def _leave_out_equal_configurations() -> None:
    """Autotune 15 of 45: the quantizers of activations have no loop for `num_stages` to change."""
    from torchao.prototype.blockwise_fp8_training import deepgemm_quant, kernels

    for name, kernel in (vars(kernels) | vars(deepgemm_quant)).items():
        if "act_quant" in name and hasattr(kernel, "configs"):
            several = {(str(c.kwargs), c.num_warps): c for c in kernel.configs}
            kernel.configs = list(several.values())


def padded_layer(name: str, inputs: Inputs, gemm: GroupedGemm, multiple: int) -> Candidate:
    """The layer around a differentiable grouped GEMM whose groups must be multiples of rows.

    The gather itself pads, after the router has chosen. The score multiplies A rather than Y,
    which has fewer columns at most shapes.
    """
    i, p = inputs, inputs.case.problem
    activation = _weighted_swiglu
    if is_cuda(i.x.device):
        activation = torch.compile(_weighted_swiglu, dynamic=False)

    def forward() -> torch.Tensor:
        scores, ids = routed(i)
        token, row_scores, ends = padded_rows(ids, scores, p.E, multiple)
        z = gemm(i.x.index_select(0, token), i.w1, ends)
        y = gemm(activation(z, row_scores), i.w2, ends)
        return torch.zeros_like(i.x).index_add(0, token, y)

    leaves = leaves_of(inputs, router=True)
    return Candidate(name, True, forward, leaves, i.dout, gate_up="concatenated")


def _weighted_swiglu(z: torch.Tensor, row_scores: torch.Tensor) -> torch.Tensor:
    gate, up = z.float().chunk(2, -1)
    return (F.silu(gate) * up * row_scores.unsqueeze(-1)).to(z.dtype)


def padded_rows(
    ids: torch.Tensor, scores: torch.Tensor, experts: int, multiple: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token and score of each row, sorted by expert, and the ends of the padded groups.

    A padding row has some token, each another one, and the score zero, so all it adds is zero.
    """
    tokens, k = ids.shape
    expert, order = ids.flatten().int().sort()
    every = torch.arange(experts, device=ids.device, dtype=torch.int32)
    start = torch.searchsorted(expert, every)
    end = torch.searchsorted(expert, every, right=True)
    ends = ((end - start + multiple - 1) // multiple * multiple).cumsum(0)
    padding_before = F.pad(ends - end, (1, 0))[:-1]
    row = torch.arange(tokens * k, device=ids.device) + padding_before[expert]
    rows = int(ends[-1])  # waits for the GPU; the block-wise GEMM reads all sizes anyway
    token = torch.arange(rows, device=ids.device) % tokens
    token[row] = order // k
    chosen = scores.flatten().index_select(0, order)
    return token, scores.new_zeros(rows).index_copy(0, row, chosen), ends.int()


# --- plain PyTorch, to verify against -------------------------------------------------------------
class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return rounded(x, 1) @ rounded(w, 1).mT

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return rounded(dy, 1) @ rounded(w, 0), rounded(dy, 0).mT @ rounded(x, 0)


def fp8_linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x wᵀ whose three GEMMs have e4m3 operands, with one scale for each sum over products."""
    assert bias is None
    return _Fp8Linear.apply(x, w)


def rounded(t: torch.Tensor, dim: int) -> torch.Tensor:
    """To e4m3 and back, one scale along `dim`; exact in bf16, since scales are powers of two."""
    if t.numel() == 0:
        return t
    scale = power_of_two_scale(t.abs().amax(dim, keepdim=True))
    return (to_e4m3(t.float() / scale).float() * scale).to(t.dtype)


CANDIDATES: dict[str, Callable[[Inputs], Candidate | Call]] = {
    OURS: bf16_layer,
    OURS_GRAPHED: bf16_layer_graphed,
    OURS_STEP: bf16_step,
    OURS_FP8: fp8_layer,
    OURS_FP8_GRAPHED: fp8_layer_graphed,
    OURS_FP8_STEP: fp8_step,
    OURS_FP8_Z: fp8_layer_with_fp8_z,
    WEIGHTS: quantize_weights,
    dense.DENSE: dense_bf16,
    "dense_fp8": dense_fp8,
    "grouped_fp8": grouped_fp8,
    "torchao_rowwise": torchao_rowwise,
    "torchao_blockwise": torchao_blockwise,
}
