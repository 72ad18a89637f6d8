"""A step as one CUDA graph, as a trainer may capture both passes itself."""

from collections.abc import Callable
from typing import TypeVar

import torch

Found = TypeVar("Found")


def captured(step: Callable[[], Found]) -> tuple[torch.cuda.CUDAGraph, Found]:
    """A graph of `step`, and what a replay writes to. Runs it first, in a stream of its own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found
