"""What the parts of `frameworks` are given, and what they return."""

import gc
import sys
from dataclasses import dataclass, replace

import torch

from sonicmoe.shapes import Problem
from sonicmoe.tools.cases import Case

from .results import Record

NAME = "sonicmoe_experts"


@dataclass(frozen=True, slots=True)
class Options:
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    tiny: bool = False  # sizes that a CPU likes
    steps: int = 20

    def sized(self, case: Case) -> Case:
        return replace(case, problem=Problem.parse("64,32,16,8,2")) if self.tiny else case


@dataclass(frozen=True, slots=True)
class Outcome:
    records: list[Record]
    failures: list[str]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
