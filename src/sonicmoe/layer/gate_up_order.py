"""The order of gate and up columns, noted in the metadata of a state dict.

`load_state_dict` compares shapes, which are the same for both orders. The note is stored in
PyTorch's `_metadata`, beside the module's version, not as a key. State dicts without it, such as
those of `torch.distributed.checkpoint` or safetensors, are loaded unchecked.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import bad_argument

_KEY = "gate_up"


def note_order(destination: Mapping[str, Any], module: str, gate_up: str) -> None:
    """Note the order of the weights of `module`, its name or "", in a state dict."""
    metadata = getattr(destination, "_metadata", None)
    if metadata is not None:
        metadata.setdefault(module, {})[_KEY] = gate_up


def check_order(noted: Mapping[str, Any], gate_up: str, remedy: str) -> None:
    """Raise if the metadata of a module notes another order than `gate_up`.

    Reordering the weights on loading would leave the moments of an optimizer in the old order.
    """
    found = noted.get(_KEY, gate_up)
    if found != gate_up:
        raise bad_argument(_KEY, f"{found!r}, the order of the state dict", repr(gate_up), remedy)


def metadata_of(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metadata of the layer itself in its state dict; may be empty."""
    return (getattr(state_dict, "_metadata", None) or {}).get("", {})


def with_order(weights: Mapping[str, torch.Tensor], gate_up: str) -> dict[str, torch.Tensor]:
    """`weights` as the state dict of a layer that notes its order."""
    noted = OrderedDict(weights)
    noted._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    note_order(noted, "", gate_up)
    return noted
