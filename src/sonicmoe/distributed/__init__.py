"""Expert parallelism over torch.distributed: experts are spread over the ranks of a group."""

from .layer import Arrived, combine, dispatch, experts
from .module import ExpertParallelMoE, parallelize

__all__ = ["Arrived", "ExpertParallelMoE", "combine", "dispatch", "experts", "parallelize"]
