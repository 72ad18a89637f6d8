"""Whole checkpoints of Hugging Face models in the names and layouts of `MoE`, and back.

One layer at a time is read, converted by `from_hf` or `to_hf`, and written, so the memory that is
needed is that of a layer and a file.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ...errors import bad_argument
from ...moe import MoE
from ...shapes import check_size
from ...validation import check_gate_up, check_writable
from .folders import Folder, open_folder, save
from .layers import find_family, from_hf, to_hf

OURS, THEIRS = "sonicmoe", "model"  # how names of files begin
_KEY = "sonicmoe"  # of `Source` in the metadata of our files
_BLOCK = "mlp"  # as the modules of transformers 5 call the block; files of Mixtral do not
SHARD = 5 * 10**9
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}  # other copies of them are left out

Progress = Callable[[int, int, str], None]  # layers that are done, all of them, the next one
Weights = dict[str, torch.Tensor]


class Source(NamedTuple):
    """What the way back needs to know."""

    family: str
    gate_up: str
    fused: bool  # whether a layer's experts are one tensor
    block: str  # name of the MoE block


class Block(NamedTuple):
    """One MoE layer: how its names begin in the folder and the new one; all names there."""

    prefix: str
    new_prefix: str
    keys: tuple[str, ...]


def checkpoint_from_hf(
    source: str | Path,
    target: str | Path,
    *,
    gate_up: str = "interleaved",
    shard_size: int = SHARD,
    progress: Progress | None = None,
) -> None:
    """Convert a folder that transformers saved to one in which MoE layers have the names of `MoE`.

    Those are `…mlp.router.weight`, `…mlp.c_fc.weight` and so on, as of `from_hf`; `moe_options`
    builds such layers. Everything else is copied unchanged, other files too. `target` is a new
    folder; its files are called sonicmoe*.safetensors, so that transformers does not load them by
    mistake, and have at most `shard_size` bytes. `progress` is called before each layer with the
    number of layers that are done, of all layers, and the name of the next one.
    """
    check_gate_up(gate_up)
    folder = open_folder(Path(source), THEIRS)
    family = _family_of(Path(source))
    find_family(family)
    prefixes = _prefixes(folder, r"(.*?\.)experts\.")
    if not prefixes:
        remedy = "Its layers have no experts."
        raise bad_argument("source", f"a checkpoint of {family} with MoE layers", source, remedy)
    kinds = {_kind(folder, prefix) for prefix in prefixes}
    if len(kinds) > 1:
        expected, got = "MoE layers that are stored alike", f"names like {sorted(kinds)}"
        raise bad_argument("source", expected, got, "Save the model again: save_pretrained.")
    (kind,) = kinds
    about = Source(family, gate_up, *kind)

    def convert(weights: Weights) -> Weights:
        return from_hf(weights, family, gate_up=gate_up)

    blocks = [_block(folder, prefix, _with_block(prefix, _BLOCK), convert) for prefix in prefixes]
    noted = {_KEY: json.dumps(about._asdict())}
    _write(folder, Path(target), OURS, blocks, convert, noted, shard_size, progress)


def checkpoint_to_hf(
    source: str | Path,
    target: str | Path,
    *,
    shard_size: int = SHARD,
    progress: Progress | None = None,
) -> None:
    """The inverse of `checkpoint_from_hf`: the same tensors under the same names, bit for bit.

    Their distribution over files may differ.
    """
    folder = open_folder(Path(source), OURS)
    about = _source_of(folder)
    prefixes = _prefixes(folder, r"(.*\.)router\.weight$")

    def convert(weights: Weights) -> Weights:
        return to_hf(weights, about.family, gate_up=about.gate_up, fused=about.fused)

    blocks = [
        _block(folder, prefix, _with_block(prefix, about.block), convert) for prefix in prefixes
    ]
    _write(folder, Path(target), THEIRS, blocks, convert, {}, shard_size, progress)


@torch.no_grad()
def load_checkpoint(model: nn.Module, folder: str | Path) -> None:
    """Copy the tensors of a folder of `checkpoint_from_hf` into `model`, one after the other.

    Raises a ValueError, before anything is copied, unless names and shapes agree and each `MoE` has
    the order of gate and up of the checkpoint. Shard the model afterwards.
    """
    found = open_folder(Path(folder), OURS)
    gate_up = _source_of(found).gate_up
    for name, module in model.named_modules():
        if isinstance(module, MoE) and module.gate_up != gate_up:
            expected = f"{gate_up!r}, the order of the checkpoint"
            remedy = "Build the MoE with it, or convert with gate_up=."
            raise bad_argument(f"gate_up of {name or 'model'}", expected, module.gate_up, remedy)
    state = model.state_dict()
    for key, t in state.items():
        if type(t) is not torch.Tensor or t.is_meta:
            expected, remedy = "a tensor with data, not sharded", "Load first, then shard."
            raise bad_argument(key, expected, f"a {type(t).__name__} on {t.device}", remedy)
    held = {t.data_ptr() for key, t in state.items() if key in found.tensors}
    missing = [k for k, t in state.items() if k not in found.tensors and t.data_ptr() not in held]
    unknown = [key for key in found.tensors if key not in state]
    if missing or unknown:
        got = f"only in the model {_few(missing)}, only in the folder {_few(unknown)}"
        remedy = "Name the layers as transformers does, and build MoE with moe_options."
        raise bad_argument("model", "the names of the folder", got, remedy)
    for key, stored in found.tensors.items():
        if tuple(state[key].shape) != stored.shape:
            remedy = "Build the model with the sizes of its config.json."
            raise bad_argument(key, f"shape {stored.shape}", tuple(state[key].shape), remedy)
    for key in found.tensors:
        state[key].copy_(found.read(key)[key])


def _few(names: list[str]) -> str:
    return f"{', '.join(names[:2])}{', …' if len(names) > 2 else ''}" if names else "nothing"


# --- finding the layers ---------------------------------------------------------------------------
def _family_of(folder: Path) -> str:
    path = folder / "config.json"
    if not path.exists():
        remedy = "It is part of what save_pretrained writes."
        raise bad_argument("source", "a folder with config.json", str(folder), remedy)
    config = json.loads(path.read_text(encoding="utf-8"))
    of_text = config.get("text_config") or config  # of a multimodal model
    return of_text.get("model_type", "none")


def _source_of(folder: Folder) -> Source:
    if _KEY not in folder.metadata:
        remedy = "Pass a folder that checkpoint_from_hf wrote."
        raise bad_argument("folder", f"files with {_KEY!r} in their metadata", "others", remedy)
    return Source(**json.loads(folder.metadata[_KEY]))


def _prefixes(folder: Folder, pattern: str) -> list[str]:
    found = (re.match(pattern, key) for key in folder.tensors)
    return list(dict.fromkeys(match[1] for match in found if match))


def _kind(folder: Folder, prefix: str) -> tuple[bool, str]:
    """`fused` and `block` of `Source`."""
    fused = f"{prefix}experts.gate_up_proj" in folder.tensors
    return fused, prefix.rstrip(".").rpartition(".")[2]


def _with_block(prefix: str, block: str) -> str:
    """ "model.layers.0.block_sparse_moe." with "mlp": "model.layers.0.mlp."."""
    return f"{prefix.rstrip('.').rpartition('.')[0]}.{block}."


def _block(
    folder: Folder, prefix: str, new_prefix: str, convert: Callable[[Weights], Weights]
) -> Block:
    """`convert` checks names, shapes and dtypes on the meta device."""
    keys = tuple(key for key in folder.tensors if key.startswith(prefix))
    like = {key.removeprefix(prefix): folder.tensors[key].without_data(key) for key in keys}
    try:
        convert(like)
    except ValueError as error:
        raise ValueError(f"{prefix.rstrip('.')}: {error}") from None
    return Block(prefix, new_prefix, keys)


# --- converting -----------------------------------------------------------------------------------
def _write(
    folder: Folder,
    target: Path,
    stem: str,
    blocks: list[Block],
    convert: Callable[[Weights], Weights],
    metadata: dict[str, str],
    shard_size: int,
    progress: Progress | None,
) -> None:
    """Write to a folder beside `target`, which gets its name when it is whole."""
    check_size("shard_size", shard_size)
    if target.exists():
        raise bad_argument("target", "a new folder", f"{target}, which exists", "Name another.")
    check_writable("target", target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    draft.mkdir()
    try:
        tensors = _converted(folder, blocks, convert, progress)
        save(draft, stem, tensors, metadata, shard_size)
        for path in folder.path.iterdir():
            weights = path.suffix in _WEIGHTS or path.name.endswith(".safetensors.index.json")
            if path.is_file() and not weights:
                shutil.copy2(path, draft / path.name)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _converted(
    folder: Folder,
    blocks: list[Block],
    convert: Callable[[Weights], Weights],
    progress: Progress | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """In the order of the folder; those of a layer where its first one was."""
    block_of = {key: block for block in blocks for key in block.keys}
    done = 0
    for key in folder.tensors:
        block = block_of.get(key)
        if block is None:
            yield from folder.read(key).items()
        elif key == block.keys[0]:
            if progress is not None:
                progress(done, len(blocks), block.prefix.rstrip("."))
            weights = {k.removeprefix(block.prefix): t for k, t in folder.read(*block.keys).items()}
            for name, t in convert(weights).items():
                yield block.new_prefix + name, t
            done += 1
