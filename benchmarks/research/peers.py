"""Other implementations of the layer, on the same inputs: PyTorch `grouped_mm` and ScatterMoE.

The published SonicMoE has the same import name as this package: see `published`.
"""

import importlib.util

import torch
import torch.nn.functional as F

from sonicmoe.enums import ActivationType
from sonicmoe.tools.candidates import Candidate, leaves_of
from sonicmoe.tools.inputs import Inputs

from .timing import is_cuda


def grouped_mm(inputs: Inputs) -> Candidate:
    """The layer from PyTorch's parts: gather, `grouped_mm`, compiled SwiGLU, `index_add_`."""
    i, p = inputs, inputs.case.problem
    gemm = getattr(F, "grouped_mm", None) or torch._grouped_mm

    def swiglu(z: torch.Tensor) -> torch.Tensor:
        gate, up = z.chunk(2, -1)
        return F.silu(gate) * up

    activation = swiglu
    if is_cuda(i.x.device):
        torch.compiler.reset()  # after eight shapes the compiler would fall back to eager
        activation = torch.compile(swiglu, dynamic=False)

    def forward() -> torch.Tensor:
        scores, ids = routed(i)
        flat = ids.flatten()
        order = flat.argsort()
        ends = flat.bincount(minlength=p.E).cumsum(0).to(torch.int32)
        token = order // p.K
        z = gemm(i.x[token], i.w1.mT, offs=ends)
        y = gemm(activation(z), i.w2.mT, offs=ends)
        y = y * scores.flatten()[order].unsqueeze(-1).to(y.dtype)
        return torch.zeros_like(i.x).index_add_(0, token, y)

    leaves = leaves_of(inputs, router=True)
    return Candidate("grouped_mm", True, forward, leaves, i.dout, gate_up="concatenated")


def scattermoe(inputs: Inputs) -> Candidate:
    from scattermoe.mlp import GLUMLP

    i, p = inputs, inputs.case.problem
    with torch.device(i.x.device):
        mlp = GLUMLP(p.H, p.I, p.E, p.K).to(i.x.dtype)
    mlp.experts.weight = torch.nn.Parameter(i.w1.detach())
    mlp.output_experts.weight = torch.nn.Parameter(i.w2.detach())

    def forward() -> torch.Tensor:
        scores, ids = routed(i)
        return mlp(i.x, scores.to(i.x.dtype), ids)

    leaves = leaves_of(inputs, router=True)
    leaves |= {"w1": mlp.experts.weight, "w2": mlp.output_experts.weight}
    return Candidate("scattermoe", True, forward, leaves, i.dout, gate_up="concatenated")


def routed(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    logits = F.linear(inputs.x, inputs.router_w)
    values, ids = logits.topk(inputs.case.problem.K, dim=-1)
    if inputs.case.router == "sigmoid":
        return F.normalize(values.float().sigmoid(), p=1, dim=-1), ids
    return values.float().softmax(-1), ids


PEERS = {"grouped_mm": grouped_mm, "scattermoe": scattermoe}


def comparable(inputs: Inputs) -> bool:
    """True if the peers compute this case: SwiGLU, no bias, scores that sum to one."""
    case = inputs.case
    plain = case.activation is ActivationType.SWIGLU and not case.bias
    return plain and case.router != "topk_over_softmax"


def available() -> list[str]:
    """The peers that can be imported on this machine."""
    return ["grouped_mm"] + (["scattermoe"] if importlib.util.find_spec("scattermoe") else [])
