"""torchtitan's experts, ours in its place, and the same layer written out for fp64."""

import torch
from helpers import budget
from torch.nn import functional as F
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

OVERRIDES = ("experts", "fused_experts")
NAMES = ("w1_EFD", "w2_EDF", "w3_EFD")
D, EXPERTS, TOP_K = 32, 4, 2


def layer_config(dispatcher=AllToAllTokenDispatcher) -> RoutedExperts.Config:
    return RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=D, hidden_dim=16, num_experts=EXPERTS),
        token_dispatcher=dispatcher.Config(num_experts=EXPERTS, top_k=TOP_K),
    )


def overridden(config, override: str):
    """As the trainer does it: by the path of a function."""
    imports: list = [f"sonicmoe.integrations.torchtitan.{override}"]
    assert len(apply_overrides(OverrideConfig(imports=imports), config)) == 1
    return config


def stock_and_ours(override: str) -> tuple[RoutedExperts, RoutedExperts]:
    """Both layers with the same weights, O(1) inside."""
    stock, ours = layer_config().build(), overridden(layer_config(), override).build()
    for weight in stock.inner_experts.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def by_stock_name(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of w13 (E, F, 2, D) as those of its two halves."""
    fused = gradients.pop("w13", None)
    if fused is not None:
        gradients |= {"w1_EFD": fused[:, :, 0], "w3_EFD": fused[:, :, 1]}
    return gradients


def written_out(x, counts, w1, w2, w3):
    """Expert by expert, as torchtitan defines it; nothing for rows beyond the counts."""
    parts, start = [], 0
    for e, count in enumerate(counts.tolist()):
        rows, start = x[start : start + count], start + count
        parts.append((F.silu(rows @ w1[e].T) * (rows @ w3[e].T)) @ w2[e].T)
    return torch.cat([*parts, torch.zeros_like(x[start:])])


def in_fp64(function, *leaves: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradient of every leaf, all from bf16 values as the layers see them."""
    wide = [leaf.detach().bfloat16().double().requires_grad_() for leaf in leaves]
    out = function(*wide)
    return [out.detach(), *torch.autograd.grad(out, wide, dout.double())]


def within_budget(ours: dict, stock: dict, exact: dict, tokens: int) -> None:
    """Ours errs against fp64 no more than torchtitan does."""
    assert ours.keys() == stock.keys() == exact.keys()
    for name, want in exact.items():
        budget(ours[name], stock[name], want, name=name, dtype=torch.bfloat16, tokens=tokens)
