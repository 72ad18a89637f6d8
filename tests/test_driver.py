"""What reaches the driver is the same from a cached launch and from Triton's own.

A driver that writes down launches stands in for CUDA's; Triton builds its launcher against it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sonicmoe.launch import descriptors, launcher

STAND_IN = Path(__file__).parent / "support" / "driver_stand_in.c"
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
PARAMETERS = 10  # of the kernel below: a map, two sizes, two strides, the five others


@pytest.mark.skipif(not launcher._CACHED, reason="launches of this Triton are not cached")
@pytest.mark.skipif(
    not COMPILER or sys.platform != "linux",
    reason="no C compiler, without which Triton launches nothing either",
)
def test_the_driver_is_handed_the_same_both_ways(tmp_path):
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, STAND_IN],
        check=True,
    )
    (tmp_path / "libcuda.so").symlink_to(library)
    launches = tmp_path / "launches"
    changes = {
        "LD_LIBRARY_PATH": tmp_path,
        "TRITON_LIBCUDA_PATH": tmp_path,
        "TRITON_CACHE_DIR": tmp_path / "cache",
        "TRITON_INTERPRET": "0",
        "LAUNCHES": launches,
        "PARAMETERS": PARAMETERS,
    }
    env = os.environ | {name: str(value) for name, value in changes.items()}
    done = subprocess.run([sys.executable, __file__], env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    first, first_again, other, other_again = launches.read_text().splitlines()
    assert first == first_again and other == other_again and first != other
    assert first.startswith("grid 7 3 1 block 128 ") and " stream 0x9 " in first


def main() -> None:
    """Launch a kernel with arguments of every kind twice, then again with others like them."""
    import torch
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
    from triton.runtime.driver import driver

    hopper = CudaDriver.__new__(CudaDriver)  # its own way to begin asks PyTorch for a GPU
    hopper.utils, hopper.launcher_cls = CudaUtils(), CudaLauncher
    hopper.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    hopper.get_current_device = lambda: 0
    hopper.get_current_stream = lambda index: 9
    driver.set_active(hopper)

    @triton.jit
    def kernel(box, p, absent, n, m, scale, q, BLOCK: tl.constexpr, STORE: tl.constexpr):
        x = box.load([n, 0]).to(tl.float32) * scale + m
        tl.store(p + tl.arange(0, 16)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], x)
        if STORE:
            tl.store(q, n)

    def arguments(n: int, m: int, scale: float) -> tuple:
        rows = descriptors.descriptor(torch.zeros(48, 64, dtype=torch.bfloat16), [16, 64])
        return rows, torch.zeros(16, 64), None, n, m, scale, torch.zeros(4, dtype=torch.int32)

    bound = launcher.Bound(kernel, BLOCK=64, STORE=True)
    cached = None
    for args in (arguments(5, 48, 0.25), arguments(7, 32, 0.5)):
        own = [a[1].of(a[0]) if type(a) is tuple else a for a in args]
        compiled = kernel[(7, 3)](*own, **bound.options)
        cached = cached or launcher._compiled(bound, compiled, args)
        assert cached is not None
        cached.start((7, 3), 9, launcher.read(args, bound.unspecialized)[1])


if __name__ == "__main__":
    main()
