"""Runs a `Case` of feature_list.py and compares it with fp64."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import helpers
import torch
import torch.distributed as dist
from adapters import adapter, written_out
from feature_list import Case
from fp8_cases import KINKS, LIMITS
from helpers import SLACK, budget, relative_error, same_bits
from packed_weights import NF4
from research.capture import captured
from torch import nn
from torch.utils.checkpoint import checkpoint
from value_checks import activate_three_bits

import sonicmoe
from sonicmoe import Fp8Weights, KernelBackendMoE, LowRank, MemoryPolicy, MoE, Nf4, distributed
from sonicmoe.reference import layer as reference
from sonicmoe.reference.activation import activate

# Two slices of H; FP8 needs multiples of 16; I is no multiple of a block of Z, except on a GPU.
SHAPES = {"cpu": "96,128,48,4,2", "cuda": "256,256,256,8,2"}
RANK, SCALE = 8, 0.5
WEIGHTS = ("w1", "w2")
Tensors = dict[str, torch.Tensor]
# The tensors that can have a gradient, and the layer as a function of x and scores.
Layer = tuple[Tensors, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


def start(folder: str) -> None:
    """A process group of this process alone, and products as exact as their dtype allows."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


# --- tensors --------------------------------------------------------------------------------------
def tensors(case: Case, device: str) -> Tensors:
    """What the layer computes from, in the dtype in which it computes."""
    dtype = torch.bfloat16 if case.autocast else case.dtype
    sorted_rows = case.entry == "grouped_experts"
    return _tensors(dtype, case.activation, case.gate_up, case.bias, sorted_rows, case.nf4, device)


@cache
def _tensors(dtype, activation, gate_up, bias, sorted_rows, nf4, device) -> Tensors:
    shape = SHAPES[device][:-1] + "1" if sorted_rows else SHAPES[device]
    options = {"activation": activation, "gate_up": gate_up, "bias": bias}
    given = helpers.make_inputs(helpers.Case(shape, dtype, routing="uniform", **options), device)
    if sorted_rows:
        order = given.ids[:, 0].argsort()
        for name in ("x", "ids", "scores"):
            setattr(given, name, getattr(given, name)[order])
    found = {n: t for n, t in given.arguments().items() if t is not None} | {"dout": given.dout}
    seed = torch.Generator().manual_seed(1)
    router = torch.randn(len(given.w1), given.x.shape[1], generator=seed) / given.x.shape[1] ** 0.5
    found["router"] = router.to(given.x)
    for i, w in enumerate((given.w1, given.w2), 1):
        lora = adapter(w, RANK, SCALE)
        found |= {f"a{i}": lora.a.detach(), f"c{i}": lora.b.detach()}
    if nf4:
        found |= {name: _packed(found[name]).dequantize(dtype) for name in WEIGHTS}
    if activation.clamp and device == "cpu":
        _keep_away_from_clamp(found, activation.clamp.limit)
    return found


def _keep_away_from_clamp(t: Tensors, limit: float) -> None:
    """Draw tokens for which rounding does not decide what of Z is clamped, in any expert.

    On a GPU there are so many values that plain PyTorch clamps as many others as ours.
    """
    w, bias, x = t["w1"].double(), t.get("b1"), t["x"]
    with_lora = written_out(w, LowRank(t["a1"].double(), t["c1"].double(), SCALE))
    seed, drawn = torch.Generator().manual_seed(2), x[:0]
    while len(drawn) < len(x):
        more = torch.randn(4096, x.shape[1], generator=seed).to(x)
        for weight in (w, with_lora):
            z = torch.einsum("th,enh->ten", more.double(), weight)
            z = z if bias is None else z + bias.double()
            more = more[((z.abs() - limit).abs() > 0.04).flatten(1).all(1)]
        drawn = torch.cat([drawn, more])
    x.copy_(drawn[: len(x)])


def _packed(w: torch.Tensor) -> Nf4:
    """Values of NF4 stay as they are."""
    code = torch.tensor(NF4, device=w.device)
    blocks = w.float().reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    nearest = (blocks / absmax[:, None])[:, :, None].sub(code).abs().argmin(2).flatten()
    codes = (16 * nearest[0::2] + nearest[1::2]).to(torch.uint8)
    experts, n, k = w.shape
    return Nf4(codes, absmax, (experts, n, k), code)


def names_of(case: Case) -> list[str]:
    """The tensors of a case that can have a gradient."""
    names = ["x", "router" if case.entry == "MoE" else "scores", *WEIGHTS]
    names += ["b1", "b2"] if case.bias else []
    return names + (["a1", "c1", "a2", "c2"] if case.lora else [])


def trainable(case: Case) -> list[str]:
    frozen = {*case.frozen, *(("w1", "w2", "b1", "b2") if case.lora else ())}
    frozen |= {*(WEIGHTS if case.nf4 else ())}
    return [name for name in names_of(case) if name not in frozen]


# --- reference ------------------------------------------------------------------------------------
def plain_results(case: Case, device: str, exact: bool) -> Tensors:
    """The output and all gradients of plain PyTorch, in fp64 if `exact`.

    Else Z loses the bits that it loses in e4m3.
    """
    of = replace(case.computed_plainly(), precision=None, frozen=(), main_grad=False)
    of = replace(of, entry=case.entry if case.entry in ("MoE", "grouped_experts") else "experts")
    of = replace(of, memory=MemoryPolicy()) if exact else of
    return _plain_results(of, device, exact)


@cache
def _plain_results(case: Case, device: str, exact: bool) -> Tensors:
    t = tensors(case, device)
    if exact:
        t = {n: v.double() if v.is_floating_point() else v for n, v in t.items()}
    leaves = {name: t[name].detach().requires_grad_() for name in names_of(case)}
    t = t | leaves
    w1, w2 = (
        written_out(t[f"w{i}"], LowRank(t[f"a{i}"], t[f"c{i}"], SCALE)) if case.lora else t[f"w{i}"]
        for i in (1, 2)
    )
    ids, scores = t["ids"], t["scores"]
    if case.entry == "MoE":
        wide = torch.promote_types(t["x"].dtype, torch.float32)
        logits = nn.functional.linear(t["x"].to(wide), t["router"].to(wide))
        scores, ids = reference.route(logits, ids.shape[1], softmax_over_topk=True)
    layer = partial(reference.experts, activation=case.activation, gate_up=case.gate_up)
    rounded = mock.patch.object(reference, "activate", activate_three_bits)
    with rounded if case.memory.in_e4m3 else contextlib.nullcontext():
        out = layer(t["x"], ids, scores, w1, w2, b1=t.get("b1"), b2=t.get("b2"))
    grads = torch.autograd.grad(out, list(leaves.values()), t["dout"])
    found = {"out": out.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}
    if case.memory.in_e4m3:  # which the output does not see
        found["out"] = plain_results(replace(case, memory=MemoryPolicy()), device, exact)["out"]
    return found


# --- entry points ---------------------------------------------------------------------------------
def _options(case: Case) -> dict[str, Any]:
    options: dict[str, Any] = {"precision": case.precision, "memory": case.memory}
    if case.kept_fp8_weights:
        options["fp8_weights"] = Fp8Weights()
    return options


def _parameters(case: Case, t: Tensors) -> Tensors:
    return {n: nn.Parameter(t[n].clone()) for n in names_of(case) if n not in ("x", "scores")}


def _function(entry: Callable, case: Case, t: Tensors, backend: str | None) -> Layer:
    p, options = _parameters(case, t), _options(case)
    options |= {"activation": case.activation, "gate_up": case.gate_up, "backend": backend}
    if case.lora:
        options |= {f"lora{i}": LowRank(p[f"a{i}"], p[f"c{i}"], SCALE) for i in (1, 2)}
    weights: list[Any] = [p[name] for name in ("w1", "w2", "b1", "b2") if name in p]
    if case.packed:
        weights[:2] = [_packed(p.pop(name).detach()) for name in WEIGHTS]
    return p, partial(entry, t["ids"], weights, options)


def _experts(ids, weights, options, x, scores):
    return sonicmoe.experts(x, ids, scores, *weights, **options)


def _grouped_experts(ids, weights, options, x, scores):
    counts = torch.zeros(weights[0].shape[0], dtype=torch.int32, device=x.device)
    counts = counts.index_add(0, ids[:, 0], torch.ones_like(ids[:, 0]))
    return sonicmoe.grouped_experts(x, counts, *weights, scores=scores[:, 0], **options)


def _expert_parallel(ids, weights, options, x, scores):
    group = dist.group.WORLD
    return distributed.experts(x, ids, scores, *weights, group=group, **options)


def _moe(case: Case, t: Tensors, backend: str | None) -> Layer:
    experts, intermediate = t["w2"].shape[0], t["w2"].shape[2]
    moe = MoE(
        experts, t["ids"].shape[1], t["x"].shape[1], intermediate, case.activation, case.bias,
        gate_up=case.gate_up, fp32_router_logits=True, aux_loss_coef=0.0, precision=case.precision,
        cache_fp8_weights=case.kept_fp8_weights, memory=case.memory,
    )  # fmt: skip
    places: dict[str, tuple[nn.Module, str]] = {"router": (moe.router, "weight")}
    for i, module in enumerate((moe.c_fc, moe.c_proj), 1):
        places |= {f"w{i}": (module, "weight"), f"b{i}": (module, "bias")}
    p = _set_parameters(case, t, places)
    if case.lora:
        p |= _with_peft(nn.ModuleDict({"moe": moe}), ["moe.c_fc.weight", "moe.c_proj.weight"], t)[1]
    name = KernelBackendMoE.torch if backend == "torch" else None
    return p, lambda x, scores: moe(x, kernel_backend_moe=name)[0]


def _set_parameters(case: Case, t: Tensors, places: dict[str, tuple[nn.Module, str]]) -> Tensors:
    p = _parameters(case, t)
    for name, (module, attribute) in places.items():
        if name in p:
            packed = case.packed and name in WEIGHTS
            setattr(module, attribute, _packed(p[name].detach()) if packed else p[name])
    return p


def _transformers(case: Case, t: Tensors, backend: str | None) -> Layer:
    experts = _hf_experts(case, t)
    places = {"w1": "gate_up_proj" if case.activation.is_gated else "up_proj", "w2": "down_proj"}
    places |= {f"b{name[1]}": f"{place}_bias" for name, place in places.items()}
    p = _set_parameters(case, t, {name: (experts, place) for name, place in places.items()})
    if case.entry == "PEFT":
        targets = [f"experts.{places[name]}" for name in WEIGHTS]
        experts, adapters = _with_peft(nn.ModuleDict({"experts": experts}), targets, t)
        p |= adapters
    elif case.lora:
        lora = {f"lora{i}": LowRank(p[f"a{i}"], p[f"c{i}"], SCALE) for i in (1, 2)}
        experts = partial(experts, **lora)
    return p, lambda x, scores: experts(x, t["ids"], scores)


def _hf_experts(case: Case, t: Tensors) -> Any:
    """A module with the experts interface of transformers, and our implementation."""
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import use_experts_implementation

    from sonicmoe.integrations.transformers import register

    options = (case.precision, case.kept_fp8_weights, *case.memory)
    name = "_".join(map(str, ("features", *options)))
    kept = case.kept_fp8_weights
    register(name, precision=case.precision, cache_fp8_weights=kept, memory=case.memory)

    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = len(t["w1"])
            self.act_fn = ACT2FN["gelu"]

        def _apply_gate(self, z):
            return activate(z, case.activation, case.gate_up)

        def forward(self, *args):
            raise AssertionError("not our implementation")

    decorate = use_experts_implementation(
        is_concatenated=case.gate_up == "concatenated",
        has_bias=case.bias,
        has_gate=case.activation.is_gated,
    )
    return decorate(Experts)(SimpleNamespace(_experts_implementation=name))


def _with_peft(model: nn.Module, targets: list[str], t: Tensors) -> tuple[Any, Tensors]:
    """The outermost wrapper of the experts, and the factors of both adapters by name."""
    import peft

    from sonicmoe.integrations.peft import use_lora_experts

    config = peft.LoraConfig(
        r=RANK, lora_alpha=int(SCALE * RANK), target_parameters=targets, target_modules=[]
    )
    wrapped = peft.get_peft_model(model, config)
    use_lora_experts(wrapped)
    found: Tensors = {}
    kind = peft.tuners.lora.ParamWrapper
    named = [(n, m) for n, m in wrapped.named_modules() if isinstance(m, kind)]
    wrappers: list[Any] = [m for _, m in named]
    for name, wrapper in named:
        i = 2 if wrapper.parameter_name == "down_proj" or "c_proj" in name else 1
        for factor, linear in (("a", wrapper.lora_A["default"]), ("c", wrapper.lora_B["default"])):
            linear.weight = nn.Parameter(t[f"{factor}{i}"].clone())
            found[f"{factor}{i}"] = linear.weight
    return wrappers[0], found


ENTRIES: dict[str, Callable[[Case, Tensors, str | None], Layer]] = {
    "MoE": _moe,
    "experts": partial(_function, _experts),
    "grouped_experts": partial(_function, _grouped_experts),
    "expert parallelism": partial(_function, _expert_parallel),
    "transformers": _transformers,
    "PEFT": _transformers,
}


# --- one call -------------------------------------------------------------------------------------
def results(case: Case, device: str, backend: str | None = None) -> Tensors:
    """The output and the gradients of what is not frozen."""
    t = tensors(case, device)
    if case.autocast:
        t = {n: v.float() if v.dtype == torch.bfloat16 else v for n, v in t.items()}
    leaves, layer = ENTRIES[case.entry](case, t, backend)
    leaves = leaves | {n: t[n].detach().clone() for n in ("x", "scores")}
    wanted = trainable(case)
    for name in leaves:
        leaves[name].requires_grad_(name in wanted)
    with_buffers = [name for name in WEIGHTS if case.main_grad and name in leaves]
    buffers = [leaves[name] for name in with_buffers]
    if case.checkpoint:
        layer = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)
    if case.compiled:
        torch._dynamo.reset()
        one_graph = case.entry != "expert parallelism"  # there the host reads how many rows arrive
        layer = torch.compile(layer, backend="aot_eager", fullgraph=one_graph)

    def step() -> list[torch.Tensor | None]:
        with torch.autocast(device, torch.bfloat16, enabled=case.autocast):
            out = layer(leaves["x"], leaves["scores"])
        dout = t["dout"].to(out.dtype)
        grads = torch.autograd.grad(out, [leaves[n] for n in wanted], dout, allow_unused=True)
        return [out.detach(), *grads]

    for weight in buffers:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    if case.kept_fp8_weights:
        step()  # what follows uses what this keeps
    replay = _captured(step) if case.cuda_graph else step
    for weight in buffers:
        weight.main_grad.fill_(0.5)  # type: ignore[attr-defined]
    out, *grads = replay()
    found = {"out": out} | {f"d{n}": g for n, g in zip(wanted, grads, strict=True)}
    if case.main_grad:
        for name in with_buffers:
            added = leaves[name].main_grad - 0.5  # type: ignore[attr-defined]
            assert found.get(f"d{name}") is None, f"d{name} beside main_grad"
            if name in wanted:
                found[f"d{name}"] = added
            else:
                assert not added.any(), f"main_grad of {name}, which is frozen"
    missing = [name for name, g in found.items() if g is None]
    assert not missing, f"no gradient: {missing}"
    return {name: g for name, g in found.items() if g is not None}


def _captured(step: Callable[[], list]) -> Callable[[], list]:
    """Both passes in a CUDA graph."""
    graph, found = captured(step)

    def replay() -> list:
        graph.replay()
        torch.cuda.synchronize()
        return [None if t is None else t.clone() for t in found]

    return replay


# --- judging --------------------------------------------------------------------------------------
def check(case: Case, device: str = "cpu") -> None:
    """Every result within the error budget, and with the bits of the plain call where promised."""
    got = results(case, device)
    exact = plain_results(case, device, exact=True)
    rough = _allowed(case, device)
    assert set(got) == {"out", *(f"d{name}" for name in trainable(case))}
    dtype, tokens = torch.bfloat16 if case.autocast else case.dtype, len(exact["out"])
    for name in got:
        found, want = got[name].view_as(exact[name]), exact[name]
        if case.precision is not None:
            error, limit = relative_error(found, want), _fp8_limit(case, name, rough, want)
            assert error <= limit, f"{name}: relative error {error:.4f}, allowed {limit:.4f}"
            continue
        in_e4m3 = case.memory.in_e4m3 and name != "out" and device == "cpu"
        step = torch.float8_e4m3fn if in_e4m3 else dtype
        near = rough[name]
        if case.main_grad and name in ("dw1", "dw2"):  # what adding to a buffer outside gives
            near = (near.float() + 0.5) - 0.5
        budget(found, near, want, name=name, dtype=step, tokens=tokens)
    alike = case.computed_plainly()
    # PyTorch compiles the backward pass of fp32 logits for the dtype of autocast.
    rounded_router = case.entry == "MoE" and case.autocast and case.compiled
    if alike != case and not rounded_router:
        same_bits(got, _plain_call(alike, device))


def _allowed(case: Case, device: str) -> Tensors:
    """Results that may err as much: kernels in e4m3 are compared with the same arithmetic."""
    if device == "cpu" or not (case.precision or case.memory.in_e4m3):
        return plain_results(case, device, exact=False)
    of = replace(case.computed_plainly(), frozen=(), main_grad=False)
    if case.entry not in ("MoE", "grouped_experts"):
        of = replace(of, entry="experts")
    return _plain_call(of, device, "torch")


def _fp8_limit(case: Case, name: str, rough: Tensors, exact: torch.Tensor) -> float:
    if exact.is_cuda:
        return SLACK * relative_error(rough[name].view_as(exact), exact) + 1e-6
    limit = LIMITS.get(name, max(LIMITS.values()))
    if helpers._kinks(case.activation) and name in ("dx", "dw1", "db1", "da1", "dc1"):
        limit = KINKS
    limit = math.hypot(limit, 0.055 * (case.memory.in_e4m3 and name != "out"))
    return limit + helpers.floor(torch.float8_e4m3fn, len(rough["out"]))


@cache
def _plain_call(case: Case, device: str, backend: str | None = None) -> Tensors:
    return results(case, device, backend)
