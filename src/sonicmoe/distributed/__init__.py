"""Expert parallelism over torch.distributed: tokens travel to their experts and back."""

from .layer import Arrived, combine, dispatch, experts
from .module import ExpertParallelMoE, parallelize

__all__ = ["Arrived", "ExpertParallelMoE", "combine", "dispatch", "experts", "parallelize"]
