"""What runs in each MoE layer of a model, and why: `sonicmoe.report`.

Nothing is decided here. Each layer is asked for what its next call would do, by the functions that
decide it in that call; the kernels are those of a dry run.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import bad_argument
from ..extras import MissingExtra
from ..layer.dry_run import dry_run
from ..layer.fp8_kept import fsdp2_parameters
from ..layer.lora import LowRank
from ..layer.memory import MemoryPolicy, in_words
from ..layer.options import Options
from ..layer.weights import ExpertWeights
from ..moe import MoE
from ..watch import LOOKS_LIKE_MOE, ids_argument, layers_of

__all__ = ["LayerReport", "Report", "report"]

OURS = "sonicmoe"
_FAMILIES = {"kernels.hopper": "hopper", "kernels.triton": "portable"}


@dataclass(frozen=True, slots=True)
class LayerReport:
    """How the next call of one layer runs.

    name, module  path in the model; class
    runs, why     "sonicmoe", or whose code computes the experts; what decides that
    problem       message of the error that the call would raise, or None
    backend       "triton" or "torch"; this and the rest only where sonicmoe runs without a problem
    kernels       of the grouped GEMMs: "hopper", "portable" (Triton, any GPU), both, or "pytorch"
    forward, backward  names of the kernels in their order; empty in PyTorch
    """

    name: str
    module: str
    runs: str
    why: str
    problem: str | None = None
    device: str | None = None
    backend: str | None = None
    kernels: str | None = None
    dtype: torch.dtype | None = None
    precision: str | None = None
    cache_fp8_weights: bool = False
    memory: MemoryPolicy | None = None
    activation: str | None = None
    gate_up: str | None = None
    experts: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    router: str | None = None
    lora_ranks: tuple[int, int] = (0, 0)
    expert_ranks: int = 1
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()

    @property
    def fast(self) -> bool:
        """Whether our GPU kernels run."""
        return self.runs == OURS and self.backend == "triton"

    def _lines(self) -> Iterator[tuple[str, str]]:
        """What `Report` prints about it, without its name."""
        yield "module", self.module
        yield "runs", f"{self.runs}: {self.why}"
        if self.problem is not None:
            yield "raises", self.problem
        if self.backend is None:
            return
        where = {"triton": "GPU kernels", "torch": "plain PyTorch"}[self.backend]
        yield "backend", f"{self.backend} ({where}), since the weights are on {self.device}"
        sizes = f"{self.experts} experts, H {self.hidden_size}, I {self.intermediate_size}"
        if self.expert_ranks > 1:
            sizes += f", on this rank of {self.expert_ranks}"
        yield "experts", f"{sizes}, {self.activation}, gate_up {self.gate_up}"
        if self.router is not None:
            yield "router", self.router
        assert self.memory is not None
        numbers = f"data {str(self.dtype).removeprefix('torch.')}, precision {self.precision}"
        if self.cache_fp8_weights:
            numbers += ", FP8 weights kept while they do not change"
        yield "numbers", f"{numbers}, memory {in_words(self.memory)}"
        if any(self.lora_ranks):
            yield "lora", f"ranks {self.lora_ranks[0]} and {self.lora_ranks[1]}, never merged"
        if self.backend == "triton":
            yield "kernels", f"{self.kernels}"
            yield "forward", ", ".join(self.forward)
            yield "backward", ", ".join(self.backward) or "none: nothing requires a gradient"


@dataclass(frozen=True, slots=True)
class Report:
    """Made by `report`; `print` it. Layers that are alike are printed once."""

    layers: tuple[LayerReport, ...]

    @property
    def fast(self) -> bool:
        """Whether our GPU kernels run in every layer."""
        return all(layer.fast for layer in self.layers)

    def __getitem__(self, name: str) -> LayerReport:
        return next(layer for layer in self.layers if layer.name == name)

    def __str__(self) -> str:
        ours = sum(layer.runs == OURS and layer.problem is None for layer in self.layers)
        fast = sum(layer.fast for layer in self.layers)
        found = [f"{len(self.layers)} MoE layers: sonicmoe runs {ours}, {fast} with GPU kernels"]
        alike: dict[LayerReport, list[str]] = {}
        for layer in self.layers:
            alike.setdefault(replace(layer, name=""), []).append(layer.name)
        for layer, names in alike.items():
            found.append(_short(names))
            found += [f"    {name:<10}{words}" for name, words in layer._lines()]
        return "\n".join(found)


def report(model: nn.Module) -> Report:
    """Return what runs in each MoE layer of `model`, ours or transformers', and why; `print` it.

    Call it as the model is called: under the same `torch.autocast`, and under `torch.no_grad()` for
    inference. It runs no data and compiles nothing. `kernel_backend_moe` of a call is not known.
    """
    if isinstance(model, nn.Module):
        with _gathered_by_fsdp2(model):
            found = tuple(_described(model))
    else:
        found = ()
    if not found:
        expected, got = "a model with MoE layers, ours or transformers'", type(model).__name__
        raise bad_argument("model", expected, got, "Pass the whole model.")
    return Report(found)


def _described(model: nn.Module) -> Iterator[LayerReport]:
    wrappers, known = _outermost_wrappers(model), set[str]()
    for name, module in layers_of(model):
        about = LayerReport(name, type(module).__name__, "", "")
        known.add(name)
        if isinstance(module, MoE):
            yield _of_moe(about, module)
        elif ids_argument(module):
            wrapper_name, wrapper = wrappers.get(id(module), (name, None))
            yield _of_experts(replace(about, name=wrapper_name), module, wrapper)
        else:
            block = name.rpartition(".")[0]
            yield _of_others(replace(about, name=block), model.get_submodule(block))
    for name, module in model.named_modules():
        if re.fullmatch(LOOKS_LIKE_MOE, type(module).__name__) and not _belongs(name, known):
            known.add(name)
            yield _of_others(LayerReport(name, "", "", ""), module)


def _belongs(name: str, layers: Iterable[str]) -> bool:
    """Whether a module is in one of the layers, around it or beside it."""
    block = f"{name.rpartition('.')[0]}.".lstrip(".")
    return any(f"{name}.".startswith(f"{x}.") or f"{x}.".startswith(block) for x in layers)


def _of_others(about: LayerReport, module: nn.Module) -> LayerReport:
    kind = type(module)
    why = f"{kind.__name__} computes its experts itself, without transformers' experts interface"
    owner = kind.__module__.partition(".")[0]
    return replace(about, module=kind.__name__, runs=owner, why=why)


# --- ours -----------------------------------------------------------------------------------------
def _of_moe(about: LayerReport, moe: MoE) -> LayerReport:
    about = replace(about, runs=OURS, why="the layer is a sonicmoe.MoE")
    about = replace(about, router=f"{moe.router_kind} ({type(moe.routing).__name__})")
    try:
        weights, options = moe._weights(), moe._options()
        if weights.up.weight.is_meta:
            moe._checked_backend(weights.up.weight.new_empty(0, moe.hidden_size), None)
    except ValueError as error:
        return replace(about, problem=str(error))
    about = replace(about, expert_ranks=len(getattr(moe, "ranks", (0,))))
    about = replace(about, cache_fp8_weights=moe.cache_fp8_weights)
    return _with_kernels(about, weights, moe.top_k, options)


def _with_kernels(
    about: LayerReport,
    weights: ExpertWeights,
    k: int,
    options: Options,
) -> LayerReport:
    try:
        ran = dry_run(weights, k, options)
    except (ValueError, ImportError) as error:  # Triton may be missing
        return replace(about, problem=str(error))
    experts, hidden, intermediate = weights.down.weight.shape
    families = _families((*ran.forward, *ran.backward))
    return replace(
        about,
        device=str(weights.up.weight.device),
        backend=ran.backend,
        kernels=" and ".join(families) if ran.backend == "triton" else "pytorch",
        dtype=ran.dtype,
        precision=options.precision,
        memory=options.memory,
        activation=options.activation.value,
        gate_up=options.gate_up if options.activation.is_gated else "without a gate",
        experts=experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        lora_ranks=(_rank(options.lora1, experts), _rank(options.lora2, experts)),
        forward=tuple(kernel.__name__ for kernel in ran.forward),
        backward=tuple(kernel.__name__ for kernel in ran.backward),
    )


def _rank(adapter: LowRank | None, experts: int) -> int:
    return 0 if adapter is None else adapter.a.shape[0] // experts


def _families(kernels: Iterable[Any]) -> list[str]:
    """Of the grouped GEMMs; sums for biases are portable everywhere."""
    gemms = (kernel for kernel in kernels if not kernel.__name__.startswith("bias_"))
    modules = {kernel.fn.__module__ for kernel in gemms}
    return sorted({name for m in modules for part, name in _FAMILIES.items() if part in m})


@contextmanager
def _gathered_by_fsdp2(model: nn.Module) -> Iterator[None]:
    """Put in place of sharded parameters what a call is given: whole, in FSDP2's dtype; no data."""
    held: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in model.modules():
            state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
            for p in fsdp2_parameters(state):
                gathered, info = _without_shards(p, state._mp_policy.param_dtype), p._module_info
                shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                for owner, name in ((info.module, info.param_name), *shared):
                    held.append((owner, name, owner._parameters[name]))
                    owner._parameters[name] = gathered
        yield
    finally:
        for owner, name, parameter in reversed(held):
            owner._parameters[name] = parameter


def _without_shards(p: Any, dtype: torch.dtype | None) -> nn.Parameter:
    """The parameter that FSDP2 gathers from an `FSDPParam`, as a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import DTensor

    like = p.sharded_param
    dtype = dtype if dtype and like.is_floating_point() else like.dtype
    with FakeTensorMode():
        t: torch.Tensor = torch.empty(p._orig_size, dtype=dtype, device=like.device)
        if p.is_dtensor:  # spread over other ranks too; PyTorch 2.11 names it differently
            spec = getattr(p, "_unsharded_dtensor_spec", None) or p._tp_spec
            t = DTensor.from_local(t, spec.mesh, spec.placements, run_check=False)
    return nn.Parameter(t, requires_grad=like.requires_grad)


# --- transformers and PEFT ------------------------------------------------------------------------
def _of_experts(about: LayerReport, module: Any, wrapper: Any) -> LayerReport:
    """Of experts of transformers; `wrapper` is the outermost one of PEFT's around them."""
    try:
        from . import transformers as adapter
    except MissingExtra as error:
        return replace(about, runs="transformers", why=str(error))
    name, function = adapter.implementation_of(module)
    if name is None and "forward" in vars(module):
        forward = module.forward
        where = f"{forward.__module__}.{getattr(forward, '__qualname__', repr(forward))}"
        return replace(about, runs=where.partition(".")[0], why=f"its forward is now {where}")
    if name is None:
        return _of_others(about, module)
    set_to = f"experts_implementation={name!r}"
    if not adapter.calls_ours(function):
        of = (
            f"{function.__module__}.{function.__qualname__}" if function else "the model's own loop"
        )
        why = f'{set_to} is {of}. For sonicmoe: register(), then set "sonicmoe_experts"'
        return replace(about, runs=f"transformers' {name}", why=why)
    about, lora = replace(about, runs=OURS, why=set_to), (None, None)
    options, cached = adapter.options_of(function)
    try:
        if wrapper is not None:
            about, lora = _with_adapters(about, wrapper)
            if about.runs != OURS:  # its weights are made in the call, and so is their gradient
                return about
        weights = adapter.weights_of(module)
        options = adapter.options_for(module, options)._replace(lora1=lora[0], lora2=lora[1])
    except ValueError as error:
        return replace(about, problem=str(error))
    about = replace(about, cache_fp8_weights=cached, expert_ranks=_expert_ranks(module))
    k = getattr(module.config, "num_experts_per_tok", None)
    return _with_kernels(about, weights, k if isinstance(k, int) else 1, options)


def _with_adapters(about: LayerReport, wrapper: Any) -> tuple[LayerReport, Any]:
    from . import peft as adapter

    if adapter.is_plain(wrapper):
        return replace(about, why=f"{about.why}; adapters are disabled or merged"), (None, None)
    if not adapter.uses_lora_experts(wrapper):
        why = "PEFT adds scale·B·A to the weights of all experts in every call, then runs"
        why = f"{why} {about.why}. For LoRA in the GEMMs: use_lora_experts(model)"
        return replace(about, runs="peft", why=why), (None, None)
    lora = adapter.adapters_of(wrapper)
    return about, (None, None) if lora is None else lora


def _outermost_wrappers(model: nn.Module) -> dict[int, tuple[str, Any]]:
    """Name and outermost wrapper of PEFT around each experts module, by its id."""
    if "peft.tuners.lora" not in sys.modules:
        return {}
    from peft.tuners.lora import ParamWrapper

    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            found.setdefault(id(module.get_base_layer()), (name, module))
    return found


def _expert_ranks(module: Any) -> int:
    mesh = getattr(module.down_proj, "device_mesh", None)
    return 1 if mesh is None else mesh.size()


# --- names ----------------------------------------------------------------------------------------
def _short(names: list[str]) -> str:
    """["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"] as "layers.{0…2}.mlp"."""
    parts = [re.split(r"(\d+)", name) for name in names]
    places = [i for i, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    if len(names) == 1 or len(places) != 1 or len({len(part) for part in parts}) > 1:
        return ", ".join(names)
    (place,) = places
    found = [int(part[place]) for part in parts]
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        numbers = f"{found[0]}…{found[-1]}"
    else:
        numbers = ", ".join(map(str, found))
    return "".join([*parts[0][:place], f"{{{numbers}}}", *parts[0][place + 1 :]])
