"""What the tests share: problems, inputs, routings, the error budget, poisoned memory."""

import contextlib
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial

import torch

import sonicmoe
from sonicmoe import ActivationType
from sonicmoe.launch import memory
from sonicmoe.reference import layer as reference
from sonicmoe.shapes import Problem
from sonicmoe.tools.values import Tensors, shaped

# With a clamp of other constants than those of gpt-oss, and caps that bend what inputs reach.
SOFT_CAPPED = ActivationType.soft_capped_swiglu(4.0, 25.0)  # Inkling 2's
ACTIVATIONS = (
    *ActivationType,
    ActivationType.clamped_swiglu(3.0),
    ActivationType.soft_capped_swiglu(1.5, 2.5),
)
GATED = tuple(a for a in ACTIVATIONS if a.is_gated)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SLACK = 1.1


# --- the error budget -----------------------------------------------------------------------------
def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """‖got − exact‖ / ‖exact‖ in fp64; an exact zero must be met exactly."""
    assert got.shape == exact.shape, f"{tuple(got.shape)} for {tuple(exact.shape)}"
    size = exact.norm().item()
    error = (got.double() - exact).norm().item()
    return error / size if size else (0.0 if error == 0 else math.inf)


def floor(dtype: torch.dtype, tokens: int) -> float:
    """What two right answers may differ by, beside the factor.

    Roundings are random: an error measured on n tokens scatters by 1/√n, here of half a rounding
    step (one token: half a step; 24576 tokens: a hundredth of what plain PyTorch errs). In fp32 the
    order of summation dominates, and a sum of some hundred terms in another order errs by a few
    steps more; tf32 would err by thousands.
    """
    eps = torch.finfo(dtype).eps
    return eps * max(0.5 / math.sqrt(max(tokens, 1)), 4 if dtype == torch.float32 else 0)


def budget(
    ours: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
    *,
    name: str = "result",
    dtype: torch.dtype | None = None,
    tokens: int | None = None,
) -> None:
    """Ours errs against fp64 at most 1.1 times as much as plain PyTorch does. NaN never passes.

    `dtype` is the dtype of the data where the result is held wider, as score gradients are;
    `tokens` is how many the result was computed from where that is not its first dimension.
    """
    rounding = floor(dtype or ours.dtype, exact.shape[0] if tokens is None else tokens)
    allowed = SLACK * relative_error(plain, exact) + rounding
    error = relative_error(ours, exact)
    assert error <= allowed, f"{name}: relative error {error:.3e}, allowed {allowed:.3e}"


def written_out_loss(
    logits: torch.Tensor,
    counts: torch.Tensor | None,
    balance: float,
    z: float,
    upstream: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The auxiliary loss as docs/routing.md has it, and its gradient by autograd."""
    logits = logits.detach().requires_grad_()
    tokens, experts = logits.shape
    loss = z * logits.logsumexp(-1).square().sum() / max(tokens, 1)
    if counts is not None:
        share = logits.softmax(-1).sum(0) / max(tokens, 1)
        rows = counts.to(logits.dtype) / counts.sum().clamp_min(1)
        loss = loss + balance * experts * (share * rows).sum()
    (gradient,) = torch.autograd.grad(loss, logits, upstream)
    return loss.detach(), gradient


# --- routings -------------------------------------------------------------------------------------
def _distinct(weight: torch.Tensor, tokens: int, k: int, seed: torch.Generator) -> torch.Tensor:
    return weight.expand(tokens, -1).multinomial(k, generator=seed) if tokens else _no_ids(k)


def _no_ids(k: int) -> torch.Tensor:
    return torch.empty(0, k, dtype=torch.int64)


def _uniform(p: Problem, seed):
    return _distinct(torch.ones(p.E), p.T, p.K, seed)


def _zipf(p: Problem, seed):
    return _distinct(1.0 / torch.arange(1, p.E + 1), p.T, p.K, seed)


def _one_expert(p: Problem, seed):
    return torch.full((p.T, p.K), p.E // 2)


def _empty_experts(p: Problem, seed):
    """Nothing for the first expert, the last, and every one with an odd number."""
    busy = torch.tensor(list(range(2, p.E - 1, 2)) or [p.E // 2])
    return busy[torch.randint(len(busy), (p.T, p.K), generator=seed)]


def _all_experts(p: Problem, seed):
    return torch.rand(p.T, p.E, generator=seed).argsort(-1)[:, : p.K]


def _dropped(p: Problem, seed):
    """A third of the slots name an expert that is not here; the second token loses all of its."""
    ids = _uniform(p, seed)
    absent = torch.tensor([-1, p.E, p.E + 7, -(2**31), 2**31 - 1])
    absent = absent[torch.randint(5, ids.shape, generator=seed)]
    gone = torch.rand(ids.shape, generator=seed) < 1 / 3
    gone[1:2] = True
    return torch.where(gone, absent, ids)


def _duplicates(p: Problem, seed):
    return torch.randint(p.E, (p.T, p.K), generator=seed)


def _all_dropped(p: Problem, seed):
    return torch.full((p.T, p.K), -1)


ROUTINGS = {
    "uniform": _uniform,
    "zipf": _zipf,
    "one_expert": _one_expert,
    "empty_experts": _empty_experts,
    "all_experts": _all_experts,
    "dropped": _dropped,
    "duplicates": _duplicates,
    "all_dropped": _all_dropped,
}


# --- cases and inputs -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """One call of the layer: `shape` is T,H,I,E,K; `transposed` stores the weights as (E, K, N);
    `values` is their distribution."""

    shape: str
    dtype: torch.dtype = torch.bfloat16
    activation: ActivationType = ActivationType.SWIGLU
    bias: bool = False
    gate_up: str = "interleaved"
    transposed: bool = False
    routing: str = "zipf"
    seed: int = 0
    values: str = "gaussian"

    @property
    def problem(self) -> Problem:
        return Problem.parse(self.shape, self.activation.is_gated)

    @property
    def options(self) -> dict:
        return {"activation": self.activation, "gate_up": self.gate_up}

    def __str__(self) -> str:
        words = [self.shape, self.activation.value, str(self.dtype).removeprefix("torch.")]
        words += ["bias"] if self.bias else []
        words += [self.gate_up] if self.activation.is_gated else []
        words += ["ekn" if self.transposed else "enk", self.routing]
        words += [self.values] if self.values != "gaussian" else []
        return "-".join(words)


def matrix(shape: str, dtypes=DTYPES, **options) -> list[Case]:
    """Every activation × dtype × bias × gate/up layout × weight storage."""
    return [
        Case(shape, dtype, activation, bias, gate_up, transposed, **options)
        for activation in ACTIVATIONS
        for dtype in dtypes
        for bias in (False, True)
        for gate_up in (
            ("interleaved", "concatenated") if activation.is_gated else ("interleaved",)
        )
        for transposed in (False, True)
    ]


@dataclass
class Inputs:
    """What `experts` takes, in its order, and the gradient that comes from above."""

    x: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    dout: torch.Tensor
    differentiable: tuple[str, ...] = field(default=("x", "scores", "w1", "w2", "b1", "b2"))

    def arguments(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)[:7]}

    def double(self) -> "Inputs":
        """The same values in fp64."""
        wide = {
            name: t.double()
            for name, t in {**self.arguments(), "dout": self.dout}.items()
            if t is not None and t.is_floating_point()
        }
        return replace(self, **wide)


def make_inputs(case: Case, device: str = "cpu") -> Inputs:
    """Random inputs; with Gaussian values Z, A and O are of the order of one."""
    with torch.device("cpu"):  # the generator's, inside of another `torch.device` too
        return _make_inputs(case, device)


def _make_inputs(case: Case, device: str) -> Inputs:
    p, seed = case.problem, torch.Generator().manual_seed(case.seed)
    gain = case.activation.clamp.limit - 1.0 if case.activation.clamp else 1.0  # reach the clamp

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=seed) * scale

    def weight(n, k, scale):
        return (
            normal(p.E, k, n, scale=scale).mT if case.transposed else normal(p.E, n, k, scale=scale)
        )

    def rounded(t):
        return t.to(device=device, dtype=case.dtype)

    x = normal(p.T, p.H)
    ids = ROUTINGS[case.routing](p, seed).to(device=device, dtype=torch.int32)
    scores = p.K * normal(p.T, p.K).softmax(-1)
    weights = weight(p.N, p.H, gain / math.sqrt(p.H)), weight(p.H, p.I, 1 / math.sqrt(p.I))
    b1, b2 = (rounded(normal(p.E, n, scale=0.5)) if case.bias else None for n in (p.N, p.H))
    drawn = shaped(case.values, Tensors(x, *weights, normal(p.T, p.H), scores), seed)
    w1, w2 = (w.mT.contiguous().mT if case.transposed else w for w in drawn[1:3])
    inputs = Inputs(
        rounded(drawn.x), ids, drawn.scores.to(device), rounded(w1), rounded(w2), b1, b2,
        rounded(drawn.dout),
    )  # fmt: skip
    while (near := _near_a_kink(case, inputs)).any():
        inputs.x[near] = rounded(normal(int(near.sum()), p.H))
    return inputs


def _kinks(activation: ActivationType) -> tuple[float, ...]:
    """Where the derivative jumps."""
    if activation.clamp:
        return -activation.clamp.limit, activation.clamp.limit
    return (0.0,) if activation in (ActivationType.RELU, ActivationType.REGLU) else ()


def _near_a_kink(case: Case, inputs: Inputs) -> torch.Tensor:
    """(T,): tokens that fp32 and fp64 may put on different sides of a jump.

    One such element in six million is an error of 3e-4 where fp32 is allowed 9e-7. The narrower
    dtypes have thousands of them, in plain PyTorch as many as in ours.
    """
    near = torch.zeros(len(inputs.x), dtype=torch.bool, device=inputs.x.device)
    kinks = _kinks(case.activation)
    if case.dtype != torch.float32 or not kinks:
        return near
    wide = inputs.double()
    for expert, w1 in enumerate(wide.w1):
        tokens = (inputs.ids == expert).any(-1).nonzero().squeeze(-1)
        z = wide.x[tokens] @ w1.mT + (0 if wide.b1 is None else wide.b1[expert])
        for kink in kinks:
            near[tokens] |= ((z - kink).abs() < 2e-5).any(-1)
    return near


# --- running and comparing ------------------------------------------------------------------------
def run(layer, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The output as "out" and every gradient as "d" + the argument's name."""
    given = inputs.arguments()
    for name in inputs.differentiable:
        if given[name] is not None:
            given[name] = given[name].detach().requires_grad_()
    out = layer(**given)
    leaves = {n: given[n] for n in inputs.differentiable if given[n] is not None}
    grads = torch.autograd.grad(out, list(leaves.values()), inputs.dout)
    return {"out": out.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


def ours(case: Case, backend: str | None):
    return partial(sonicmoe.experts, backend=backend, **case.options)


def plain(case: Case):
    """The layer in plain PyTorch, differentiated by autograd."""
    return partial(
        reference.experts,
        activation=case.activation,
        gate_up=case.gate_up,
    )


def compare(got: dict, rough: dict, exact: dict, dtype: torch.dtype) -> None:
    """Every result in `got` within the budget that `rough` sets against `exact`."""
    tokens = len(exact["out"])
    for name in got:
        budget(got[name], rough[name], exact[name], name=name, dtype=dtype, tokens=tokens)


def check_experts(case: Case, device: str = "cpu", backend: str | None = None) -> None:
    """`experts` and all of its gradients within the budget, in memory full of NaN."""
    found: list[tuple[dict, dict, dict]] = []
    # The error of a single score gradient, a sum that may cancel, scatters by a factor of 100.
    seeds = 8 if case.dtype == torch.float32 and case.problem.T == 1 else 1
    for seed in range(case.seed, case.seed + seeds):
        inputs = make_inputs(replace(case, seed=seed), device)
        got = run_poisoned(partial(run, ours(case, backend), inputs), device)
        found.append((got, run(plain(case), inputs), run(plain(case), inputs.double())))
        for name in ("w1", "w2"):
            assert got[f"d{name}"].stride() == getattr(inputs, name).stride(), f"layout of d{name}"
        check_zeros(got, inputs)
    got, rough, exact = (
        {name: torch.cat([results[name] for results in each]) for name in each[0]}
        for each in zip(*found, strict=True)
    )
    compare(got, rough, exact, case.dtype)


def check_main_grad(case: Case, device: str = "cpu", backend: str | None = None) -> None:
    """Two backward passes into fp32 buffers, against gradients added up outside."""
    inputs = make_inputs(case, device)
    rough, exact = run(plain(case), inputs), run(plain(case), inputs.double())
    given, began = inputs.arguments(), {}
    for name in ("w1", "w2"):
        given[name] = torch.nn.Parameter(given[name])
        given[name].main_grad = torch.randn_like(given[name], dtype=torch.float32)
        began[name] = given[name].main_grad.clone()
    for _ in range(2):
        with poisoned():
            ours(case, backend)(**given).backward(inputs.dout)
    for name, begin in began.items():
        assert given[name].grad is None
        outside = begin + rough[f"d{name}"] + rough[f"d{name}"]
        budget(
            given[name].main_grad - begin, outside - begin, 2 * exact[f"d{name}"],
            name=name, dtype=case.dtype, tokens=len(exact["out"]),
        )  # fmt: skip


def check_fp32_weights(case: Case, device: str = "cpu", backend: str | None = None) -> None:
    """Under autocast, weights of fp32 have the gradients of rounded ones, before their rounding."""
    inputs = make_inputs(case, device)
    want = run(ours(case, backend), inputs)
    for name in ("w1", "w2"):
        setattr(inputs, name, getattr(inputs, name).float())
    with poisoned(), torch.autocast(device, case.dtype):
        got = run(ours(case, backend), inputs)
    for name in ("dw1", "dw2"):
        assert got[name].dtype == torch.float32
        assert got[name].stride() == want[name].stride()
        rounded = got[name].to(case.dtype)
        assert (got[name] != rounded).any()
        got[name] = rounded
    same_bits(want, got)


def check_zeros(got: dict, inputs: Inputs) -> None:
    """Experts without rows and slots without an expert have gradients that are exactly zero."""
    experts = inputs.w1.shape[0]
    here = (inputs.ids >= 0) & (inputs.ids < experts)
    counts = torch.bincount(inputs.ids[here].flatten().long(), minlength=experts)
    for name in ("dw1", "dw2", "db1", "db2"):
        if name in got:
            assert (got[name][counts == 0] == 0).all(), f"{name} of an empty expert"
    assert (got["dscores"][~here] == 0).all()
    for name in ("out", "dx"):
        assert (got[name][~here.any(-1)] == 0).all(), f"{name} of a token without experts"


def same_bits(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(bits(a[name]), bits(b[name])), f"{name} differs between two runs"


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaN equals itself and −0 does not equal 0."""
    return t.reshape(-1).contiguous().view(torch.uint8) if t.dtype.is_floating_point else t


# --- poisoned memory ------------------------------------------------------------------------------
def _poison(t: torch.Tensor) -> torch.Tensor:
    if t.dtype.is_floating_point:
        return t.fill_(math.nan)
    return t.fill_(True if t.dtype == torch.bool else torch.iinfo(t.dtype).max // 2)


@contextlib.contextmanager
def poisoned():
    """Every buffer that the operators allocate starts as NaN, or as an index far out of range."""
    with contextlib.suppress(ImportError):  # lazy ones first: they would keep the poisoned names
        importlib.import_module("sonicmoe.launch.routing")
        importlib.import_module("sonicmoe.launch.grouped_gemm")
    replaced = []
    for name in ("empty", "empty_like"):
        original = getattr(memory, name)

        def allocate(*args, _original=original, **kwargs):
            return _poison(_original(*args, **kwargs))

        for module in [m for n, m in sys.modules.items() if n.startswith("sonicmoe.")]:
            if getattr(module, name, None) is original:
                replaced.append((module, name, original))
                setattr(module, name, allocate)
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def run_poisoned(step: Callable[[], dict], device: str) -> dict:
    """What `step` returns in poisoned memory; on a GPU a second time, from cached launches."""
    with poisoned():
        got = step()
        if device == "cuda":
            same_bits(got, step())
    return got
