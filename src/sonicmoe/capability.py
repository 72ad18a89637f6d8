"""Which options a GPU's compute capability allows, for the layer and the cost model.

`arch` is the compute capability × 10, 90 for Hopper.
"""

from .errors import bad_argument


def check_fp8_experts(arch: int, remedy: str = "Omit precision.") -> None:
    """Raise unless precision="fp8" can run: it needs Hopper. AMD GPUs have arch 0."""
    if arch != 90:
        expected = "None on a GPU other than Hopper (compute capability 9.0)"
        got = f"FP8 on compute capability {arch / 10}" if arch else "FP8 on an AMD GPU"
        raise bad_argument("precision", expected, got, remedy)


def check_z_in_e4m3(arch: int) -> None:
    """Raise unless `MemoryPolicy("e4m3")` can run: a GEMM's epilogue rounds Z to e4m3."""
    if arch < 89:
        raise bad_argument(
            "memory",
            "'keep' or 'recompute' on a GPU without e4m3",
            f"'e4m3' on compute capability {arch / 10}",
            "'recompute' keeps less than 'e4m3'.",
        )
