"""Check the output and every gradient against fp64, under random upstream gradients.

The error of a candidate may be at most `MARGIN` times that of plain PyTorch in the same dtype: of
every tensor in the Euclidean norm, and for the layer of this package also of single tokens, rows
and columns. Both references run one expert at a time, so that the largest cases fit beside their
inputs.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from ..reference.activation import activate
from .candidates import Candidate
from .inputs import Inputs
from .slices import ALONG, NAMES, QUANTILES, Slices, slices

# In 16 bits the rounding dominates, in fp32 the order of summation, which is not specified.
MARGIN = {2: 1.1, 4: 2.0, 8: 2.0}
PEER_MARGIN = 4.0
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Check:
    """Relative error (Frobenius) of one tensor against fp64, plain PyTorch's, and the allowed one.

    On top of the margin, an error measured on n values scatters by 1/√n of a rounding step; with
    outliers n may be 1. `slices` are the same for the median and the 90th percentile of its tokens,
    rows or columns. `wrong` counts those that are not exactly zero or finite and must be; `skipped`
    those that overflow in plain PyTorch or fp64.
    """

    tensor: str
    error: float
    plain: float
    allowed: float
    slices: list["Check"] = field(default_factory=list)
    wrong: int = 0
    skipped: int = 0

    @property
    def passed(self) -> bool:
        within = self.error <= self.allowed  # False for NaN
        return within and self.wrong == 0 and passed(self.slices)


def passed(checks: list[Check]) -> bool:
    return all(check.passed for check in checks)


def verify(
    candidate: Candidate,
    inputs: Inputs,
    *,
    peer: bool = False,
    margin: float | None = None,
    linear: Linear = F.linear,
) -> list[Check]:
    """One check for the output (`out`) and one for each leaf's gradient.

    A peer may break ties of the router differently and round more often: tokens whose choice
    depends on a tie are left out, its margin is wider, and single slices are not judged. `linear`
    computes the experts' GEMMs in plain PyTorch.
    """
    by_slice = not peer and margin is None
    outliers = inputs.values != "gaussian"
    if margin is None:
        margin = PEER_MARGIN if peer else MARGIN[inputs.x.element_size()]
    dout = inputs.dout
    judged = torch.ones(dout.shape[0], dtype=torch.bool, device=dout.device)
    if peer and candidate.router:
        judged = _untied(inputs)
        dout = dout * judged.unsqueeze(-1)
    out = candidate.forward()
    got = candidate.gradients(out, dout)
    out, got["x"] = out.detach()[judged], got["x"][judged]

    names = ("out", *candidate.leaves)
    errors = {name: ErrorOf(name, by_slice and name in ALONG, outliers) for name in names}
    with honest_gemms():
        exact = _Pass(candidate, inputs, dout, torch.float64)
        plain = _Pass(candidate, inputs, dout, inputs.x.dtype, linear)
        for e in range(inputs.case.problem.E):
            true, rounded = exact.expert(e), plain.expert(e)
            for name in true:
                errors[name].add(got[name][e], rounded[name], true[name])
        true, rounded = exact.finish(), plain.finish()
    for name in true:
        mine = out if name == "out" else got[name]
        if name in ("out", "x"):
            true[name], rounded[name] = true[name][judged], rounded[name][judged]
        errors[name].add(mine, rounded[name], true[name])
    step = torch.finfo(inputs.x.dtype).eps
    return [errors[name].check(margin, step) for name in names]


@contextlib.contextmanager
def honest_gemms() -> Iterator[None]:
    """Make plain PyTorch as exact as possible: no sums in 16 bits, no tf32."""
    flags = torch.backends.cuda.matmul
    names = (
        "allow_tf32",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
    )
    before = {name: getattr(flags, name) for name in names}
    try:
        for name in names:
            setattr(flags, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(flags, name, value)


def _untied(inputs: Inputs) -> torch.Tensor:
    """(T,) bool: the K-th and the next logit of the token differ."""
    k = inputs.case.problem.K
    if k == inputs.case.problem.E:
        return torch.ones(inputs.x.shape[0], dtype=torch.bool, device=inputs.x.device)
    with torch.no_grad():
        best = F.linear(inputs.x, inputs.router_w).topk(k + 1, dim=-1).values
    return best[:, k - 1] != best[:, k]


class ErrorOf:
    """Sums of squares: our deviation from fp64, plain PyTorch's, and fp64 itself.

    With outliers, slices that overflow in plain PyTorch or fp64 are left out.
    """

    def __init__(self, name: str, by_slice: bool = False, outliers: bool = False) -> None:
        self.name, self.by_slice, self.outliers = name, by_slice, outliers
        self.squares: torch.Tensor | float = 0.0
        self.values = 0
        self.parts: list[Slices] = []

    def add(self, got: torch.Tensor, plain: torch.Tensor, true: torch.Tensor) -> None:
        if self.by_slice or self.outliers:
            along = ALONG.get(self.name, -1)
            self.parts.append(slices(got, plain, true, along))
            if self.outliers:
                judged = self.parts[-1].judged
                got, plain, true = (
                    t.movedim(along, -1).reshape(-1, t.shape[along])[judged]
                    for t in (got, plain, true)
                )
        deviations = (got.double() - true, plain.double() - true, true)
        self.squares = self.squares + torch.stack([d.square().sum() for d in deviations])
        self.values += true.numel()

    def check(self, margin: float, step: float) -> Check:
        got, plain, true = torch.as_tensor(self.squares).sqrt().tolist()
        scale = true or 1.0
        scatter = max(self.values, 1) ** -0.5
        if self.outliers:  # the norm may depend on one value, in fp32 on the order of its sum
            scatter = 1.0 if step > 1e-6 else 4.0
        allowed = margin * plain / scale + step * scatter
        found = Check(self.name, got / scale, plain / scale, allowed)
        if not self.parts:
            return found
        every = Slices.cat(self.parts)
        if self.outliers and not every.comparable:
            found = replace(found, allowed=math.inf)
        return replace(
            found,
            slices=self._slices(every, margin, step),
            wrong=every.wrong(),
            skipped=every.skipped if self.outliers else 0,
        )

    def _slices(self, every: Slices, margin: float, step: float) -> list[Check]:
        if not self.by_slice or not every.comparable:
            return []
        scatter = max(len(every.judged), 1) ** -0.5
        if self.outliers:  # errors of slices then differ by far more than a step
            margin += 2 * scatter
        what = NAMES[self.name]
        return [
            Check(f"{self.name}, {word} {what}", mine, plain, margin * plain + step * scatter)
            for word, (mine, plain) in zip(QUANTILES.values(), every.quantiles(), strict=True)
        ]


class _Pass:
    """The layer in one dtype, an expert at a time, forward and backward. Scores at least fp32."""

    def __init__(
        self,
        candidate: Candidate,
        inputs: Inputs,
        dout: torch.Tensor,
        dtype: torch.dtype,
        linear: Linear = F.linear,
    ) -> None:
        self.candidate, self.inputs, self.dtype, self.linear = candidate, inputs, dtype, linear
        self.x = inputs.x.detach().to(dtype)
        self.dout = dout.to(dtype)
        self.out, self.dx = torch.zeros_like(self.x), torch.zeros_like(self.x)
        ids = inputs.router_ids if candidate.router else inputs.ids
        self.slots = ids.flatten().argsort(stable=True)
        self.ends = ids.flatten().bincount(minlength=inputs.case.problem.E).cumsum(0).tolist()
        if candidate.router:
            self.route_leaves = [
                t.detach().to(dtype).requires_grad_() for t in (inputs.x, inputs.router_w)
            ]
            self.scores = self._routed(ids.long())
        else:
            self.scores = inputs.scores.to(torch.promote_types(dtype, torch.float32))
        self.dscores = torch.zeros_like(self.scores)

    def _routed(self, ids: torch.Tensor) -> torch.Tensor:
        """The scores of the given choice, so that near-ties do not change the selected experts."""
        logits = F.linear(*self.route_leaves).to(torch.promote_types(self.dtype, torch.float32))
        if self.inputs.case.router == "topk_over_softmax":
            return logits.softmax(-1).gather(1, ids)
        if self.inputs.case.router == "sigmoid":
            return F.normalize(logits.gather(1, ids).sigmoid(), p=1, dim=-1)
        return logits.gather(1, ids).softmax(-1)

    def expert(self, e: int) -> dict[str, torch.Tensor]:
        """Add expert e to the output and to dX; returns the gradients of its weights."""
        slots = self.slots[self.ends[e - 1] if e else 0 : self.ends[e]]
        token = slots // self.inputs.case.problem.K
        named = {
            "w1": self.inputs.w1,
            "w2": self.inputs.w2,
            "b1": self.inputs.b1,
            "b2": self.inputs.b2,
        }
        weights = {
            name: t[e].detach().to(self.dtype).requires_grad_()
            for name, t in named.items()
            if t is not None
        }
        x = self.x[token].requires_grad_()
        score = self.scores.detach().flatten()[slots].requires_grad_()
        z = self.linear(x, weights["w1"], weights.get("b1"))
        a = activate(z, self.inputs.case.activation, self.candidate.gate_up)
        y = self.linear(a, weights["w2"], weights.get("b2"))
        weighted = (score.unsqueeze(-1) * y).to(self.dtype)
        dx, dscore, *found = torch.autograd.grad(
            weighted, (x, score, *weights.values()), self.dout[token]
        )
        self.out.index_add_(0, token, weighted.detach())
        self.dx.index_add_(0, token, dx)
        self.dscores.view(-1)[slots] = dscore
        return dict(zip(weights, found, strict=True))

    def finish(self) -> dict[str, torch.Tensor]:
        """The output and the gradients of whole tensors, once every expert has added its part."""
        if not self.candidate.router:
            return {"out": self.out, "x": self.dx, "scores": self.dscores}
        dx, drouter = torch.autograd.grad(self.scores, self.route_leaves, self.dscores)
        return {"out": self.out, "x": self.dx + dx, "router_w": drouter}
