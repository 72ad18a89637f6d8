"""Precompile the kernels of a layer with given sizes."""

import copy
import sys
import time
from itertools import product
from typing import Any, Unpack

import torch

from ..errors import bad_argument
from ..layer.meta import BATCHES, Example, Slots, meta_forward
from ..layer.options import OptionArguments, Options
from ..layer.precompile import compile_together
from ..layer.weights import ExpertWeights, Projection
from ..routing import Router, auxiliary_loss, make_router
from ..shapes import check_size
from ..tensors import Weight
from ..validation import check_k, check_num_experts


def warmup(
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    num_experts_per_tok: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    add_bias: bool = False,
    router: str | Router = "softmax_over_topk",
    main_grad: bool = False,
    weights: torch.dtype | None = None,
    device: str | torch.device = "cuda",
    progress: bool = True,
    **options: Unpack[OptionArguments],
) -> float:
    """Precompile the kernels of training and inference in parallel; returns the seconds it took.

    `router` as in `MoE`, the options as in `experts`. `main_grad=True` compiles the variant for
    weights with a `main_grad`. `weights` is the dtype of the weights if it is not `dtype`, as under
    autocast; they are assumed to be contiguous. Uses no GPU memory. Raises ValueError without a
    GPU.
    """
    check_size("hidden_size", hidden_size)
    check_size("intermediate_size", intermediate_size)
    check_num_experts(num_experts)
    check_k(num_experts_per_tok, num_experts, "num_experts_per_tok")
    sizes = (hidden_size, intermediate_size, num_experts, num_experts_per_tok)
    layout: Any = {"weights": weights, "bias": add_bias, "main_grad": main_grad}
    example = example_of_sizes(*sizes, dtype, Options.of(options), **layout)
    index = _gpu_index(device)
    begin = time.perf_counter()
    compile_together(lambda: run_layer(example, router), index, _say if progress else None)
    return time.perf_counter() - begin


def example_of_sizes(
    hidden: int,
    intermediate: int,
    experts: int,
    k: int,
    dtype: torch.dtype,
    options: Options,
    *,
    weights: torch.dtype | None = None,
    bias: bool = False,
    main_grad: bool = False,
    transposed: bool = False,
) -> Example:
    """Weights on the meta device, in memory as (E, K, N) if `transposed`."""

    def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def projection(n: int, k: int) -> Projection:
        shape = (experts, k, n) if transposed else (experts, n, k)
        w: Any = new(*shape, dtype=weights or dtype)
        w = (w.mT if transposed else w).requires_grad_()
        if main_grad:  # `empty_like` imports sympy
            w.main_grad = torch.empty_strided(w.shape, w.stride(), device="meta")
        return Projection(
            Weight(w), new(experts, n, dtype=dtype).requires_grad_() if bias else None
        )

    columns = 2 * intermediate if options.activation.is_gated else intermediate
    both = ExpertWeights(projection(columns, hidden), projection(hidden, intermediate))
    x = new(1, hidden, dtype=dtype).requires_grad_()
    scores = new(1, k, dtype=torch.float32).requires_grad_()
    return Example(x, Slots(new(1, k, dtype=torch.int32), scores), both, options)


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


def run_layer(example: Example, router: str | Router) -> None:
    """Run training and inference steps on the meta device, where launches only compile."""
    assert example.slots is not None
    experts, (_, k) = example.weights.num_experts, example.slots.ids.shape
    with torch.device("meta"):
        routing = make_router(router, experts, k)
    routing = copy.deepcopy(routing).to("meta")
    for training, tokens in product((True, False), BATCHES):
        with torch.set_grad_enabled(training):
            logits = torch.empty(
                (tokens, experts), dtype=example.x.dtype, device="meta", requires_grad=True
            )
            r = routing.train(training)(logits, backend="triton")
            slots = Slots(r.ids, r.scores, r.slot_token, r.token_start)
            out = meta_forward(example, tokens, slots)
            if training:
                counts = torch.empty(experts, dtype=torch.int32, device="meta")
                loss = auxiliary_loss(r.logits, counts, backend="triton")
                torch.autograd.backward((out, loss), (torch.empty_like(out), loss))


def _say(number: int, of: int, seconds: float) -> None:
    print(f"sonicmoe: compiled {number} of {of} kernels, {seconds:.1f} s", file=sys.stderr)
