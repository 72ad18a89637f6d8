"""What a layer keeps for its backward pass, and how much of Y and dX̃ exists at once.

The names of the policies occur here alone; everything below sees the dtype of Z and what is kept.
"""

from typing import NamedTuple

import torch

from ..errors import bad_argument, say_once
from ..tensors import E4M3

Z_POLICIES = ("keep", "e4m3", "recompute")
WEIGHT_POLICIES = ("keep", "recompute")


class MemoryPolicy(NamedTuple):
    """How a layer trades memory for time or accuracy; `memory="e4m3"` means `MemoryPolicy("e4m3")`.

    z: "keep" keeps Z. "recompute" runs the up GEMM again in the backward pass: same bits. "e4m3"
    keeps Z in e4m3 with a power-of-two scale per row and 128 columns: gradients err by 3 to 5% of
    their norm, in FP8 by 8 instead of 7%. It needs compute capability 8.9.
    slices: Y and the rows of dX exist in slices of H, multiples of 64 columns: same bits. No effect
    on rows that arrive sorted.
    weights: with `precision="fp8"`, "keep" keeps the transposed weights that a call quantizes until
    its backward pass: a byte for each weight. "recompute" quantizes them again there: same bits.
    So does z="recompute". No effect on weights that are kept from call to call.
    """

    z: str = "keep"
    slices: int = 1
    weights: str = "keep"

    @property
    def recompute(self) -> bool:
        return self.z == "recompute"

    @property
    def in_e4m3(self) -> bool:
        """Whether Z is kept in e4m3."""
        return self.z == "e4m3"

    @property
    def keeps_transposes(self) -> bool:
        """Whether the backward pass finds FP8 weights transposed."""
        return self.weights == "keep" and not self.recompute

    def z_dtype(self, data: torch.dtype) -> torch.dtype | None:
        """The dtype of Z as it is kept, None if it is recomputed."""
        if self.recompute:
            return None
        return E4M3 if self.in_e4m3 else data


KEEP = MemoryPolicy()


def in_words(policy: MemoryPolicy) -> str:
    """The policy as `repr` and reports show it."""
    words = policy.z if policy.slices == 1 else f"{policy.z} in {policy.slices} slices"
    return words if policy.weights == "keep" else f"{words}, weights {policy.weights}"


def memory_policy(memory: str | MemoryPolicy) -> MemoryPolicy:
    """The policy that `memory` names, checked."""
    policy = MemoryPolicy(memory) if isinstance(memory, str) else memory
    if isinstance(policy, MemoryPolicy) and policy.z == "fp8":
        say_once("memory='fp8' is now called 'e4m3': precision='fp8' is something else")
        policy = policy._replace(z="e4m3")
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
    if policy.weights not in WEIGHT_POLICIES:
        expected = " or ".join(map(repr, WEIGHT_POLICIES))
        remedy = "Use 'recompute' to save memory."
        raise bad_argument("weights of memory", expected, repr(policy.weights), remedy)
    return policy
