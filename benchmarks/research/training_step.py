"""Times of whole training steps with the trainer's own classes, and every loss of a curve."""

import contextlib
import importlib
import pkgutil
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sonicmoe import kernels
from sonicmoe.errors import bad_argument
from sonicmoe_trainer import accounting, loop, optim, parallel
from sonicmoe_trainer import kernels as trainer_kernels
from sonicmoe_trainer.config import TrainConfig
from sonicmoe_trainer.corpus import Corpus
from sonicmoe_trainer.cross_entropy import linear_cross_entropy
from sonicmoe_trainer.progress import Plain

WARMUP = 3  # steps of one micro-batch, before what is timed
HEAD = "head and loss"
ADDED = "adding up gradients"
REST = "norms, rotation, residuals"
PARTS = ("MoE kernels", "attention", "dense GEMMs", REST, HEAD, ADDED, "optimizer")


@dataclass(frozen=True, slots=True)
class Tokens(Corpus):
    """Given tokens in place of a prepared text."""

    given: torch.Tensor

    @property
    def key(self) -> str:
        return "tokens"

    def tokens(self, split: str) -> torch.Tensor:
        return self.given


def read_tokens(path: Path | None, config: TrainConfig) -> torch.Tensor:
    """(n,) int32 of a file of such tokens; random tokens without a file."""
    size = config.model.vocab_size
    if path is None:
        count = 4 * max(config.tokens_per_step, config.model.context + 1)
        return torch.randint(size, (count,), dtype=torch.int32)
    tokens = torch.from_file(str(path), size=path.stat().st_size // 4, dtype=torch.int32)
    if (most := int(tokens.max())) >= size:
        expected, remedy = f"tokens below vocab_size = {size}", "Use the vocabulary of the file."
        raise bad_argument("--tokens", expected, most, remedy)
    return tokens


@contextlib.contextmanager
def trainer_of(config: TrainConfig, tokens: torch.Tensor) -> Iterator[loop.Trainer]:
    """A trainer whose logs go to a temporary folder."""
    world = parallel.start(config.device)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Tokens(Path(folder), {}, tokens)
        trainer = loop.Trainer(config, Path(folder), corpus, world, Plain())
        try:
            yield trainer
        finally:
            if trainer.log:
                trainer.log.close()


# --- times ----------------------------------------------------------------------------------------
def measure(config: TrainConfig, tokens: torch.Tensor, steps: int) -> dict[str, Any]:
    """Seconds, memory and parts of `steps` steps of the configuration's micro-batches."""
    began = time.perf_counter()
    with trainer_of(config, tokens) as trainer:
        device, count = trainer.world.device, config.batch // config.micro_batch
        trainer.batches.batch = config.micro_batch
        for _ in range(WARMUP):
            trainer.train_step()
        trainer.batches.batch = config.batch
        _wait(device)
        setup = time.perf_counter() - began
        with _timed_updates(device) as updates:
            began = time.perf_counter()
            for _ in range(steps):
                trainer.train_step()
            _wait(device)
            seconds = (time.perf_counter() - began) / steps
        memory = loop.peak_memory(device)
        update = statistics.median(updates())
        losses = [loss for loss, _, _ in torch.stack(trainer.pending).tolist()]
        found = {
            "parameters": accounting.parameters(config.model).total,
            "layers": config.model.num_layers,
            "tokens_per_micro_batch": config.micro_batch * config.model.context,
            "micro_batches": count,
            "steps": steps,
            "setup_s": setup,
            "tokens_per_second": config.tokens_per_step / seconds,
            "step_ms": seconds * 1e3,
            "micro_batch_ms": (seconds - update) / count * 1e3,
            "update_ms": update * 1e3,
            "peak_gib": memory / 2**30,
            "last_loss": losses[-1],
        }
        if device.type == "cuda":
            found |= _parts(trainer)
    return found


@contextlib.contextmanager
def _timed_updates(device: torch.device) -> Iterator[Callable[[], list[float]]]:
    """Within, `optim.step` is timed; the result is a function that gives all its seconds."""
    marks: list[tuple[Any, Any]] = []
    original = optim.step

    def mark() -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(*given) -> torch.Tensor:
        before = mark()
        norm = original(*given)
        marks.append((before, mark()))
        return norm

    def seconds() -> list[float]:
        if device.type != "cuda":
            return [after - before for before, after in marks]
        return [before.elapsed_time(after) / 1e3 for before, after in marks]

    with unittest.mock.patch.object(optim, "step", timed):
        yield seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- parts ----------------------------------------------------------------------------------------
def _parts(trainer: loop.Trainer) -> dict[str, Any]:
    """GPU-busy ms of one micro-batch that adds to gradients, and of one update, by part."""
    micro_batch = _micro_batch(trainer)
    micro_batch()
    whole = kernel_ms(micro_batch)
    update = sum(kernel_ms(lambda: optim.step(trainer.model, trainer.optimizer, 1.0)).values())
    head = kernel_ms(_head(trainer))
    names = kernel_names()
    parts = by_part(whole, names)
    for part, ms in by_part(head, names).items():  # it runs the same kinds of kernels
        parts[part] -= ms if part != HEAD else 0
        parts[HEAD] += ms if part != HEAD else 0
    parts["optimizer"] = update
    largest = sorted(whole.items(), key=lambda item: -item[1])[:30]
    return {
        "busy_ms": sum(whole.values()),
        "parts_ms": parts,
        "kernels_ms": {name[:90]: ms for name, ms in largest},
    }


def _micro_batch(trainer: loop.Trainer) -> Callable[[], None]:
    c = trainer.config
    x, y = trainer.batches.step(0)
    x, y = (t[: c.micro_batch].to(trainer.world.device) for t in (x, y))

    def run() -> None:
        with trainer.autocast():
            loss, aux_loss = trainer.model(x, y, loss_chunk=c.loss_chunk)
        (loss + aux_loss).backward()

    return run


def _head(trainer: loop.Trainer) -> Callable[[], None]:
    """The head alone, its gradient not added to another."""
    c, weight = trainer.config, trainer.model.embed.weight.detach().requires_grad_()
    rows = c.micro_batch * c.model.context
    dtype = torch.float32 if c.precision == "fp32" else torch.bfloat16
    x = torch.randn(rows, c.model.hidden_size, device=weight.device, dtype=dtype)
    x.requires_grad_()
    targets = torch.randint(c.model.vocab_size, (rows,), device=weight.device)

    def run() -> None:
        with trainer.autocast():
            loss = linear_cross_entropy(x, weight, targets, c.loss_chunk)
        torch.autograd.grad(loss, (x, weight))

    run()
    return run


def kernel_ms(function: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of each kernel in a call."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name] = found.get(event.name, 0.0) + event.device_time / 1e3
    return found


def kernel_names() -> frozenset[str]:
    """The names of this package's kernels."""
    names = set()
    for package in (kernels, trainer_kernels):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError):  # Gluon, where Triton lacks it
                found = vars(importlib.import_module(module.name)).items()
                names |= {name for name, value in found if hasattr(value, "do_not_specialize")}
                names |= {name for name, value in found if hasattr(value, "arg_names")}
    return frozenset(names)


_ATTENTION = ("flash", "sdpa", "flex_attention", "fmha", "triton_tem")
_GEMM = ("gemm", "nvjet", "cutlass", "splitk", "cublas")
_PEERS = ("scatter2scatter", "xty", "groupproblemshape")


def part_of(kernel: str, ours: frozenset[str]) -> str:
    """Which of PARTS a kernel belongs to, by its name."""
    name = kernel.lower()
    if kernel == "cross_entropy_kernel":
        return HEAD
    if kernel == "adamw_kernel" or "multi_tensor_apply" in name:
        return "optimizer"
    if any(word in name for word in _ATTENTION):
        return "attention"
    if kernel in ours or kernel == "_group" or any(word in name for word in _PEERS):
        return "MoE kernels"
    if any(word in name for word in _GEMM):
        return "dense GEMMs"
    return ADDED if "functor_add" in name and "vectorized" in name else REST


def by_part(kernels_ms: dict[str, float], ours: frozenset[str]) -> dict[str, float]:
    found = dict.fromkeys(PARTS, 0.0)
    for kernel, ms in kernels_ms.items():
        found[part_of(kernel, ours)] += ms
    return found


def extrapolated(found: dict[str, Any], config: TrainConfig, layers: int) -> dict[str, Any]:
    """What a step with `layers` layers takes if head and loss take what they take in `found`.

    The update is taken to grow with the parameters.
    """
    head = found["parts_ms"][HEAD]
    micro_batch = head + (found["micro_batch_ms"] - head) / found["layers"] * layers
    whole = accounting.parameters(config.override({"num_layers": layers}).model).total
    update = found["update_ms"] * whole / found["parameters"]
    seconds = (found["micro_batches"] * micro_batch + update) / 1e3
    tokens = found["micro_batches"] * found["tokens_per_micro_batch"]
    return {
        "layers": layers,
        "micro_batch_ms": micro_batch,
        "update_ms": update,
        "tokens_per_second": tokens / seconds,
    }


# --- a curve --------------------------------------------------------------------------------------
def curve(config: TrainConfig, tokens: torch.Tensor, say: Callable[[str], None]) -> dict[str, Any]:
    """The training loss of every step."""
    with trainer_of(config, tokens) as trainer:
        began = time.perf_counter()
        for step in range(1, config.steps + 1):
            trainer.train_step()
            if step % 50 == 0:
                say(f"step {step}: loss {trainer.pending[-1][0].item():.4f}")
        seen = torch.stack(trainer.pending).cpu()
        seconds = time.perf_counter() - began
        return {
            "parameters": accounting.parameters(config.model).total,
            "layers": config.model.num_layers,
            "tokens_per_step": config.tokens_per_step,
            "steps": config.steps,
            "seed": config.seed,
            "learning_rate": config.learning_rate,
            "seconds": seconds,
            "peak_gib": loop.peak_memory(trainer.world.device) / 2**30,
            "losses": [round(x, 5) for x in seen[:, 0].tolist()],
            "norms": [round(x, 4) for x in seen[:, 2].tolist()],
        }
