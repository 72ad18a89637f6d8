"""Our experts inside other frameworks, compared with what runs there by default.

train   small random models of transformers: loss curves and step times from the same seed
model   a whole OLMoE-1B-7B of transformers, forward and backward; ours also watched, and in FP8
layer   one OLMoE block of transformers: its router, and our experts or `grouped_mm`
lora    adapters on frozen experts: our GEMMs, W + scale·B·A written out, PEFT's wrapper
join    what torchtitan's two parameters for gate and up cost beside one
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from sonicmoe import LowRank
from sonicmoe.functional import experts, grouped_experts
from sonicmoe.reference import layer as reference
from sonicmoe.tools.candidates import Candidate, leaves_of
from sonicmoe.tools.cases import Case, find_case
from sonicmoe.tools.inputs import Inputs, make_inputs
from sonicmoe.tools.verify import (
    MARGIN,
    PEER_MARGIN,
    Check,
    ErrorOf,
    honest_gemms,
    passed,
    verify,
)
from sonicmoe.tools.verify_run import check_table

from .framework_models import model, train
from .framework_options import NAME, Options, Outcome, release, say
from .measure import measure
from .run_tables import layer_table

LAYER = replace(find_case("olmoe-1b-7b"), name="olmoe in transformers")
LORA = replace(find_case("7b-fine"), name="lora")
JOIN = replace(find_case("olmoe"), name="gate and up")
RANK, SCALE = 16, 0.5
PEFT = "PEFT, grouped_mm"


# --- layer ----------------------------------------------------------------------------------------
def layer(options: Options) -> Outcome:
    from sonicmoe.integrations.transformers import register

    register()
    case = options.sized(LAYER)
    inputs = make_inputs(case, "uniform", options.device, options.dtype)
    outcome = Outcome([], [])
    for name in (NAME, "grouped_mm"):
        for router in (False, True):
            candidate = _in_transformers(inputs, name, router)
            # Its router rounds scores to the model's dtype, which ours does not.
            checks = verify(candidate, inputs, peer=router or name != NAME)
            _measured("layer", case, candidate, checks, outcome)
    _print_table(case, outcome)
    for where in ("out", "in"):
        found = {r["candidate"]: r["fwd_bwd_ms"] for r in outcome.records if r["router"] == where}
        if len(found) == 2:
            print(f"router {where}: {found['grouped_mm'] / found[NAME]:.2f} × grouped_mm")
    return outcome


def _in_transformers(inputs: Inputs, implementation: str, router: bool) -> Candidate:
    block, ids, leaves = (
        _block(inputs, implementation),
        inputs.ids.long(),
        leaves_of(inputs, router),
    )
    leaves |= {"w1": block.experts.gate_up_proj, "w2": block.experts.down_proj}
    if router:
        leaves["router_w"] = block.gate.weight

    def forward() -> torch.Tensor:
        return block(inputs.x[None])[0] if router else block.experts(inputs.x, ids, inputs.scores)

    return Candidate(implementation, router, forward, leaves, inputs.dout, gate_up="concatenated")


def _block(inputs: Inputs, implementation: str) -> Any:
    """OLMoE's router and experts, with the weights of the inputs."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    p = inputs.case.problem
    config = OlmoeConfig(
        hidden_size=p.H, intermediate_size=p.I, num_experts=p.E, num_experts_per_tok=p.K,
        norm_topk_prob=False,
    )  # fmt: skip
    config._experts_implementation = implementation
    with torch.device("meta"):
        block: Any = OlmoeSparseMoeBlock(config)
    block.gate.weight = nn.Parameter(inputs.router_w.detach())
    block.experts.gate_up_proj = nn.Parameter(inputs.w1.detach())
    block.experts.down_proj = nn.Parameter(inputs.w2.detach())
    return block


# --- lora -----------------------------------------------------------------------------------------
def lora(options: Options) -> Outcome:
    """Weights are frozen; x, the scores and the four factors have gradients."""
    case = options.sized(LORA)
    p = case.problem
    i = make_inputs(case, "uniform", options.device, options.dtype)
    w1, w2 = i.w1.detach(), i.w2.detach()

    def factor(*shape: int, std: float) -> torch.Tensor:
        return nn.Parameter(torch.randn(shape, device=options.device, dtype=options.dtype) * std)

    up = LowRank(
        factor(RANK * p.E, p.H, std=p.H**-0.5), factor(p.N, RANK * p.E, std=RANK**-0.5), SCALE
    )
    down = LowRank(
        factor(RANK * p.E, p.I, std=p.I**-0.5), factor(p.H, RANK * p.E, std=RANK**-0.5), SCALE
    )
    leaves = {"x": i.x, "scores": i.scores, "a1": up.a, "b1": up.b, "a2": down.a, "b2": down.b}

    def candidate(name: str, forward: Callable[[], torch.Tensor]) -> Candidate:
        return Candidate(name, False, forward, leaves, i.dout)

    def ours() -> torch.Tensor:
        return experts(i.x, i.ids, i.scores, w1, w2, lora1=up, lora2=down, gate_up="concatenated")

    def written_out() -> torch.Tensor:
        weights = _written_out(w1, up), _written_out(w2, down)
        return experts(i.x, i.ids, i.scores, *weights, gate_up="concatenated")

    exact, plain = (_reference(i, leaves, dtype) for dtype in (torch.float64, options.dtype))
    release()
    outcome = Outcome([], [])
    for s in (
        candidate("lora_experts", ours),
        candidate("W + scale·B·A, experts", written_out),
        candidate("PEFT, use_lora_experts", _peft(i, up, down, ours=True)),
        candidate(PEFT, _peft(i, up, down)),
    ):
        _measured("lora", case, s, _checks(s, exact, plain), outcome)
    _print_table(case, outcome)
    return outcome


def _written_out(w: torch.Tensor, lora: LowRank) -> torch.Tensor:
    """PEFT's own definition, formed in full."""
    a = lora.a.reshape(w.shape[0], -1, w.shape[2])
    b = lora.b.reshape(w.shape[1], -1, w.shape[0])
    return w + lora.scale * torch.einsum("ore,eri->eoi", b, a)


def _reference(i: Inputs, leaves: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The output and the gradient of every leaf in plain PyTorch, from the same values."""
    same = {  # scores are fp32 and stay so
        name: t.detach().to(torch.promote_types(t.dtype, dtype)).requires_grad_()
        for name, t in leaves.items()
    }
    up, down = LowRank(same["a1"], same["b1"], SCALE), LowRank(same["a2"], same["b2"], SCALE)
    weights = [_written_out(w.detach().to(dtype), f) for w, f in ((i.w1, up), (i.w2, down))]
    with honest_gemms():
        out = reference.experts(same["x"], i.ids, same["scores"], *weights, gate_up="concatenated")
        grads = torch.autograd.grad(out, tuple(same.values()), i.dout.to(dtype))
    return {"out": out.detach(), **dict(zip(same, grads, strict=True))}


def _checks(candidate: Candidate, exact: dict, plain: dict) -> list[Check]:
    out = candidate.forward()
    got, checks = {"out": out.detach(), **candidate.gradients(out)}, []
    margin = PEER_MARGIN if candidate.name == PEFT else MARGIN[out.element_size()]
    for name, true in exact.items():
        error = ErrorOf(name)
        error.add(got[name], plain[name], true)
        checks.append(error.check(margin, torch.finfo(out.dtype).eps))
    return checks


def _peft(i: Inputs, up: LowRank, down: LowRank, ours: bool = False) -> Callable[[], torch.Tensor]:
    """PEFT's wrapper around the experts of transformers, with our factors in it."""
    import peft

    if ours:
        from sonicmoe.integrations.transformers import register

        register()
    block = _block(i, "sonicmoe_experts" if ours else "grouped_mm").requires_grad_(False)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=RANK, lora_alpha=int(SCALE * RANK), target_parameters=targets)
    outer: Any = peft.inject_adapter_in_model(config, block).experts
    for wrapper in (outer, outer.base_layer):
        factors = up if wrapper.parameter_name == "gate_up_proj" else down
        wrapper.lora_A["default"].weight = factors.a
        wrapper.lora_B["default"].weight = factors.b
    if ours:
        from sonicmoe.integrations.peft import use_lora_experts

        use_lora_experts(block)
    ids = i.ids.long()
    return lambda: outer(i.x, ids, i.scores)


# --- join -----------------------------------------------------------------------------------------
def join(options: Options) -> Outcome:
    """`grouped_experts` on gate and up as two parameters, joined at each call, and as one."""
    case = options.sized(JOIN)
    p = case.problem
    i = make_inputs(case, "uniform", options.device, options.dtype)
    rows = i.x.detach().repeat(p.K, 1).requires_grad_()
    counts = i.ids.flatten().bincount(minlength=p.E)
    dout = torch.randn_like(rows)
    fused = i.w1.detach().unflatten(1, (p.I, 2))
    gate, up = (fused[:, :, half].contiguous().requires_grad_() for half in (0, 1))

    def one() -> torch.Tensor:
        return grouped_experts(rows, counts, i.w1, i.w2)

    def two() -> torch.Tensor:
        w1 = torch.cat([gate, up], dim=1)
        return grouped_experts(rows, counts, w1, i.w2, gate_up="concatenated")

    candidates = (
        Candidate("one parameter", False, one, {"x": rows, "w1": i.w1, "w2": i.w2}, dout),
        Candidate("two, joined", False, two, {"x": rows, "g": gate, "u": up, "w2": i.w2}, dout),
    )
    outcome, want = Outcome([], []), candidates[0].forward().detach()
    for candidate in candidates:
        off = ((candidate.forward().detach() - want).float().norm() / want.float().norm()).item()
        allowed = 4 * torch.finfo(options.dtype).eps
        _measured("join", case, candidate, [Check("out", off, 0.0, allowed)], outcome)
    _print_table(case, outcome)
    return outcome


# --- shared ---------------------------------------------------------------------------------------
def _measured(
    part: str, case: Case, candidate: Candidate, checks: list[Check], outcome: Outcome
) -> None:
    """A record of what was right; a failure for what was not."""
    router = "in" if candidate.router else "out"
    if not passed(checks):
        wrong = ", ".join(check.tensor for check in checks if not check.passed)
        outcome.failures.append(
            f"{case.name}: {candidate.name}, router {router}, is wrong in {wrong}\n"
            f"{check_table(checks)}"
        )
        return
    say(f"{case.name}: timing {candidate.name}, router {router}")
    figures = measure(candidate, case.problem)
    if part == "lora":  # the frozen weights have no gradient: the FLOPs are not those of the layer
        figures = {name: v for name, v in figures.items() if not name.endswith("tflops")}
    outcome.records.append(
        {"part": part, "case": case.name, "shape": str(case.problem), "candidate": candidate.name,
         "router": router, **figures, "checks": [asdict(check) for check in checks]}
    )  # fmt: skip
    release()


def _print_table(case: Case, outcome: Outcome) -> None:
    if outcome.records:
        print(f"\n{case.name} ({case.problem})\n{layer_table(outcome.records)}")


PARTS: dict[str, Callable[[Options], Outcome]] = {
    "train": train, "model": model, "layer": layer, "lora": lora, "join": join,
}  # fmt: skip
