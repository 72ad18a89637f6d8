"""How evenly tokens spread over the experts of a model, per layer, while it trains.

Hooks count the rows of each expert on the device; nothing waits for it until `Watch.read`. Layers
are ours (`MoE`) and those of transformers: experts that receive the choice of their router, or
routers that return their logits last.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from . import ops
from .errors import bad_argument
from .extras import need
from .moe import MoE
from .routing import Routing
from .shapes import check_size
from .validation import check_writable, resolve_backend

# Names of classes in transformers: experts, or a block with a router and experts.
LOOKS_LIKE_MOE = r"\w*(?:Experts?|Mo[Ee]|Mo[Ee]MLP|Mo[Ee]Block|SparseMLP)"

__all__ = ["JsonLines", "Load", "TensorBoard", "Wandb", "Watch", "summary", "watch"]


@dataclass(frozen=True, slots=True)
class Load:
    """Rows (E,) of each expert of a layer in an interval; int64, on the CPU."""

    rows: torch.Tensor

    @property
    def violation(self) -> float:
        """Largest load ÷ mean load − 1 (MaxVio): 0 is even."""
        total = int(self.rows.sum())
        return int(self.rows.max()) * len(self.rows) / total - 1 if total else 0.0

    @property
    def dead(self) -> list[int]:
        """Experts without a row."""
        return (self.rows == 0).nonzero().flatten().tolist()

    @property
    def entropy(self) -> float:
        """Entropy of the experts' shares of the rows ÷ log E: 1 is even."""
        if len(self.rows) == 1 or not self.rows.any():
            return 1.0
        share = self.rows.double() / self.rows.sum()
        return -torch.xlogy(share, share).sum().item() / math.log(len(self.rows))


Writer = Callable[[int, dict[str, Load]], None]


def watch(
    model: nn.Module,
    *writers: Writer,
    every: int = 100,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> "Watch":
    """Count the rows of each expert in every MoE layer of `model` from now on.

    `Watch.read` returns them. `Watch.step`, called after each optimizer step, reads every `every`
    steps and passes the result to the writers: `JsonLines`, `TensorBoard`, `Wandb`, or a function.
    `all_reduce` may map a rank's rows (layers · experts,) to those of all ranks. Copies of the
    model, also saved ones, are not watched.
    """
    check_size("every", every)
    for writer in writers:
        if not callable(writer):
            expected, remedy = "functions of a step and its loads", "JsonLines(path) writes a file."
            raise bad_argument("writers", expected, repr(writer), remedy)
    return Watch(model, writers, every, all_reduce)


class Watch:
    """Made by `watch`. Every forward pass counts; what a checkpoint recomputes does not."""

    def __init__(self, model, writers, every, all_reduce) -> None:
        self.writers, self.every, self.all_reduce = writers, every, all_reduce
        self.steps = 0
        self._rows: dict[str, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._layer_of: dict[nn.Module, str] = {}  # of each router of `MoE`: the layer that runs
        for name, layer in layers_of(model) if isinstance(model, nn.Module) else ():
            self._watch(name, layer)
        if not self._hooks:
            expected = "a model with sonicmoe.MoE or experts of transformers in it"
            remedy = "Its experts must receive their ids, or its routers return their logits."
            raise bad_argument("model", expected, type(model).__name__, remedy)

    def read(self) -> dict[str, Load]:
        """Return the load of each layer since the last call; waits for the device once."""
        if not self._rows:
            return {}
        device = next(iter(self._rows.values())).device
        rows = torch.cat([r.to(device) for r in self._rows.values()])
        if self.all_reduce is not None:
            rows = self.all_reduce(rows)
        parts = rows.cpu().split([len(r) for r in self._rows.values()])
        with torch.inference_mode():  # a compiled model may have made them in inference mode
            for r in self._rows.values():
                r.zero_()
        return {name: Load(part) for name, part in zip(self._rows, parts, strict=True)}

    def step(self) -> dict[str, Load] | None:
        """Call it after each optimizer step; returns the loads if this step reads them."""
        self.steps += 1
        if self.steps % self.every:
            return None
        loads = self.read()
        for write in self.writers:
            write(self.steps, loads)
        return loads

    def close(self) -> None:
        """Remove the hooks and close the writers."""
        for hook in self._hooks:
            hook.remove()
        for writer in self.writers:
            getattr(writer, "close", lambda: None)()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _watch(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, MoE):
            if layer.routing not in self._layer_of:
                self._layer_of[layer.routing] = name
                self._add(layer.routing.register_forward_hook, self._after_routing)
            # Layers may share a router, so each notes its name before it calls the router.
            self._add(layer.register_forward_pre_hook, partial(self._before_layer, name))
        elif ids := ids_argument(layer):
            hook = partial(self._before_experts, name, ids, _num_experts(layer))
            self._add(layer.register_forward_pre_hook, hook, with_kwargs=True)
        else:
            self._add(layer.register_forward_hook, partial(self._after_router, name))

    def _add(self, register: Callable[..., RemovableHandle], hook: Callable, **options) -> None:
        self._hooks.append(register(_Hook(hook), **options))

    def _before_layer(self, name: str, layer: MoE, args: tuple) -> None:
        self._layer_of[layer.routing] = name

    def _after_routing(self, router: nn.Module, args: tuple, routing: Routing) -> None:
        self._count(self._layer_of[router], routing.ids, routing.logits.shape[1])

    def _after_router(self, name: str, router: Any, args: tuple, output: Any) -> None:
        logits = output[-1].detach()
        self._count(name, logits.topk(router.top_k, dim=-1).indices, logits.shape[-1])

    def _before_experts(
        self, name: str, ids: str, experts: int, module: nn.Module, args: tuple, kwargs: dict
    ) -> None:
        self._count(name, kwargs[ids] if ids in kwargs else args[1], experts)

    @torch.no_grad()
    def _count(self, name: str, ids: torch.Tensor, experts: int) -> None:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return  # a checkpoint runs the forward pass again, inside the backward pass
        counts = ops.count(ids, experts, resolve_backend(None, ids))
        if name not in self._rows:
            with torch.inference_mode(False):  # else training could not add to it
                self._rows[name] = torch.zeros_like(counts, dtype=torch.int64)
        self._rows[name] += counts


class _Hook:
    """Calls a function; in copies of a model, also saved ones, it does nothing."""

    watches = True  # it changes no result: `Router._is_trusted`

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        if self.function is not None:
            self.function(*args)

    def __reduce__(self):
        return _Hook, ()


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name of each layer, and the module to hook: a `MoE`, its experts, or its router."""
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, MoE):
            yield name or kind.__name__, module
        elif ids_argument(module):
            yield name, module
        elif kind.__name__.endswith(("Router", "Gating")) and hasattr(module, "top_k"):
            block = model.get_submodule(name.rpartition(".")[0])
            if not any(ids_argument(part) for part in block.modules()):  # PEFT may wrap them
                yield name, module


def ids_argument(module: nn.Module) -> str | None:
    """The argument in which experts of transformers receive the chosen ids; None for others."""
    parameters = inspect.signature(type(module).forward).parameters
    return next((name for name in ("top_k_index", "router_indices") if name in parameters), None)


def _num_experts(experts: nn.Module) -> int:
    """Number of experts of a transformers module; models name it differently."""
    for name in ("num_experts", "total_experts", "num_local_experts", "n_routed_experts"):
        if isinstance(found := getattr(experts, name, None), int):
            return found
    remedy = "Call watch on the other layers one by one."
    raise bad_argument("model", "experts with num_experts", type(experts).__name__, remedy)


class JsonLines:
    """Appends a line per layer to a file: step, layer, rows, violation, dead, entropy."""

    def __init__(self, path: str | Path) -> None:
        check_writable("path", Path(path).parent)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 closed by close()

    def __call__(self, step: int, loads: dict[str, Load]) -> None:
        for layer, load in loads.items():
            about = {"step": step, "layer": layer, "rows": load.rows.tolist(), "dead": load.dead}
            about |= {"violation": load.violation, "entropy": load.entropy}
            self._file.write(json.dumps(about) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes scalars and a histogram of the rows to a folder or a SummaryWriter."""

    def __init__(self, target: Any) -> None:
        self._own = isinstance(target, str | Path)
        if self._own:
            purpose = "sonicmoe.watch.TensorBoard"
            need("tensorboard", purpose)
            target = need("torch.utils.tensorboard", purpose).SummaryWriter(str(target))
        self._board = target

    def __call__(self, step: int, loads: dict[str, Load]) -> None:
        for name, value in _scalars(loads).items():
            self._board.add_scalar(name, value, step)
        for layer, load in loads.items():
            self._board.add_histogram(f"load/{layer}/rows", load.rows, step)

    def close(self) -> None:
        if self._own:
            self._board.close()


class Wandb:
    """Logs scalars over `load/step` to a run of Weights & Biases, by default the current one."""

    def __init__(self, run: Any = None) -> None:
        self._run = run or need("wandb", "sonicmoe.watch.Wandb")
        self._defined = False

    def __call__(self, step: int, loads: dict[str, Load]) -> None:
        # Not `step=`: W&B drops what has a smaller step than the last call, which may be another's.
        if not self._defined:
            self._run.define_metric("load/*", step_metric="load/step")
            self._defined = True
        self._run.log({"load/step": step, **_scalars(loads)})


# The module is hidden by the function of its name: sonicmoe.watch.JsonLines is found here.
vars(watch).update(JsonLines=JsonLines, TensorBoard=TensorBoard, Wandb=Wandb)


def summary(loads: dict[str, Load]) -> dict[str, float]:
    """Three numbers about all layers: the largest violation, dead experts, the smallest entropy."""
    return {
        "load/max_violation": max(load.violation for load in loads.values()),
        "load/dead": float(sum(len(load.dead) for load in loads.values())),
        "load/min_entropy": min(load.entropy for load in loads.values()),
    }


def _scalars(loads: dict[str, Load]) -> dict[str, float]:
    found: dict[str, float] = {}
    for layer, load in loads.items():
        found[f"load/{layer}/violation"] = load.violation
        found[f"load/{layer}/dead"] = len(load.dead)
        found[f"load/{layer}/entropy"] = load.entropy
    return found
