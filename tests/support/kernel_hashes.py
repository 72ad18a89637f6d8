"""Hash the layer's kernels as compiled for Hopper, to see without a GPU which a change touched.

    git worktree add ../before COMMIT
    PYTHONPATH=../before/src python tests/support/kernel_hashes.py before.json
    PYTHONPATH=src python tests/support/kernel_hashes.py after.json
    diff before.json after.json

Kernels with the same PTX compute the same bits. Takes three minutes on one core.
"""

import argparse
import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from machine_code import compiling

from sonicmoe import ActivationType, experts

# T, H, I, E, K
SEVERAL, ONE, FINE = (3000, 2048, 768, 16, 4), (3000, 2048, 768, 16, 1), (24576, 1536, 256, 128, 8)
MEMORY = ("keep", "fp8", "recompute")  # "fp8" is now "e4m3"; older commits know it too


class Layer(NamedTuple):
    sizes: tuple[int, ...] = SEVERAL
    dtype: torch.dtype = torch.bfloat16
    activation: str = "swiglu"
    gate_up: str = "interleaved"
    precision: str | None = None
    memory: str = "keep"
    biases: bool = False
    transposed: bool = False  # weights (E, K, N) in memory


LAYERS = [
    *(
        Layer(activation=activation, gate_up=gate_up, precision=precision, memory=memory)
        for (activation, gate_up), precision, memory in itertools.product(
            [("swiglu", "interleaved"), ("swiglu", "concatenated"), ("relu_sq", "interleaved")],
            [None, "fp8", "fp8_bf16_dw"],
            MEMORY,
        )
    ),
    *(Layer(dtype=dtype, biases=True) for dtype in (torch.float16, torch.float32)),
    *(Layer(precision=precision, transposed=True) for precision in (None, "fp8")),
    *(Layer(sizes, precision=precision) for sizes in (ONE, FINE) for precision in (None, "fp8")),
    Layer(gate_up="concatenated", biases=True, transposed=True),
]


def hashes(layer: Layer) -> dict[str, list[str]]:
    """SHA-256 of the PTX of each kernel of a training step, by the kernel's name."""
    (tokens, hidden, inner, number, k), act = layer.sizes, ActivationType(layer.activation)
    columns = 2 * inner if act.is_gated else inner

    def new(*shape: int, dtype: torch.dtype = layer.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

    def weights(n: int, k: int) -> torch.Tensor:
        return new(number, k, n).mT if layer.transposed else new(number, n, k)

    biases = (new(number, columns), new(number, hidden)) if layer.biases else (None, None)
    ids, scores = new(tokens, k, dtype=torch.int32), new(tokens, k, dtype=torch.float32)
    given = (new(tokens, hidden), ids, scores, weights(columns, hidden), weights(hidden, inner))
    options: dict[str, Any] = {
        "gate_up": layer.gate_up,
        "precision": layer.precision,
        "memory": layer.memory,
    }
    with compiling(90) as compiled:
        out = experts(*given, *biases, activation=act, backend="triton", **options)
        out.backward(torch.empty_like(out))
    found: dict[str, list[str]] = {}
    for kernel in compiled:
        code = hashlib.sha256(kernel.asm["ptx"].encode()).hexdigest()
        found.setdefault(kernel.metadata.name, []).append(code)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    triton.knobs.compilation.disable_line_info = True
    found = {}
    for number, layer in enumerate(LAYERS, 1):
        print(f"\r{number} of {len(LAYERS)} layers", end="", file=sys.stderr, flush=True)
        try:
            found[str(tuple(layer))] = hashes(layer)
        except ValueError as error:  # what the other commit refuses
            found[str(tuple(layer))] = {"error": [str(error)]}
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    codes = {code for kernels in found.values() for each in kernels.values() for code in each}
    print(f"\r{len(found)} layers, {len(codes)} kernels")


if __name__ == "__main__":
    main()
