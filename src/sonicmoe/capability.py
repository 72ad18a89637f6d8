"""What a GPU's compute capability allows: the one place for the layer and for the cost model.

`arch` is the compute capability × 10, 90 for Hopper.
"""

from .errors import bad_argument


def check_fp8_experts(arch: int, remedy: str = "Leave precision out.") -> None:
    """For precision="fp8", whose kernels are for Hopper. The arch of AMD GPUs is 0."""
    if arch != 90:
        expected = "None on a GPU other than Hopper (compute capability 9.0)"
        got = f"FP8 on compute capability {arch / 10}" if arch else "FP8 on an AMD GPU"
        raise bad_argument("precision", expected, got, remedy)


def check_z_in_fp8(arch: int) -> None:
    """For `MemoryPolicy("e4m3")`, where Z is rounded in the epilogue of a GEMM."""
    if arch < 89:
        raise bad_argument(
            "memory",
            "'keep' or 'recompute' on a GPU without e4m3",
            f"'e4m3' on compute capability {arch / 10}",
            "'recompute' keeps less than 'fp8'.",
        )
