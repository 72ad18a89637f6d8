"""The log of a run: a JSON line per measurement, TensorBoard and W&B if wanted."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from sonicmoe.plugins import need

from .config import TrainConfig

_NAME = "log.jsonl"


class RunLog:
    """Appends to log.jsonl. A resumed run drops records after the step it continues from."""

    def __init__(self, folder: Path, config: TrainConfig, resume_step: int = 0) -> None:
        self.path = folder / _NAME
        kept = [r for r in read(folder) if r["step"] <= resume_step] if resume_step else []
        rewritten = self.path.with_suffix(".new")
        rewritten.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        rewritten.replace(self.path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 closed by close()
        self._board = self._wandb = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)
        if config.wandb:
            self._wandb = need("wandb", "wandb=true").init(
                project=os.environ.get("WANDB_PROJECT", "sonicmoe"),
                name=folder.name,
                dir=str(folder),
                config=config.to_dict(),
            )

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """`kind` is "train" or "validation"; the record says its step."""
        self._file.write(json.dumps({"kind": kind, **record}) + "\n")
        self._file.flush()
        named = {f"{kind}/{name}": value for name, value in record.items() if name != "step"}
        known = {name: value for name, value in named.items() if value is not None}
        if self._board:
            for name, value in known.items():
                self._board.add_scalar(name, value, record["step"])
        if self._wandb:
            self._wandb.log(known, step=record["step"])

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()


def read(folder: Path) -> list[dict[str, Any]]:
    """All records of a run. Malformed lines, for example one cut short by a kill, are skipped with
    a warning."""
    path = folder / _NAME
    if not path.is_file():
        return []
    records, skipped = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if _is_record(record):
            records.append(record)
        else:
            skipped.append(number)
    if skipped:
        lines = ", ".join(map(str, skipped[:5])) + (", …" if len(skipped) > 5 else "")
        print(f"{path}: skipped, not a record: line {lines}.", file=sys.stderr)
    return records


def _is_record(value: Any) -> bool:
    """Whether it has the fields that every reader of the log uses."""
    return (
        isinstance(value, dict)
        and value.get("kind") in ("train", "validation")
        and all(type(value.get(k)) in (int, float) for k in ("step", "loss", "seconds"))
    )
