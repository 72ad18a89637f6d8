"""A crop of the experts of a trained model, and weights of any size drawn from it.

The file is one line of JSON (`Expert` without its tensors, and where they come from), then the bf16
bits of every expert's `x`, `w1` and `w2`, least significant byte first. `python
benchmarks/trained_weights.py RUN` writes it from a run of `sonicmoe train`.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import torch

FILE = Path(__file__).with_name("trained_weights.bin")


class Expert(NamedTuple):
    """Neurons and channels of one expert. Neuron i is rows 2i (gate) and 2i + 1 (up) of W1 and
    column i of W2; both are in descending order of their norms in the whole expert."""

    layer: int
    expert: int
    x: torch.Tensor  # (h,) scale of the input channels: the weight of the norm before the layer
    w1: torch.Tensor  # (2n, h)
    w2: torch.Tensor  # (h, n), its own h: output channels


@functools.cache
def read(path: Path = FILE) -> tuple[Expert, ...]:
    """The experts of a file, in bf16 on the CPU."""
    head, body = path.read_bytes().split(b"\n", 1)
    flat = torch.frombuffer(bytearray(body), dtype=torch.bfloat16)
    found, start = [], 0
    for about in json.loads(head)["experts"]:
        tensors = []
        for shape in ((about["w1"][1],), about["w1"], about["w2"]):
            end = start + torch.Size(shape).numel()
            tensors.append(flat[start:end].view(shape))
            start = end
        found.append(Expert(about["layer"], about["expert"], *tensors))
    return tuple(found)


def spread(kept: int, count: int) -> torch.Tensor:
    """(count,) ranks below `kept`, each equally often as far as possible.

    What is left over is evenly spaced and begins with 0, the largest.
    """
    rest = torch.linspace(0, kept - 1, count % kept).round().long()
    return torch.cat([torch.arange(kept).repeat(count // kept), rest])


def resized(weight: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, generator):
    """`weight` with these rows and columns, in fp32 on the generator's device.

    Repeated values get random signs: equal rows would make the result singular, and only
    magnitudes matter.
    """
    device = generator.device
    rows, columns = rows.to(device), columns.to(device)
    found = weight.to(device)[rows][:, columns].float()
    if len(rows) > len(weight) or len(columns) > weight.shape[1]:
        signs = torch.randint(2, found.shape, generator=generator, device=device) * 2 - 1
        again = _occurs_again(rows)[:, None] | _occurs_again(columns)
        found = torch.where(again, found * signs, found)
    return found


def _occurs_again(index: torch.Tensor) -> torch.Tensor:
    order = index.argsort(stable=True)
    again = torch.zeros_like(index, dtype=torch.bool)
    again[order[1:]] = index[order[1:]] == index[order[:-1]]
    return again


def shuffled(kept: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """`spread` in random order, on the generator's device."""
    device = generator.device
    order = torch.randperm(count, generator=generator, device=device)
    return spread(kept, count).to(device)[order]
