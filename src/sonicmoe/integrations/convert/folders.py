"""Checkpoint folders of safetensors files, of which a layer or a tensor at a time is in memory."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import bad_argument
from ...extras import need

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class Stored(NamedTuple):
    """A tensor's file, and its dtype and shape in the words of the format."""

    path: Path
    dtype: str
    shape: tuple[int, ...]

    def without_data(self, key: str) -> torch.Tensor:
        if self.dtype not in _DTYPES:
            remedy = "Dequantize the checkpoint first."
            raise bad_argument(key, f"one of {', '.join(_DTYPES)}", self.dtype, remedy)
        return torch.empty(self.shape, dtype=_DTYPES[self.dtype], device="meta")


class Folder(NamedTuple):
    """The tensors of a checkpoint in the order of its files, and the files' metadata."""

    path: Path
    tensors: dict[str, Stored]
    metadata: dict[str, str]

    def read(self, *keys: str) -> dict[str, torch.Tensor]:
        """These tensors, mapped from their files; their memory is free when they are."""
        found: dict[str, torch.Tensor] = {}
        for path in dict.fromkeys(self.tensors[key].path for key in keys):
            with _opened(path) as file:
                mine = (key for key in keys if self.tensors[key].path == path)
                found |= {key: file.get_tensor(key) for key in mine}
        return found


def open_folder(folder: Path, stem: str) -> Folder:
    """Read the headers of `<stem>.safetensors`, or of the files that its index names."""
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    elif single.exists():
        names = [single.name]
    else:
        remedy = "Name a folder with safetensors files, of transformers or of this command."
        expected = f"a folder with {single.name} or {index.name}"
        raise bad_argument("source", expected, str(folder), remedy)
    found = Folder(folder, {}, {})
    for name in names:
        path = folder / name
        if not path.exists():
            remedy = "Download it again."
            raise bad_argument("source", f"the file {name}, which its index names", folder, remedy)
        with _opened(path) as file:
            found.metadata.update(file.metadata() or {})
            for key in file.offset_keys():
                about = file.get_slice(key)
                shape = tuple(about.get_shape())
                found.tensors[key] = Stored(path, about.get_dtype(), shape)
    return found


def _opened(path: Path) -> Any:
    safetensors = need("safetensors", "Converting a checkpoint")
    try:
        return safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        remedy = "Download it again."
        raise bad_argument(
            "source", "whole safetensors files", f"{path}: {error}", remedy
        ) from None


def save(
    folder: Path,
    stem: str,
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str],
    most: int,
) -> None:
    """Write files of at most `most` bytes, unless one tensor has more, and their index."""
    save_file = need("safetensors.torch", "Converting a checkpoint").save_file
    drafts: list[Path] = []
    shard_of: dict[str, int] = {}
    size = 0
    for shard in _shards(tensors, most):
        drafts.append(folder / f"{len(drafts)}.draft")
        save_file(shard, drafts[-1], {"format": "pt", **metadata})
        shard_of |= dict.fromkeys(shard, len(drafts) - 1)
        size += sum(t.nbytes for t in shard.values())
    names = [f"{stem}-{i + 1:05}-of-{len(drafts):05}.safetensors" for i in range(len(drafts))]
    if len(drafts) == 1:
        names = [f"{stem}.safetensors"]
    else:
        files = {key: names[i] for key, i in shard_of.items()}
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=2) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")
    for draft, name in zip(drafts, names, strict=True):
        draft.rename(folder / name)


def _shards(
    tensors: Iterable[tuple[str, torch.Tensor]], most: int
) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for key, t in tensors:
        if shard and size + t.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[key] = t
        size += t.nbytes
    yield shard
