"""What a GPU's compute capability allows: the one place for the layer and for the cost model.

`arch` is the compute capability × 10, 90 for Hopper.
"""

from .errors import bad_argument


def runs_fp8_experts(arch: int) -> bool:
    """Whether the kernels of precision="fp8" are for such a GPU."""
    return arch == 90


def check_fp8_experts(arch: int) -> None:
    if not runs_fp8_experts(arch):
        expected = "None on a GPU other than Hopper (compute capability 9.0)"
        got, remedy = f"FP8 on compute capability {arch / 10}", "Leave precision out."
        raise bad_argument("precision", expected, got, remedy)


def check_z_in_fp8(arch: int) -> None:
    """For `MemoryPolicy("fp8")`, where Z is rounded in the epilogue of a GEMM."""
    if arch < 89:
        raise bad_argument(
            "memory",
            "'keep' or 'recompute' on a GPU without e4m3",
            f"'fp8' on compute capability {arch / 10}",
            "'recompute' keeps less than 'fp8'.",
        )
