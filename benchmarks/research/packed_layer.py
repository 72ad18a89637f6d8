"""One layer with adapters on packed experts: its inputs, the result in fp64, and a step of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from sonicmoe import ActivationType, LowRank

RANK = 16
ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


class Layer(NamedTuple):
    """H, I, E, K; experts as those of Qwen3-30B, or as those of gpt-oss."""

    sizes: tuple[int, int, int, int]
    like_gpt_oss: bool = False

    @property
    def gate_up(self) -> str:
        return "interleaved" if self.like_gpt_oss else "concatenated"

    @property
    def activation(self) -> ActivationType:
        return ActivationType.SWIGLU_CLAMPED if self.like_gpt_oss else ActivationType.SWIGLU

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        H, I, E, _ = self.sizes
        return [(E, 2 * I, H), (E, H, I)]


LAYERS = {
    "qwen3-30b": Layer((2048, 768, 128, 8)),
    "gpt-oss-20b": Layer((2880, 2880, 32, 4), like_gpt_oss=True),
}


class Inputs(NamedTuple):
    """x (T, H), ids and scores (T, K), biases, adapters in PEFT's layout, and dO."""

    layer: Layer
    x: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    lora1: LowRank
    lora2: LowRank
    dout: torch.Tensor

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """What gets a gradient."""
        of_adapters = {"A1": self.lora1.a, "B1": self.lora1.b, "A2": self.lora2.a}
        return {"x": self.x, "scores": self.scores, **of_adapters, "B2": self.lora2.b}

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Copies in another dtype."""

        def other(t: torch.Tensor | None) -> Any:
            if t is None:
                return None
            return nn.Parameter(t.detach().to(dtype), requires_grad=t.requires_grad)

        made = {name: other(getattr(self, name)) for name in ("x", "scores", "b1", "b2", "dout")}
        for name in ("lora1", "lora2"):
            lora = getattr(self, name)
            made[name] = LowRank(other(lora.a), other(lora.b))
        return self._replace(**made)


def make_inputs(layer: Layer, tokens: int, device: torch.device, rank: int = RANK) -> Inputs:
    H, I, E, K = layer.sizes
    torch.manual_seed(0)

    def new(*shape: int, scale: float = 1.0, trained: bool = True) -> nn.Parameter:
        t = torch.randn(*shape, device=device, dtype=torch.bfloat16) * scale
        return nn.Parameter(t, requires_grad=trained)

    b1 = b2 = None
    if layer.like_gpt_oss:
        b1, b2 = new(E, 2 * I, trained=False), new(E, H, trained=False)
    scores, ids = torch.rand(tokens, E, device=device).softmax(1).topk(K, 1)
    lora1, lora2 = (
        LowRank(new(rank * E, k, scale=k**-0.5), new(n, rank * E, scale=0.1))
        for _, n, k in layer.shapes
    )
    x, dout = new(tokens, H), new(tokens, H, trained=False)
    return Inputs(layer, x, ids, nn.Parameter(scores), b1, b2, lora1, lora2, dout)


def activate(z: torch.Tensor, like_gpt_oss: bool) -> torch.Tensor:
    """SwiGLU of concatenated columns, or the clamped one of interleaved columns."""
    if not like_gpt_oss:
        gate, up = z.chunk(2, -1)
        return F.silu(gate) * up
    gate, up = z[..., ::2].clamp(max=LIMIT), z[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


def of_experts(lora: LowRank, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (E, r, in) and B (E, out, r) of PEFT's layout."""
    a = lora.a.view(experts, -1, lora.a.shape[1])
    return a, lora.b.view(lora.b.shape[0], -1, experts).permute(2, 0, 1)


def by_experts(inputs: Inputs, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The layer on dense weights, one expert after the other, in the dtype of x."""
    i, experts = inputs, inputs.layer.sizes[2]
    (a1, b1), (a2, b2) = (of_experts(lora, experts) for lora in (i.lora1, i.lora2))
    out = torch.zeros_like(i.x)
    for e in range(experts):
        token, slot = (i.ids == e).nonzero(as_tuple=True)
        rows, first, second = i.x[token], w1[e].to(out.dtype), w2[e].to(out.dtype)
        z = rows @ first.T + rows @ a1[e].T @ b1[e].T
        a = activate(z if i.b1 is None else z + i.b1[e], i.layer.like_gpt_oss)
        y = a @ second.T + a @ a2[e].T @ b2[e].T
        y = y if i.b2 is None else y + i.b2[e]
        out = out.index_add(0, token, y * i.scores[token, slot, None])
    return out


def step(inputs: Inputs, forward: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Output and gradients; a leaf without a gradient has NaN."""
    leaves = inputs.leaves
    for leaf in leaves.values():
        leaf.grad = None
    out = forward()
    out.backward(inputs.dout)
    nothing = torch.full((), torch.nan)
    found = {f"d{name}": nothing if t.grad is None else t.grad for name, t in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    return {"out": out.detach(), **found}


def errors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norm of the difference ÷ norm of what is wanted; NaN where nothing was computed."""

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        got = got.to(want.device, want.dtype)
        return ((got - want).norm() / want.norm()).item()

    return {name: round(error(found[name], want), 5) for name, want in wanted.items()}
