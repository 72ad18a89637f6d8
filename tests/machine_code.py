"""Compile kernels for a GPU that is not there, and read the machine code.

`compiling(arch)` turns every kernel launch in its scope into a compilation for that architecture
and yields the list of compiled kernels: the launch code runs as it is, on CPU tensors.
"""

import contextlib
import os
import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from sonicmoe.launch import grouped_gemm
from sonicmoe.tuning import Target

PROCESSORS = 132
_INSTRUCTIONS = ("HGMMA", "UTCHMMA", "HMMA", "LDGSTS", "UTMALDG", "UTMASTG", "LDL", "STL")


class _AbsentDevice:
    """The part of a Triton driver that compilation asks for."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch  # kernels are cached by device: one for each architecture

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


@contextlib.contextmanager
def compiling(arch: int):
    compiled = []
    run, target_of, active = JITFunction.run, grouped_gemm.target_of, driver._active

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(_AbsentDevice(arch))
    JITFunction.run = compile_only
    grouped_gemm.target_of = lambda t: Target(arch, PROCESSORS)
    try:
        yield compiled
    finally:
        JITFunction.run, grouped_gemm.target_of = run, target_of
        driver._active = active


def report(compiled) -> dict[str, int]:
    """Counts of telling instructions, registers, stack and shared memory of one kernel."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()

        def read(flag):
            return subprocess.run(
                [tool, flag, cubin.name], capture_output=True, text=True, check=True
            ).stdout

        code, usage = read("-sass"), read("-res-usage")
    counts = {name: len(re.findall(rf"\b{name}", code)) for name in _INSTRUCTIONS}
    counts["bytes"] = 16 * len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE))
    counts |= {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return counts | {"shared": compiled.metadata.shared}


def bounds_from_outside(compiled) -> list[str]:
    """Inner loops with a bound that is neither a constant nor made in the loop around them.

    The kernels have none. Triton 3.6 makes one where it takes a carried bound for its first value:
    then one warpgroup walks over other rows than the next, and both wait for ever.
    """
    constants = set(re.findall(r"(%[\w#]+) = arith\.constant", compiled.asm["ttgir"]))
    loops: list[tuple[int, set[str]]] = []  # indentation, and what is made inside
    found = []
    for line in compiled.asm["ttgir"].splitlines():
        indent = len(line) - len(line.lstrip())
        while loops and line.strip() and indent <= loops[-1][0]:
            loops.pop()
        loop = re.search(r"scf\.for (%\w+) = (%[\w#]+) to (%[\w#]+) step", line)
        made = set(re.findall(r"^\s*(%\w+)(?::\d+)? = ", line))
        for _, inside in loops:
            inside |= made
        if not loop:
            continue
        known = constants.union(*(inside for _, inside in loops))
        if loops and not {name.split("#")[0] for name in loop.group(2, 3)} <= known:
            found.append(line.strip())
        carried = re.findall(r"(%\w+) = %", line.partition("iter_args(")[2])
        for _, inside in loops:
            inside |= {loop.group(1), *carried}
        loops.append((indent, {loop.group(1), *carried}))
    return found
