"""SonicMoE: Mixture-of-Experts layers for training language models on GPUs."""

from . import enums as enums
from . import extras as extras  # raises where files of sonic-moe are among ours
from .enums import ActivationType, KernelBackendMoE
from .functional import (
    experts,
    grouped_experts,
    moe_general_routing_inputs,
    moe_TC_softmax_topk_layer,
    topk_scores,
)
from .integrations.cuda_graphs import graphed
from .integrations.report import report
from .layer.fp8_weights import Fp8Weights
from .layer.lora import LowRank
from .layer.memory import MemoryPolicy
from .layer.options import OptionArguments
from .moe import Experts, MoE
from .packed import Fp8Blocks, Int4, Mxfp4, Nf4, PackedWeight
from .tools.warmup import warmup
from .watch import watch

__version__ = "0.2.0"

__all__ = [
    "ActivationType",
    "Experts",
    "Fp8Blocks",
    "Fp8Weights",
    "Int4",
    "KernelBackendMoE",
    "LowRank",
    "MemoryPolicy",
    "MoE",
    "Mxfp4",
    "Nf4",
    "OptionArguments",
    "PackedWeight",
    "experts",
    "graphed",
    "grouped_experts",
    "moe_TC_softmax_topk_layer",
    "moe_general_routing_inputs",
    "report",
    "topk_scores",
    "warmup",
    "watch",
]
