"""Compile kernels for a GPU that is not there, and read the machine code.

`compiling(arch)` turns every kernel launch in its scope into a compilation for that architecture
and yields the list of compiled kernels: the launch code runs as it is, on CPU tensors.
`naming(arch)` compiles nothing, for tests that ask only whether two launches share a kernel.
"""

import contextlib
import gc
import os
import re
import struct
import subprocess
import tempfile
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from sonicmoe.launch import grouped_gemm
from sonicmoe.tuning import Target

PROCESSORS = 132
_INSTRUCTIONS = {
    "mma": r"\bmma\.sync\.",
    "wgmma": r"\bwgmma\.mma_async\.",
    "tcgen05": r"\btcgen05\.mma\.",
    "TMA loads": r"\bcp\.async\.bulk\.tensor\.[\w.:]*shared::\w+\.global",
}


class _AbsentDevice:
    """The part of a Triton driver that compilation asks for."""

    def __init__(self, arch: int, compiles: bool):
        self.arch, self.compiles = arch, compiles

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch, self.compiles  # what Triton caches kernels by

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


@contextlib.contextmanager
def naming(arch: int):
    """As `compiling`, with placeholders: one for each kernel that would be compiled."""

    def placeholder(self, key, signature, device, *of_compiler):
        kernel = SimpleNamespace(metadata=SimpleNamespace(name=self.fn.__name__))
        self.device_caches[device][0][key] = kernel
        return kernel

    compile_kernel, JITFunction._do_compile = JITFunction._do_compile, placeholder
    try:
        with compiling(arch, compiles=False) as named:
            yield named
    finally:
        JITFunction._do_compile = compile_kernel


@contextlib.contextmanager
def compiling(arch: int, compiles: bool = True):
    compiled = []
    run, target_of, active = JITFunction.run, grouped_gemm.target_of, driver._active

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    gc.disable()  # 4% of the time: the compiler makes many objects, and no cycles worth collecting
    driver.set_active(_AbsentDevice(arch, compiles))
    JITFunction.run = compile_only
    grouped_gemm.target_of = lambda t: Target(arch, PROCESSORS)
    try:
        yield compiled
    finally:
        JITFunction.run, grouped_gemm.target_of = run, target_of
        driver._active = active
        gc.enable()


def report(compiled) -> dict[str, int]:
    """Counts of telling instructions, bytes of code, registers and memory of one kernel.

    Instructions are counted in PTX, where tensor cores and TMA have the ones they have in machine
    code: a disassembler takes longer than the compiler. `test_machine_code` compares it with one.
    """
    ptx = compiled.asm["ptx"]
    counts = {name: len(re.findall(pattern, ptx)) for name, pattern in _INSTRUCTIONS.items()}
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", cuobjdump(compiled, "-res-usage")))
    return counts | {
        "bytes": _code_size(compiled.asm["cubin"]),
        "registers": int(usage["REG"]),
        "spills": int(usage["STACK"]) + int(usage["LOCAL"]),
        "shared": compiled.metadata.shared,
    }


def cuobjdump(compiled, flag: str) -> str:
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return subprocess.run(
            [tool, flag, cubin.name], capture_output=True, text=True, check=True
        ).stdout


def _code_size(cubin: bytes) -> int:
    """Bytes in the sections .text.* of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry) for i in range(count)]
    name_table = sections[names][4]
    return sum(
        size
        for name, _, _, _, _, size in sections
        if cubin.startswith(b".text.", name_table + name)
    )


def bounds_from_outside(compiled) -> list[str]:
    """Inner loops whose bound depends on a value that was loaded before the loop around them.

    The kernels have none. Triton 3.6 drops a carried value that only the bound of an inner loop
    reads, and uses its first value: then one warpgroup walks over other rows than the next, and
    both wait for ever.
    """
    operands: dict[str, tuple[list[str], bool]] = {}  # of each value; whether it is loaded
    loops: list[tuple[int, set[str]]] = []  # indentation, and what is made inside
    found = []

    def loaded_outside(value: str, inside: set[str]) -> bool:
        sources, is_loaded = operands.get(value, ([], False))
        if value not in inside:
            return is_loaded or any(loaded_outside(source, inside) for source in sources)
        return not is_loaded and any(loaded_outside(source, inside) for source in sources)

    for line in compiled.asm["ttgir"].splitlines():
        indent = len(line) - len(line.lstrip())
        while loops and line.strip() and indent <= loops[-1][0]:
            loops.pop()
        loop = re.search(r"scf\.for (%\w+) = (%\w+)(?:#\d+)? to (%\w+)(?:#\d+)? step", line)
        if loop:
            if loops and any(loaded_outside(bound, loops[-1][1]) for bound in loop.group(2, 3)):
                found.append(line.strip())
            carried = re.findall(r"(%\w+) = %", line.partition("iter_args(")[2])
            inner = {loop.group(1), *carried}
            loops.append((indent, set()))
            for _, inside in loops:
                inside |= inner
            operands |= dict.fromkeys(inner, ([], False))
        elif made := re.match(r"\s*(%\w+)(?::\d+)? = (\S+) ?([^:{]*)", line):
            name, operation, arguments = made.groups()
            for _, inside in loops:
                inside.add(name)
            operands[name] = re.findall(r"%\w+", arguments), operation == "tt.load"
    return found
