"""Expert parallelism over torch.distributed: experts are spread over the ranks of a group."""

from .clip import clip_grad_norm_, grad_norm
from .layer import Arrived, combine, dispatch, experts
from .module import ExpertParallelMoE, parallelize
from .whole_model import parallelize_model

__all__ = [
    "Arrived",
    "ExpertParallelMoE",
    "clip_grad_norm_",
    "combine",
    "dispatch",
    "experts",
    "grad_norm",
    "parallelize",
    "parallelize_model",
]
