"""What a layer keeps of Z for its backward pass, and how much of Y and dX̃ exists at once."""

from typing import NamedTuple

from .errors import bad_argument
from .shapes import ceil_div

Z_POLICIES = ("keep", "fp8", "recompute")
FP8_COLUMNS = 128  # columns of a row of Z or A that share one scale
_SLICE_COLUMNS = 64  # slices of H are multiples of it: TMA reads views that start on 16 bytes


class MemoryPolicy(NamedTuple):
    """How a layer trades memory for time or accuracy; `memory="fp8"` means `MemoryPolicy("fp8")`.

    z: "keep" keeps Z. "recompute" runs the up GEMM again in the backward pass: same bits. "fp8"
    keeps Z in e4m3 with a power-of-two scale per row and 128 columns: gradients err by 3 to 5% of
    their norm, in FP8 by 8 instead of 7%. It needs compute capability 8.9.
    slices: Y and the rows of dX exist in slices of H, multiples of 64 columns: same bits. No effect
    on rows that arrive sorted.
    """

    z: str = "keep"
    slices: int = 1


KEEP = MemoryPolicy()


def memory_policy(memory: str | MemoryPolicy) -> MemoryPolicy:
    """The policy that `memory` names, checked."""
    policy = MemoryPolicy(memory) if isinstance(memory, str) else memory
    if not isinstance(policy, MemoryPolicy) or policy.z not in Z_POLICIES:
        raise bad_argument(
            "memory",
            f"one of {', '.join(map(repr, Z_POLICIES))}, or a MemoryPolicy with such a z",
            repr(memory),
            "Import it: from sonicmoe import MemoryPolicy.",
        )
    if type(policy.slices) is not int or policy.slices < 1:
        expected, remedy = "a positive integer", "Use 4 where rows of dX make the peak."
        raise bad_argument("slices of memory", expected, repr(policy.slices), remedy)
    return policy


def slice_width(hidden: int, slices: int) -> int:
    """Columns of H in a slice; the last one may have fewer."""
    return min(hidden, _SLICE_COLUMNS * ceil_div(hidden, _SLICE_COLUMNS * slices))
