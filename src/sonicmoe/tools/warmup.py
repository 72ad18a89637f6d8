"""Precompile the kernels of a layer with given sizes."""

import copy
import sys
import time
from itertools import product

import torch

from ..enums import ActivationType
from ..errors import bad_argument
from ..layer.memory import KEEP, MemoryPolicy, memory_policy
from ..layer.operands import kind_of
from ..layer.precompile import BATCHES, Layer, Slots, compile_together, logits_of, run_experts
from ..routing import Router, auxiliary_loss, make_router
from ..shapes import check_size
from ..validation import (
    check_activation,
    check_gate_up,
    check_k,
    check_num_experts,
)


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
    router: str | Router = "softmax_over_topk",
    main_grad: bool = False,
    weights: torch.dtype | None = None,
    precision: str | None = None,
    memory: str | MemoryPolicy = KEEP,
    device: str | torch.device = "cuda",
    progress: bool = True,
) -> float:
    """Precompile the kernels of training and inference in parallel; returns the seconds it took.

    `router`, `precision` and `memory` as in `MoE`. `main_grad=True` compiles the variant for
    weights with a `main_grad`. `weights` is the dtype of the weights if it is not `dtype`, as under
    autocast; they are assumed to be contiguous. Uses no GPU memory. Raises ValueError without a
    GPU.
    """
    check_size("hidden_size", hidden_size)
    check_size("intermediate_size", intermediate_size)
    check_num_experts(num_experts)
    check_activation(activation)
    check_gate_up(gate_up)
    kind_of(precision)
    check_k(num_experts_per_tok, num_experts, "num_experts_per_tok")
    index = _gpu_index(device)
    sizes = (hidden_size, intermediate_size, num_experts, num_experts_per_tok)
    policy = memory_policy(memory)
    layer = Layer(*sizes, dtype, activation, gate_up, weights=weights, memory=policy)
    layer = layer._replace(bias=(add_bias, add_bias), main_grad=(main_grad, main_grad))
    layer = layer._replace(precision=precision)
    begin = time.perf_counter()
    compile_together(lambda: run_layer(layer, router), index, _say if progress else None)
    return time.perf_counter() - begin


def _gpu_index(device: str | torch.device) -> int:
    """The index of `device`, checked to be a GPU of this machine."""
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise bad_argument("device", "a GPU", repr(device), "Pass 'cuda' or 'cuda:0'.") from None
    if device.type != "cuda":
        raise bad_argument("device", "a GPU", device, "On the CPU there is nothing to compile.")
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= present:
        raise bad_argument(
            "device",
            "a GPU of this machine",
            f"{device}, but PyTorch sees {present} GPUs",
            "Call warmup only if torch.cuda.is_available(); without a GPU nothing is compiled.",
        )
    return torch.cuda.current_device() if device.index is None else device.index


def run_layer(layer: Layer, router: str | Router) -> None:
    """Run training and inference steps on the meta device, where launches only compile."""
    with torch.device("meta"):
        routing = make_router(router, layer.experts, layer.k)
    routing = copy.deepcopy(routing).to("meta")
    for training, tokens in product((True, False), BATCHES):
        with torch.set_grad_enabled(training):
            r = routing.train(training)(logits_of(layer, tokens), backend="triton")
            slots = Slots(r.ids, r.scores, r.slot_token, r.token_start)
            out = run_experts(layer, tokens, slots)
            if training:
                counts = torch.empty(layer.experts, dtype=torch.int32, device="meta")
                loss = auxiliary_loss(r.logits, counts, backend="triton")
                torch.autograd.backward((out, loss), (torch.empty_like(out), loss))


def _say(number: int, of: int, seconds: float) -> None:
    print(f"sonicmoe: compiled {number} of {of} kernels, {seconds:.1f} s", file=sys.stderr)
