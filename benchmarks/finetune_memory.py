"""Writes the table in docs/packed_models.md: memory of a LoRA step of whole models on one GPU.

    python benchmarks/finetune_memory.py

Weights, adapters and checkpoints follow from sizes; what one layer needs, and
`OVERHEAD`, are estimates.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sonicmoe.tensors import DECODED_BYTES
from sonicmoe.tools.cost import PACKED_BYTES
from sonicmoe.tools.tables import table

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "packed_models.md"
GIB = 2**30
LOGITS = 1024  # tokens whose logits are alive at a time
OVERHEAD = 2 * GIB  # CUDA and its libraries, and blocks that the caching allocator cannot reuse
_LAYER = 32  # bytes per element of X: attention and norms of the layer that is recomputed
# Of memory that a program can use, GiB; 192 GB: a B200 has less than its name says.
USABLE = {24: 23, 48: 44, 80: 79, 141: 139, 192: 178}


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model, whose MoE layers have experts of intermediate size `i`.

    `parameters`: of the whole model, without layers for multi-token prediction. `four_bit`: the
    format of its experts in 4 bits, in a file or by bitsandbytes.
    """

    name: str
    parameters: float
    layers: int
    moe_layers: int
    h: int
    i: int
    e: int
    k: int
    vocabulary: int
    four_bit: str = "NF4"
    tied: bool = False

    @property
    def experts(self) -> int:
        """Weights of all experts."""
        return self.moe_layers * 3 * self.h * self.i * self.e

    @property
    def embeddings(self) -> int:
        return (1 if self.tied else 2) * self.vocabulary * self.h

    def lora(self, rank: int) -> int:
        """Parameters of adapters on W1 (2I, H) and W2 (H, I) of every expert."""
        of_expert = rank * (self.h + 2 * self.i + self.i + self.h)
        return self.moe_layers * self.e * of_expert


# From the configurations and the numbers of parameters that the models are published with.
MODELS = (
    Model("gpt-oss-20b", 20.9e9, 24, 24, 2880, 2880, 32, 4, 201088, "MXFP4"),
    Model("Qwen3-30B-A3B", 30.5e9, 48, 48, 2048, 768, 128, 8, 151936),
    Model("Kimi-Linear-48B", 49.1e9, 27, 26, 2304, 1024, 256, 8, 163840),
    Model("Qwen3-Next-80B", 79.7e9, 48, 48, 2048, 512, 512, 10, 151936),
    Model("gpt-oss-120b", 116.8e9, 36, 36, 2880, 2880, 128, 4, 201088, "MXFP4"),
    Model("GLM-4.5-Air", 106.9e9, 46, 45, 4096, 1408, 128, 8, 151552),
    Model("Mixtral-8x22B", 140.6e9, 56, 56, 6144, 16384, 8, 2, 32768),
    Model("MiniMax-M2", 228.7e9, 62, 62, 3072, 1536, 256, 8, 200064),
    Model("Qwen3-235B-A22B", 235.1e9, 94, 94, 4096, 1536, 128, 8, 151936),
    Model("DeepSeek-V3", 671.0e9, 61, 58, 7168, 2048, 256, 8, 129280),
)


class Setting(NamedTuple):
    """Experts' format ("4-bit": that of the model), and how the adapters are trained."""

    name: str
    format: str
    tokens: int
    rank: int
    trained: int  # bytes per parameter of the adapters: weight, gradient and moments
    all_nf4: bool = False  # whether all other weights but embeddings are in nested NF4, too
    gpus: int = 1  # each with these tokens; FSDP2 shards all but the experts over them


_LEAN = 4096, 8, 6  # bf16, Adam in 8 bits
_ROOMY = 16384, 16, 16  # fp32
SETTINGS = (
    Setting("4-bit lean", "4-bit", *_LEAN),
    Setting("4-bit roomy", "4-bit", *_ROOMY),
    Setting("FP8 lean", "FP8", *_LEAN),
    Setting("bf16 lean", "bf16", *_LEAN),
    Setting("all in nested NF4, lean", "NF4, nested", *_LEAN, all_nf4=True),
    Setting("4-bit lean, each of 8", "4-bit", *_LEAN, gpus=8),
)


def step_bytes(m: Model, s: Setting) -> dict[str, float]:
    """Bytes of a LoRA step with checkpointed layers, part by part."""
    format = m.four_bit if s.format == "4-bit" else s.format
    if s.all_nf4 and m.four_bit == "MXFP4":  # a file's experts stay as they are
        format = m.four_bit
    others = m.parameters - m.experts
    rest = 2 * others
    if s.all_nf4:
        rest = 2 * m.embeddings + PACKED_BYTES["NF4, nested"] * (others - m.embeddings)
    rows, lora = s.tokens * m.k, m.lora(s.rank)
    of_layer = 2 * (others - m.embeddings) / m.layers + 4 * lora / m.moe_layers
    return {
        "experts": m.experts * (2 if format == "bf16" else PACKED_BYTES[format]),
        "other weights": rest / s.gpus,
        "adapters": lora * s.trained / s.gpus,
        # FSDP2's whole weights, and gradients of adapters: two layers and the embeddings, in bf16.
        "gathered": 2 * of_layer + 2 * m.embeddings if s.gpus > 1 else 0,
        "checkpoints": 2 * m.layers * s.tokens * m.h,
        # Z and dZ, A and A', and rows of dX, in bf16; then the rest of the layer.
        "layer": 2 * rows * (4 * m.i + 2 * m.i + m.h) + _LAYER * s.tokens * m.h,
        "logits": 2 * LOGITS * m.vocabulary,
        "decoded": 0 if format == "bf16" else DECODED_BYTES,
        "overhead": OVERHEAD,
    }


def smallest_gpu(size: float) -> int | None:
    """GB of the smallest GPU with this many bytes for a program; None if there is none."""
    fitting = [gpu for gpu, usable in USABLE.items() if size <= usable * GIB]
    return min(fitting, default=None)


def rows() -> tuple[tuple[str, ...], list[list[str]]]:
    """Head and rows of the table: GiB of a step, and the smallest GPU that it fits."""
    made = []
    for m in MODELS:
        cells = [m.name]
        for s in SETTINGS:
            size = sum(step_bytes(m, s).values())
            gpu = smallest_gpu(size)
            cells.append(f"{size / GIB:.0f} → " + (f"{gpu} GB" if gpu else "none"))
        made.append(cells)
    return ("model", *(s.name for s in SETTINGS)), made


def written(text: str) -> str:
    """The document with the table between its two markers."""
    marked = r"(<!-- benchmarks/finetune_memory.py -->\n).*?(<!-- end -->)"
    made = table(*rows())
    return re.sub(marked, lambda found: f"{found[1]}{made}\n{found[2]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
