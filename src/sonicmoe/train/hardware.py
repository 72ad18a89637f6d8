"""The GPUs that `sonicmoe plan` knows: the data sheets of `sonicmoe.cost`."""

from .. import cost
from ..cost import Gpu
from ..errors import bad_argument

GPUS = {g.name: g for g in cost.GPUS.values() if g.power is None}


def gpu(name: str) -> Gpu:
    if name not in GPUS:
        raise bad_argument("gpu", f"one of {', '.join(GPUS)}", repr(name), "Pick the nearest one.")
    return GPUS[name]


def recognise(device_name: str) -> Gpu | None:
    """The entry for a name as the driver reports it, the longest match first."""
    for name in sorted(GPUS, key=len, reverse=True):
        if name in device_name:
            return GPUS[name]
    return None
