"""Tables of tuned configurations: `sonicmoe tune` writes one JSON file per device.

The file is `$SONICMOE_TUNED` where that is set (set and empty: none), else
`$XDG_CACHE_HOME/sonicmoe/tuned-<device>.json`, by default under ~/.cache. It is read once, when
first needed. A malformed file never raises: entries that are wrong, or that no kernel of this
version can run, are ignored with one warning, and the built-in configurations are used instead.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch

from ..errors import say_once
from .config import RowConfig, Target, WeightConfig, is_valid

FORMAT = 2
VARIABLE = "SONICMOE_TUNED"
WGRAD = "wgrad"
ROW_KERNELS = ("up", "down", "dx", "dz")


class RowKey(NamedTuple):
    """A GEMM of (rows, K) with (K, N)."""

    kernel: str
    itemsize: int
    K: int
    N: int
    gated: bool


class WeightKey(NamedTuple):
    """A weight gradient (M, N) of each expert; which operand's rows are gathered."""

    itemsize: int
    M: int
    N: int
    gather_left: bool
    gather_right: bool


Key = RowKey | WeightKey
Config = RowConfig | WeightConfig
Entry = dict[str, Any]  # a key, its configuration and measured figures, as in the file


@dataclass(frozen=True, slots=True)
class Table:
    rows: dict[RowKey, RowConfig] = field(default_factory=dict)
    weights: dict[WeightKey, WeightConfig] = field(default_factory=dict)

    @classmethod
    def of(cls, pairs: Iterable[tuple[Key, Config]]) -> "Table":
        table = cls()
        for key, config in pairs:
            if isinstance(key, RowKey) and isinstance(config, RowConfig):
                table.rows[key] = config
            elif isinstance(key, WeightKey) and isinstance(config, WeightConfig):
                table.weights[key] = config
        return table


def allowed(key: Key, config: Config, target: Target) -> bool:
    """Whether the kernel of `key` can run with `config`, for every layout of the weights."""
    # tl.dot needs at least 16, a TMA box has at most 256; a program has at most 32 warps, and an
    # SM holds at most 32 programs.
    if not all(16 <= b <= 256 for b in (config.block_m, config.block_n, config.block_k)):
        return False
    if config.warps > 32 or not 1 <= config.programs <= 32:
        return False
    if isinstance(key, WeightKey):
        return isinstance(config, WeightConfig) and is_valid(config, key.itemsize, target)
    if not isinstance(config, RowConfig) or key.kernel not in ROW_KERNELS:
        return False
    return is_valid(config, key.itemsize, target, key.kernel)


# --- which table ----------------------------------------------------------------------------------
P = ParamSpec("P")
T = TypeVar("T")
_override: Table | None = None
_caches: list[Callable[[], None]] = []


def cached_until_tuned(function: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` until the table changes: every launch selects, in about 0.5 µs."""
    cached = cache(function)
    _caches.append(cached.cache_clear)
    return cast(Callable[P, T], cached)


def invalidate() -> None:
    """Clear all caches: the next selection reads the file again."""
    for clear in _caches:
        clear()


def tuned(target: Target) -> Table:
    """The table of a device; empty if it was not tuned."""
    return _on_disk(target) if _override is None else _override


@contextlib.contextmanager
def using(table: Table) -> Iterator[None]:
    """Select from `table` instead of the file in this scope, in every thread."""
    global _override
    before, _override = _override, table
    invalidate()
    try:
        yield
    finally:
        _override = before
        invalidate()


@cached_until_tuned
def _on_disk(target: Target) -> Table:
    device = _name_of(target)
    path = device and path_of(device)
    if not device or not path:
        return Table()
    entries, problems = read(path, device, target)
    if problems:
        say_once(
            f"{path}: {problems[0]} ({len(problems)} such problems). This is ignored; built-in "
            "configurations are used instead. Run `sonicmoe tune` again"
        )
    return Table.of(decode(entry) for entry in entries)


def path_of(device: str) -> Path | None:
    """Path of a device's table; None if `$SONICMOE_TUNED` is empty."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(os.path.expanduser(named)) if named else None
    cache_folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return Path(cache_folder) / "sonicmoe" / f"tuned-{slug}.json"


def _name_of(target: Target) -> str | None:
    """Name of the GPU that `target` describes; only the name tells an H100 from an H200."""
    if not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        if (10 * p.major + p.minor, p.multi_processor_count) == (target.arch, target.processors):
            return p.name
    return None


# --- the file -------------------------------------------------------------------------------------
def encode(key: Key, config: Config, **figures: float) -> Entry:
    kernel = {"kernel": WGRAD} if isinstance(key, WeightKey) else {}
    return kernel | key._asdict() | {"config": asdict(config)} | figures


def decode(entry: Any) -> tuple[Key, Config]:
    """Key and configuration of an entry; raises for what `encode` does not write."""
    weights = entry["kernel"] == WGRAD
    key_type, config_type = (WeightKey, WeightConfig) if weights else (RowKey, RowConfig)
    key = key_type(*(entry[name] for name in key_type._fields))
    if set(entry["config"]) != {f.name for f in fields(config_type)}:
        raise ValueError("a configuration of another version")
    config = config_type(**entry["config"])
    types = (*key_type.__annotations__.values(), *(f.type for f in fields(config)))
    for value, kind in zip((*key, *asdict(config).values()), types, strict=True):
        if type(value) is not kind:  # True is not an int
            raise ValueError(f"{value!r:.80}, expected {kind}")
    return key, config


def read(path: Path, device: str, target: Target) -> tuple[list[Entry], list[str]]:
    """The entries that are valid for this device and version, and the problems of the others.

    A missing file is a problem only if the user named it.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        stated, found, entries = document["format"], document["device"], list(document["entries"])
    except (FileNotFoundError, NotADirectoryError):
        return [], [f"named by {VARIABLE}, but there is no such file"] * (VARIABLE in os.environ)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return [], [f"not a table of `sonicmoe tune` ({type(error).__name__}: {error})"]
    if stated != FORMAT:
        return [], [f"a table of format {stated}, this version reads {FORMAT}"]
    if found != device:
        return [], [f"tuned for {found!r}, the device here is {device!r}"]
    good, problems = [], []
    for entry in entries:
        try:
            if not allowed(*decode(entry), target):
                raise ValueError("a configuration that cannot run here")
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{error}, in {entry!r:.80}")
        else:
            good.append(entry)
    return good, problems


def write(
    path: Path, device: str, target: Target, measured: Iterable[Key], entries: Iterable[Entry]
) -> list[Entry]:
    """Write `entries` to the file; they replace what it holds for the keys in `measured`."""
    known, _ = read(path, device, target)
    replaced = set(measured)
    kept = [entry for entry in known if decode(entry)[0] not in replaced] + list(entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    lines = ",\n".join(json.dumps(entry) for entry in kept)  # one entry per line
    draft.write_text(
        f'{{"format": {FORMAT}, "device": {json.dumps(device)}, "entries": [\n{lines}\n]}}\n'
    )
    draft.replace(path)  # atomic: a concurrent reader sees the old or the new table
    invalidate()
    return kept
