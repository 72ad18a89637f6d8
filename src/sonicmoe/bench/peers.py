"""Others, measured beside us on the same inputs: the dense limit, PyTorch, ScatterMoE.

The published SonicMoE shares our import name and lives in a process of its own: `published`.
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..enums import ActivationType
from ..shapes import Problem
from .inputs import Inputs
from .subjects import Subject, leaves_of
from .timing import is_cuda

DENSE = "dense"


def dense_products(
    p: Problem, device: str | torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Batched products of the same FLOPs with perfectly even experts, named as in `products`."""
    rows = max(1, p.R // p.E)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(p.E, *shape, device=device, dtype=dtype)

    x, w1, a, w2 = random(rows, p.H), random(p.H, p.N), random(rows, p.I), random(p.I, p.H)
    dz, dy = random(rows, p.N), random(rows, p.H)
    return {
        "up": lambda: torch.bmm(x, w1),
        "down": lambda: torch.bmm(a, w2),
        "dz": lambda: torch.bmm(dy, w2.mT),
        "dw2": lambda: torch.bmm(a.mT, dy),
        "dx": lambda: torch.bmm(dz, w1.mT),
        "dw1": lambda: torch.bmm(x.mT, dz),
    }


def dense(
    p: Problem, device: str | torch.device, dtype: torch.dtype
) -> tuple[Callable[[], object], Callable[[], object]]:
    """All of these: forward, and with backward.

    No router, no gather, no activation, no aggregation: not a layer, a limit.
    """
    all_of_them = dense_products(p, device, dtype)

    def run(*names: str) -> None:
        for name in names:
            all_of_them[name]()

    return lambda: run("up", "down"), lambda: run(*all_of_them)


def grouped_mm(inputs: Inputs) -> Subject:
    """What PyTorch itself offers: gather, `grouped_mm`, compiled SwiGLU, `index_add_`."""
    i, p = inputs, inputs.case.problem
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm

    def swiglu(z: torch.Tensor) -> torch.Tensor:
        gate, up = z.chunk(2, -1)
        return F.silu(gate) * up

    activation = swiglu
    if is_cuda(i.x.device):
        torch.compiler.reset()  # after eight shapes the compiler would give up and run it eagerly
        activation = torch.compile(swiglu, dynamic=False)

    def forward() -> torch.Tensor:
        scores, ids = _routed(i)
        flat = ids.flatten()
        order = flat.argsort()
        ends = flat.bincount(minlength=p.E).cumsum(0).to(torch.int32)
        token = order // p.K
        z = product(i.x[token], i.w1.mT, offs=ends)
        y = product(activation(z), i.w2.mT, offs=ends)
        y = y * scores.flatten()[order].unsqueeze(-1).to(y.dtype)
        return torch.zeros_like(i.x).index_add_(0, token, y)

    leaves = leaves_of(inputs, router=True)
    return Subject("grouped_mm", True, forward, leaves, i.dout, concatenated=True)


def scattermoe(inputs: Inputs) -> Subject:
    from scattermoe.mlp import GLUMLP

    i, p = inputs, inputs.case.problem
    with torch.device(i.x.device):
        mlp = GLUMLP(p.H, p.I, p.E, p.K).to(i.x.dtype)
    mlp.experts.weight = torch.nn.Parameter(i.w1.detach())
    mlp.output_experts.weight = torch.nn.Parameter(i.w2.detach())

    def forward() -> torch.Tensor:
        scores, ids = _routed(i)
        return mlp(i.x, scores.to(i.x.dtype), ids)

    leaves = leaves_of(inputs, router=True)
    leaves |= {"w1": mlp.experts.weight, "w2": mlp.output_experts.weight}
    return Subject("scattermoe", True, forward, leaves, i.dout, concatenated=True)


def _routed(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    logits = F.linear(inputs.x, inputs.router_w)
    values, ids = logits.topk(inputs.case.problem.K, dim=-1)
    if inputs.case.router == "sigmoid":
        return F.normalize(values.float().sigmoid(), p=1, dim=-1), ids
    return values.float().softmax(-1), ids


PEERS = {"grouped_mm": grouped_mm, "scattermoe": scattermoe}


def comparable(inputs: Inputs) -> bool:
    """The peers compute the plain case alone: SwiGLU, no bias, scores that sum to one."""
    case = inputs.case
    plain = case.activation is ActivationType.SWIGLU and not case.bias
    return plain and case.router != "topk_over_softmax"


def available() -> list[str]:
    """The limit and the peers that can be imported here."""
    names = [DENSE, "grouped_mm"]
    return names + (["scattermoe"] if importlib.util.find_spec("scattermoe") else [])
