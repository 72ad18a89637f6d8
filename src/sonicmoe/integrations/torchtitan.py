"""torchtitan overrides: pass one of these functions to `--override.imports`.

`experts` leaves every parameter as it is. torchtitan has one parameter for gate and one for up,
our GEMM reads one tensor, so each call concatenates them: 8·E·F·D bytes of traffic in the forward
pass, as many for the two gradients, and a copy of 4·E·F·D bytes kept for the backward pass.
`fused_experts` copies nothing: it uses torchtitan's own fused parameter `w13`, in which gate and up
rows are interleaved. Model checkpoints stay torchtitan's; the optimizer state is that of `w13`.
"""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from ..extras import missing
from ..functional import grouped_experts

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.overrides.fused_swiglu import FusedGroupedExperts, fused_grouped_experts
except ImportError as error:
    raise missing("torchtitan", "sonicmoe.integrations.torchtitan") from error


class Experts(GroupedExperts):
    """torchtitan's `GroupedExperts` and its parameters, computed by `grouped_experts` in bf16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD, num_tokens_per_expert_E):
        gate, up, down = _local(self.w1_EFD, self.w3_EFD, self.w2_EDF)
        return _experts(
            x_RD, num_tokens_per_expert_E, torch.cat([gate, up], dim=1), down, "concatenated"
        )


class FusedExperts(FusedGroupedExperts):
    """torchtitan's `FusedGroupedExperts`: its w13 (E, F, 2, D) is our interleaved W1, uncopied."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedGroupedExperts.Config):
        pass

    def forward(self, x_RD, num_tokens_per_expert_E):
        w13, down = _local(self.w13, self.w2_EDF)
        return _experts(x_RD, num_tokens_per_expert_E, w13.flatten(1, 2), down, "interleaved")


@override(target=GroupedExperts.Config, exact=True, description="sonicmoe, parameters unchanged")
def experts(config: GroupedExperts.Config) -> Experts.Config:
    """Override that replaces `GroupedExperts` by `Experts`; no parameter changes."""
    return derive(config, Experts.Config)


@override(target=GroupedExperts.Config, exact=True, description="sonicmoe, gate and up fused")
def fused_experts(config: GroupedExperts.Config) -> FusedExperts.Config:
    """Override that replaces `GroupedExperts` by `FusedExperts`, with one parameter `w13`."""
    return derive(fused_grouped_experts(config), FusedExperts.Config)


def _local(*weights: torch.Tensor) -> list[torch.Tensor]:
    return [(w.to_local() if isinstance(w, DTensor) else w).bfloat16() for w in weights]


def _experts(x, counts, w1, w2, gate_up: str) -> torch.Tensor:
    return grouped_experts(x.bfloat16(), counts, w1, w2, gate_up=gate_up).type_as(x)
