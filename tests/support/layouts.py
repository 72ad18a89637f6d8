"""Every tensor argument of every public function and operator, laid out in every way.

A call on a view must give the bits of the call on a contiguous copy of it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from helpers import Case, make_inputs, poisoned, same_bits
from operator_calls import operator_calls
from torch.func import functional_call

import sonicmoe
from sonicmoe import MoE
from sonicmoe.routing import Sigmoid, TokenRounding, auxiliary_loss, round_tokens

LAYOUTS = ("strided", "offset", "transposed", "expanded")
SHAPE = "12,16,8,4,2"
# Maps between rows, slots and tokens, whose entries differ: a map of equal entries means nothing.
MAPS = {
    "row_token", "row_slot", "slot_row", "expert_start", "tiles", "token_start", "offsets",
    "slot_token", "pair_expert",
}  # fmt: skip


def laid_out(t: torch.Tensor, layout: str, name: str = "") -> torch.Tensor | None:
    """`t`, or with "expanded" its first entry repeated, as a view. None where there is no such
    view. What lies between the entries is NaN, or an integer that is out of bounds."""
    junk = float("nan") if t.is_floating_point() else min(1_000_003, torch.iinfo(t.dtype).max)
    if layout == "strided":
        view = t.new_full([2 * n + 1 for n in t.shape], junk)[tuple([slice(1, None, 2)] * t.dim())]
    elif layout == "offset":
        view = t.new_full((t.numel() + 1,), junk)[1:].view(t.shape)
    elif layout == "expanded":
        if name.removeprefix("p_") in MAPS or t.dim() == 0:
            return None
        return t[:1].expand_as(t)
    else:
        if t.dim() < 2:
            return None
        view = torch.empty_like(t.mT, memory_format=torch.contiguous_format).mT
    return view.copy_(t)


def _equal(want: list, got: list, exact: bool) -> None:
    if exact:
        return same_bits(dict(enumerate(want)), dict(enumerate(got)))
    for a, b in zip(want, got, strict=True):
        assert a.isnan().equal(b.isnan())  # poison that nobody overwrites
        a, b = a.double().nan_to_num(), b.double().nan_to_num()
        # Another order of the sums, in up to three GEMMs after another; 1 for wrong strides.
        allowed = 4 * torch.finfo(torch.bfloat16 if want[0].itemsize == 2 else torch.float32).eps
        assert (a - b).norm() <= allowed * a.norm()


def _is_exact(names: list[str], layout: str) -> bool:
    """Bit for bit, unless strides change the order of a sum: PyTorch's own GEMM is handed the
    router's operands as they are, and kernels read logits and transposed weights by strides."""
    by_strides = {"logits", "dlogits", "weight", "dx", "router_w", "hidden_states"}
    weights = layout == "transposed" and any(name[0] in "wfc" or "weight" in name for name in names)
    return not weights and not by_strides.intersection(names)


# --- operators ------------------------------------------------------------------------------------
def operator_arguments(
    dtype: torch.dtype = torch.float32, backend: str = "torch", device: str = "cpu"
) -> Iterator[tuple[str, tuple]]:
    """Names and arguments of calls in which every tensor argument of every operator occurs."""
    case = Case(SHAPE, dtype, bias=True, routing="uniform")
    for name, calls in operator_calls(case, backend, device).items():
        covered: set[int] = set()
        for args in calls:
            tensors = {i for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
            fp64 = any(args[i].dtype == torch.float64 for i in tensors)
            if tensors <= covered or (fp64 and backend == "triton"):
                continue
            covered |= tensors
            yield name, args


def written_arguments(name: str) -> list[int]:
    arguments = getattr(torch.ops.sonicmoe, name).default._schema.arguments
    return [
        i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    ]


def check_operator(name: str, args: tuple, layouts: Sequence[str] = LAYOUTS) -> None:
    """All tensor arguments at once, but those that are written to."""
    overload = getattr(torch.ops.sonicmoe, name).default
    names = [argument.name for argument in overload._schema.arguments]
    written = written_arguments(name)

    def call(views: dict[int, torch.Tensor]) -> list:
        given = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        given = [views.get(i, a) for i, a in enumerate(given)]
        with poisoned():
            out = overload(*given)
        out = out if isinstance(out, tuple) else () if out is None else (out,)
        return [*out, *(given[i] for i in written if given[i] is not None)]

    want = call({})
    for layout in layouts:
        views = {
            i: view
            for i, a in enumerate(args)
            if isinstance(a, torch.Tensor) and i not in written
            and (view := laid_out(a, layout, names[i])) is not None
        }  # fmt: skip
        if layout == "expanded":
            want = call({i: _dense(view) for i, view in views.items()})
        _equal(want, call(views), _is_exact([names[i] for i in views], layout))


# --- public functions -----------------------------------------------------------------------------
def public_calls(
    dtype: torch.dtype = torch.float32, backend: str = "torch", device: str = "cpu"
) -> dict[str, tuple[Callable, dict[str, torch.Tensor]]]:
    """Name → a function of tensors alone, and tensors for it."""
    case = Case(SHAPE, dtype, bias=True, routing="uniform")
    given = make_inputs(case, device)
    with torch.device(device):
        return _public_calls(given, dtype, {"backend": backend}, device)


def _public_calls(given, dtype: torch.dtype, options: dict[str, Any], device: str) -> dict:
    weights = {"w1": given.w1, "w2": given.w2, "b1": given.b1, "b2": given.b2}
    published = {**weights, "w1": given.w1.permute(1, 2, 0), "w2": given.w2.permute(1, 2, 0)}
    token = torch.arange(12, dtype=torch.int32).repeat_interleave(2)
    start = torch.arange(0, 25, 2, dtype=torch.int32)
    pairs = {"ids": given.ids.flatten(), "scores": given.scores.flatten(), "slot_token": token}
    counts = torch.tensor([3, 2, 3, 4], dtype=torch.int32)
    offsets = torch.tensor([1, 4, 6, 9, 11], dtype=torch.int32)
    logits, uniform = torch.randn(12, 4, dtype=dtype), torch.rand(4)
    moe = MoE(4, 2, 16, 8, add_bias=True, std=0.1).to(dtype)
    torch.nn.init.normal_(cast(torch.Tensor, moe.c_fc.bias))
    kernels = sonicmoe.KernelBackendMoE
    backend = kernels.torch if options["backend"] == "torch" else kernels.sonicmoe

    def experts(**tensors):
        return sonicmoe.experts(**tensors, **options)

    def grouped(rows, counts=None, **tensors):
        return sonicmoe.grouped_experts(rows, counts, **tensors, **options)

    def sigmoid(logits, selection_bias):
        router = Sigmoid(4, 2, groups=2).to(logits.device)
        router.selection_bias = selection_bias
        return router(logits, **options).scores

    def rounding(logits, uniform):
        router = TokenRounding(4, 2, tile=3, subroutine="sr-f")
        return router(logits, uniform=uniform, **options).scores

    def tokens(scores, ids, **random):
        subroutine = "nr-s" if random else "balance-f"
        return round_tokens(scores, ids, tile=3, subroutine=subroutine, **random, **options)[0]

    def layer(hidden_states, **parameters):
        named = {name.replace("__", "."): t for name, t in parameters.items()}
        return functional_call(moe, named, (hidden_states,), {"kernel_backend_moe": backend})

    parameters = {name.replace(".", "__"): p.detach() for name, p in moe.named_parameters()}
    probabilities = logits.float().softmax(-1)
    calls = {
        "experts": (experts, given.arguments()),
        "experts, pairs": (experts, {"x": given.x, **pairs, **weights}),
        "experts, pairs and starts": (
            experts, {"x": given.x, **pairs, "token_start": start, **weights}),
        "grouped_experts, counts": (
            grouped, {"rows": given.x, "counts": counts, **weights, "scores": given.scores[:, 0]}),
        "grouped_experts, offsets": (grouped, {"rows": given.x, "offsets": offsets, **weights}),
        "grouped_experts, gaps": (
            grouped, {"rows": given.x, "counts": counts // 2, "offsets": offsets[:4], **weights}),
        "topk_scores": (
            lambda logits: sonicmoe.topk_scores(logits, 2, softmax_over_topk=False, **options)[0],
            {"logits": logits}),
        "auxiliary_loss": (
            lambda logits, counts: auxiliary_loss(logits, counts, z=0.1, **options),
            {"logits": logits, "counts": counts}),
        "Sigmoid": (sigmoid, {"logits": logits, "selection_bias": uniform}),
        "TokenRounding": (rounding, {"logits": logits, "uniform": uniform}),
        "round_tokens": (
            tokens, {"scores": probabilities, "ids": given.ids, "uniform": uniform}),
        "round_tokens, balanced": (tokens, {"scores": probabilities, "ids": given.ids}),
        "MoE": (layer, {"hidden_states": given.x.view(3, 4, 16), **parameters}),
    }  # fmt: skip
    calls |= _fp8_calls(make_inputs(Case("12,16,16,4,2", routing="uniform"), device), options)
    if given.x.is_cuda or options["backend"] == "torch":  # these choose the backend themselves
        calls["moe_general_routing_inputs"] = (
            lambda x, ids, scores, slot_token, w1, w2, b1, b2: sonicmoe.moe_general_routing_inputs(
                x, scores, slot_token, ids, w1, b1, w2, b2, 4)[0],
            {"x": given.x, **pairs, **published})  # fmt: skip
        calls["moe_TC_softmax_topk_layer"] = (
            lambda x, router_w, w1, w2, b1, b2: sonicmoe.moe_TC_softmax_topk_layer(
                x, router_w, w1, b1, w2, b2, 2)[:2],
            {"x": given.x, "router_w": torch.randn(4, 16, dtype=dtype), **published})  # fmt: skip
    return calls


def _fp8_calls(given, options: dict[str, Any]) -> dict:
    counts = torch.tensor([3, 2, 3, 4], dtype=torch.int32)
    tensors = {name: t for name, t in given.arguments().items() if t is not None}
    rows = {"rows": given.x, "counts": counts, "w1": given.w1, "w2": given.w2}
    fp8 = {"precision": "fp8", **options}
    return {
        "experts, fp8": (lambda **t: sonicmoe.experts(**t, **fp8), tensors),
        "grouped_experts, fp8": (
            lambda **t: sonicmoe.grouped_experts(**t, **fp8),
            {**rows, "scores": given.scores[:, 0]}),
    }  # fmt: skip


def check_public(
    function: Callable, tensors: dict[str, torch.Tensor], layouts: Sequence[str] = LAYOUTS
) -> None:
    """Output and gradients, with all tensors and the upstream gradients laid out at once."""
    want = _run(function, tensors)
    for layout in layouts:
        views = {
            name: view
            for name, t in tensors.items()
            if (view := laid_out(t, layout, name)) is not None
        }

        def above(t: torch.Tensor, layout: str = layout) -> torch.Tensor:
            found = laid_out(t, layout)
            return t if found is None else found

        if layout == "expanded":
            dense = {name: _dense(view) for name, view in views.items()}
            want = _run(function, {**tensors, **dense}, lambda t, above=above: _dense(above(t)))
        got = _run(function, {**tensors, **views}, above)
        _equal(want, got, _is_exact([*views, "upstream"], layout))


def _dense(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _run(
    function: Callable, tensors: dict[str, torch.Tensor], upstream: Callable = lambda t: t
) -> list:
    leaves = {
        name: t.detach().requires_grad_() if t.is_floating_point() else t
        for name, t in tensors.items()
    }
    with poisoned():
        out = function(**leaves)
        out = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
        seed = torch.Generator().manual_seed(7)
        above = [upstream(torch.randn(t.shape, generator=seed).to(t.device, t.dtype)) for t in out]
        wanted = [t for t in leaves.values() if t.requires_grad]
        grads = torch.autograd.grad(out, wanted, above, allow_unused=True)
    return [*(t.detach() for t in out), *(g for g in grads if g is not None)]
