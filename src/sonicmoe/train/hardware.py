"""What GPUs can do by their data sheets."""

from dataclasses import dataclass

from ..errors import bad_argument


@dataclass(frozen=True, slots=True)
class Gpu:
    """Dense bf16 FLOP/s, memory in bytes/s and bytes, bytes/s from a GPU to its node and beyond."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    node_link: float
    network_link: float
    per_node: int = 8


GPUS = {
    g.name: g
    for g in (
        Gpu("A100", 312e12, 2.0e12, 80e9, 300e9, 25e9),
        Gpu("H100", 989e12, 3.35e12, 80e9, 450e9, 50e9),
        Gpu("H200", 989e12, 4.8e12, 141e9, 450e9, 50e9),
        Gpu("B200", 2250e12, 8.0e12, 180e9, 900e9, 50e9),
        Gpu("GB200", 2500e12, 8.0e12, 186e9, 900e9, 50e9, per_node=72),
    )
}


def gpu(name: str) -> Gpu:
    if name not in GPUS:
        raise bad_argument("gpu", f"one of {', '.join(GPUS)}", repr(name), "Pick the nearest one.")
    return GPUS[name]


def recognise(device_name: str) -> Gpu | None:
    """The table's entry for a name as the driver reports it, the longest match first."""
    for name in sorted(GPUS, key=len, reverse=True):
        if name in device_name:
            return GPUS[name]
    return None
