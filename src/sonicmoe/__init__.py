"""SonicMoE: Mixture-of-Experts layers for training language models on GPUs."""

from . import enums as enums
from . import installation as installation  # raises where files of sonic-moe are among ours
from .enums import ActivationType, KernelBackendMoE
from .functional import (
    experts,
    grouped_experts,
    moe_general_routing_inputs,
    moe_TC_softmax_topk_layer,
    topk_scores,
)
from .integrations.report import report
from .layer.fp8_weights import Fp8Weights
from .layer.memory import MemoryPolicy
from .moe import Experts, MoE
from .tools.warmup import warmup
from .watch import watch

__version__ = "0.1.0"

__all__ = [
    "ActivationType",
    "Experts",
    "Fp8Weights",
    "KernelBackendMoE",
    "MemoryPolicy",
    "MoE",
    "experts",
    "grouped_experts",
    "moe_TC_softmax_topk_layer",
    "moe_general_routing_inputs",
    "report",
    "topk_scores",
    "warmup",
    "watch",
]
