"""The `Trainer` of transformers and TRL: `watch` as a callback."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..extras import missing
from ..shapes import check_size
from ..watch import Load, Watch, Writer, summary, watch

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise missing("transformers", "sonicmoe.integrations.trainer") from error

__all__ = ["WatchCallback"]


class WatchCallback(TrainerCallback):
    """`sonicmoe.watch` while a `Trainer` trains: `Trainer(…, callbacks=[WatchCallback()])`.

    Every `every` optimizer steps, by default as often as the trainer logs, it reads the rows of
    each expert, summed over all processes unless `all_reduce` is given. The first process passes
    them to `writers`, and adds `load/max_violation`, `load/dead` and `load/min_entropy` of all
    layers to the next entry of the trainer's log. `last` are the loads that were read last.
    """

    def __init__(
        self,
        *writers: Writer,
        every: int | None = None,
        all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        if every is not None:
            check_size("every", every)
        self.writers, self.every = writers, every
        self.all_reduce = all_reduce or _sum_over_processes
        self.last: dict[str, Load] | None = None
        self._watch: Watch | None = None
        self._logged = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        writers = self.writers if state.is_world_process_zero else ()
        every = self.every or max(int(state.logging_steps), 1)
        self._watch = watch(about["model"], *writers, every=every, all_reduce=self.all_reduce)
        self._watch.steps = state.global_step  # of a run that is resumed

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        assert self._watch is not None
        loads = self._watch.step()
        if loads is not None:
            self.last, self._logged = loads, False

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **about: Any
    ) -> None:
        if self._logged or self.last is None or logs is None:
            return
        self._logged = True
        found = summary(self.last)
        logs.update(found)
        state.log_history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if self._watch is not None:
            self._watch.close()


def _sum_over_processes(rows: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized():
        dist.all_reduce(rows)
    return rows
