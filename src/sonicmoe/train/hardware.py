"""The GPUs that `sonicmoe plan` knows: the data sheets of `sonicmoe.cost`, under the same names."""

from ..errors import bad_argument
from ..tools import cost
from ..tools.cost import Gpu

GPUS = {name: g for name, g in cost.GPUS.items() if g.power is None}


def gpu(name: str) -> Gpu:
    if name.lower() not in GPUS:
        raise bad_argument("gpu", f"one of {', '.join(GPUS)}", repr(name), "Pick the nearest one.")
    return GPUS[name.lower()]


def recognise(device_name: str) -> Gpu | None:
    """The entry for a name as the driver reports it."""
    try:
        return cost.find_gpu(device_name)
    except ValueError:
        return None
