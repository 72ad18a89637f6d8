"""Weights of Hugging Face models in the names and layouts of `sonicmoe.MoE`, and back.

One layer (`layers`), or a whole checkpoint (`checkpoints`), also from the command line:
python -m sonicmoe.integrations.convert from_hf FOLDER NEW_FOLDER
"""

from .checkpoints import checkpoint_from_hf, checkpoint_to_hf, load_checkpoint
from .layers import from_hf, moe_options, to_hf

__all__ = [
    "checkpoint_from_hf",
    "checkpoint_to_hf",
    "from_hf",
    "load_checkpoint",
    "moe_options",
    "to_hf",
]
