"""Compile ahead of the first step what a layer of given sizes needs."""

import sys
import time
from collections.abc import Callable

import torch

from . import ops
from .enums import ActivationType
from .errors import bad_argument
from .functional import permute
from .tuning import tile_height
from .validation import check_activation, check_gate_up, check_k

_TOKENS = 64  # nothing that is compiled depends on the number of tokens


def warmup(
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    num_experts_per_tok: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    activation: ActivationType = ActivationType.SWIGLU,
    gate_up: str = "interleaved",
    add_bias: bool = False,
    softmax_over_topk: bool = True,
    device: str | torch.device = "cuda",
    progress: bool = True,
) -> float:
    """Compile the kernels of a forward and a backward pass; returns the seconds it took.

    Needs the memory of at most 16 experts. Weights are taken as (E, N, K) in memory.
    """
    check_activation(activation)
    check_gate_up(gate_up)
    check_k(num_experts_per_tok, num_experts, "num_experts_per_tok")
    device = torch.device(device)
    if device.type != "cuda":
        raise bad_argument("device", "a GPU", device, "On the CPU there is nothing to compile.")
    begin = time.perf_counter()
    stages = _stages(
        hidden_size, intermediate_size, num_experts, num_experts_per_tok, dtype, activation,
        gate_up == "concatenated", add_bias, softmax_over_topk, device,
    )  # fmt: skip
    for number, (name, run) in enumerate(stages, 1):
        run()
        if progress:
            seconds = time.perf_counter() - begin
            print(
                f"sonicmoe: compiled {name} ({number}/{len(stages)}, {seconds:.1f} s)",
                file=sys.stderr,
            )
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _stages(
    hidden,
    intermediate,
    experts,
    k,
    dtype,
    activation,
    concatenated,
    bias,
    softmax_over_topk,
    device,
) -> list[tuple[str, Callable[[], object]]]:
    def new(*shape, dtype=dtype):
        return torch.zeros(shape, dtype=dtype, device=device)

    columns = 2 * intermediate if activation.is_gated else intermediate
    # Triton tells apart 1, multiples of 16 and the rest: that much of E must stay as it is.
    few = experts if experts < 16 else 16 if experts % 16 == 0 else 15
    height = tile_height(dtype, "triton")
    logits = new(_TOKENS, experts)
    scores, ids = ops.topk(logits, k, softmax_over_topk, "triton")
    p = permute(ids % few, few, dtype=dtype, backend="triton")
    x, w1, w2 = new(_TOKENS, hidden), new(few, columns, hidden), new(few, hidden, intermediate)
    b1, b2 = (new(few, columns), new(few, hidden)) if bias else (None, None)
    z, a, y = new(p.rows, columns), new(p.rows, intermediate), new(p.rows, hidden)
    where = (p.expert_start, p.tiles, height)
    act = (activation.value, concatenated)

    def routing():
        permute(ids, experts, dtype=dtype, backend="triton")
        ops.topk_backward(scores, scores, ids, logits, softmax_over_topk, "triton")

    return [
        ("routing", routing),
        ("up", lambda: ops.up(x, w1, b1, p.row_token, *where, *act, True, "triton")),
        ("up, inference", lambda: ops.up(x, w1, b1, p.row_token, *where, *act, False, "triton")),
        ("down", lambda: ops.down(a, w2, b2, None, *where, False, "triton")),
        ("aggregation", lambda: ops.aggregate(y, scores, p.slot_row, None, _TOKENS, "triton")),
        (
            "backward of down",
            lambda: ops.down_backward(
                x, z, w2, b2, scores, p.row_token, p.row_slot, p.slot_row, *where, *act,
                True, True, bias, True, "triton",
            ),
        ),
        (
            "backward of up",
            lambda: ops.up_backward(
                z, x, w1, p.row_token, p.slot_row, None, *where, True, True, bias, "triton"
            ),
        ),
    ]  # fmt: skip
