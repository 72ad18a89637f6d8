"""Checkpoint folders of safetensors files, read and written piece by piece.

A file is the length of its header, the header in JSON (dtype, shape and place of each tensor), and
the bytes of the tensors. Nothing is mapped into memory, so what a process holds is what it reads.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import bad_argument

PIECE = 64 * 2**20  # bytes that are copied at once
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Stored(NamedTuple):
    """A tensor in a file: its first byte and, in the words of the format, its dtype and shape."""

    path: Path
    start: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def torch_dtype(self, key: str) -> torch.dtype:
        if self.dtype not in _DTYPES:
            remedy = "Dequantize the checkpoint first."
            raise bad_argument(key, f"one of {', '.join(_DTYPES)}", self.dtype, remedy)
        return _DTYPES[self.dtype]

    def read(self, key: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """The tensor, or its rows from `first` to `last`."""
        dtype, shape = self.torch_dtype(key), self.shape
        if last is not None:
            shape = (last - first, *shape[1:])
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        per_row = self.nbytes // self.shape[0] if self.shape else 0
        buffer = bytearray(math.prod(shape) * dtype.itemsize)
        with open(self.path, "rb") as file:
            file.seek(self.start + first * per_row)
            _fill(file, buffer)
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def write(self, t: torch.Tensor, first: int = 0) -> None:
        """Write `t` over the rows from `first` on."""
        buffer = bytearray(t.nbytes)
        if not buffer:
            return
        torch.frombuffer(buffer, dtype=t.dtype).copy_(t.flatten())
        with open(self.path, "r+b") as file:
            file.seek(self.start + (first * (self.nbytes // self.shape[0]) if first else 0))
            file.write(buffer)

    def copy_to(self, other: "Stored") -> None:
        with open(self.path, "rb") as source, open(other.path, "r+b") as target:
            source.seek(self.start)
            target.seek(other.start)
            for done in range(0, self.nbytes, PIECE):
                buffer = bytearray(min(PIECE, self.nbytes - done))
                _fill(source, buffer)
                target.write(buffer)


def _fill(file: Any, buffer: bytearray) -> None:
    if file.readinto(buffer) != len(buffer):
        remedy = "Download it again."
        raise bad_argument("source", "whole files", f"{file.name}, which is cut off", remedy)


# --- reading --------------------------------------------------------------------------------------
class Folder(NamedTuple):
    """The tensors of a checkpoint in the order of its files, what their headers say, its files."""

    path: Path
    tensors: dict[str, Stored]
    metadata: dict[str, str]
    files: set[str]


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
    found = Folder(folder, {}, {}, {*names, index.name})
    for name in names:
        path = folder / name
        if not path.exists():
            remedy = "Download it again."
            raise bad_argument("source", f"the file {name}, which its index names", folder, remedy)
        header, begin = _header(path)
        found.metadata.update(header.pop("__metadata__", {}))
        for key, about in sorted(header.items(), key=lambda entry: entry[1]["data_offsets"]):
            start, end = about["data_offsets"]
            shape = tuple(about["shape"])
            found.tensors[key] = Stored(path, begin + start, end - start, about["dtype"], shape)
    return found


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and where the tensors begin."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size >= 8 + length:
            try:
                return json.loads(file.read(length)), 8 + length
            except ValueError:
                pass
    remedy = "Download it again."
    raise bad_argument("source", "safetensors files", f"{path}, which is not one", remedy)


# --- writing --------------------------------------------------------------------------------------
class New(NamedTuple):
    """A tensor that will be written; `shape` and `dtype` in the words of the format."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def new_like(t: torch.Tensor) -> New:
    return New(_NAMES[t.dtype], tuple(t.shape), t.nbytes)


def create(
    folder: Path, stem: str, tensors: Mapping[str, New], metadata: Mapping[str, str], most: int
) -> dict[str, Stored]:
    """Create the files, of at most `most` bytes unless one tensor has more, and their index.

    They are filled through what is returned.
    """
    shards = list(_shards(tensors, most))
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [
            f"{stem}-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
        ]
    made: dict[str, Stored] = {}
    for name, shard in zip(names, shards, strict=True):
        offset, header = 0, dict[str, Any](__metadata__={"format": "pt", **metadata})
        for key in shard:
            dtype, shape, nbytes = tensors[key]
            about = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
            header[key] = about
            offset += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + offset)
        for key in shard:
            dtype, shape, nbytes = tensors[key]
            start = 8 + len(text) + header[key]["data_offsets"][0]
            made[key] = Stored(folder / name, start, nbytes, dtype, shape)
    if len(shards) > 1:
        size = {"total_size": sum(t.nbytes for t in tensors.values())}
        files = {key: stored.path.name for key, stored in made.items()}
        index = json.dumps({"metadata": size, "weight_map": files}, indent=2) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(index, encoding="utf-8")
    return made


def _shards(tensors: Mapping[str, New], most: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for key, t in tensors.items():
        if shard and size + t.nbytes > most:
            yield shard
            shard, size = [], 0
        shard.append(key)
        size += t.nbytes
    yield shard
