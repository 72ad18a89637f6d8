"""The training loop, with validation, logging and checkpoints."""

import contextlib
import dataclasses
import functools
import math
import os
import resource
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from sonicmoe import MoE
from sonicmoe.plugins import bad_argument
from sonicmoe.routing import Sigmoid

from . import accounting, checkpoint, optim, parallel
from .backends import check_backend, prepare_to_compile
from .batches import Batches
from .config import TrainConfig
from .corpus import Corpus
from .model import Decoder, check_layer
from .presets import PRESETS
from .progress import Plain, human_bytes
from .runlog import RunLog


class Trainer:
    """A model, its optimizer and its position in the text.

    A checkpoint after step n holds everything that step n+1 depends on: on one device, a resumed
    run with `deterministic` repeats an uninterrupted one bit for bit.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        corpus: Corpus,
        world: parallel.World,
        display: Plain,
        resume: bool = False,
    ) -> None:
        check(config, world)
        self.micro_batch = min(config.micro_batch, config.batch // world.size)
        self.config, self.folder, self.world, self.display = config, folder, world, display
        self.corpus_key = corpus.key
        self.step = 0
        self.seconds = 0.0  # in training steps; validation and checkpoints do not count
        # (loss, aux loss, norm of the gradient) of steps not yet logged
        self.pending: list[torch.Tensor] = []
        self.first_loss = self.last_loss = self.validation_loss = math.nan
        self.steady: list[tuple[int, float]] = []  # (tokens, seconds) of logged intervals

        # On a CPU it costs nothing, so that runs always repeat there.
        make_deterministic(config.deterministic or world.device.type == "cpu")
        if world.device.type == "cuda":  # an earlier run in this process had its own peak
            torch.cuda.reset_peak_memory_stats(world.device)
        torch.manual_seed(config.seed)
        self.model = _build_model(config, world)
        self.optimizer = optim.build(self.model, config)
        context, batch = config.model.context, config.batch
        self.batches = Batches(corpus.tokens("train"), context, batch, config.seed)
        self.held_out = Batches(corpus.tokens("validation"), context, batch, config.seed)
        self.checkpoints = folder / "checkpoints"
        if resume:
            self._load(checkpoint.load_latest(self.checkpoints, display.say))
        elif config.init_from:
            found = checkpoint.load_latest(Path(config.init_from) / "checkpoints", display.say)
            checkpoint.restore_weights(found, self.model)
        self.log = RunLog(folder, config, self.step) if world.first else None

    # --- the loop ---------------------------------------------------------------------------------
    def train(self) -> bool:
        """Run to the last step; False if a signal ended it early. It is saved either way."""
        c = self.config
        stopped = False
        with _stop_signals() as wanted, self._open():
            self._mark = time.perf_counter()
            step = self._first_step
            while self.step < c.steps and not stopped:
                step()
                step = self.train_step
                if self.step % c.log_every == 0 or self.step == c.steps:
                    self._report()
                stopped = self.world.any(wanted())
                last = self.step == c.steps
                if self.step % c.validate_every == 0 or last:
                    self._off_the_clock(self._validate)
                if self.step % c.checkpoint_every == 0 or last or stopped:
                    self._off_the_clock(self._save)
        return self.step == c.steps

    @contextlib.contextmanager
    def _open(self) -> Iterator:
        self.display.start(self.step, self.config.steps)
        try:
            yield
        finally:
            self.display.stop()
            if self.log:
                self.log.close()

    def _first_step(self) -> None:
        """Run the first step and report it: compiling can take half a minute."""
        builds = _what_builds_code(self.config, self.world.device)
        if builds:
            self.display.busy(f"First step: {builds} …")
        self.train_step()
        if builds:
            self.pending[-1].tolist()  # wait for the device
            self.display.busy(f"First step done after {time.perf_counter() - self._mark:.0f} s.")

    def train_step(self) -> None:
        c = self.config
        inputs, targets = self.batches.step(self.step, self.world.rank, self.world.size)
        inputs, targets = inputs.to(self.world.device), targets.to(self.world.device)
        pieces = list(zip(*(t.split(self.micro_batch) for t in (inputs, targets)), strict=True))
        self.model.train()
        total = torch.zeros(2, device=self.world.device)
        for i, (x, y) in enumerate(pieces):
            if self.world.size > 1:
                parallel.synchronise_gradients(self.model, i == len(pieces) - 1)
            with self.autocast():
                loss, aux_loss = self.model(x, y, loss_chunk=c.loss_chunk)
            ((loss + aux_loss) / len(pieces)).backward()
            total += torch.stack([loss.detach().float(), aux_loss.detach().float()]) / len(pieces)
        for group in self.optimizer.param_groups:
            group["lr"] = optim.learning_rate(c, self.step)
        norm = optim.step(self.model, self.optimizer, c.gradient_clip)
        for router in self.model.modules():
            if isinstance(router, Sigmoid):
                router.update_bias(all_reduce=self.world.sum)
        self.pending.append(torch.cat([total, norm.to(total)[None]]))
        self.step += 1

    def _report(self) -> None:
        """Read the losses since the last report, the only place where the host waits for a GPU."""
        c, steps = self.config, len(self.pending)
        pending = self._read_pending()
        self.last_loss, aux_loss, norm = pending.mean(0).tolist()
        if math.isnan(self.first_loss):
            self.first_loss = pending[0, 0].item()
        self.pending.clear()
        now = time.perf_counter()
        elapsed, self._mark = now - self._mark, now
        self.seconds += elapsed
        tokens = steps * c.tokens_per_step
        self.steady.append((tokens, elapsed))
        flops = accounting.flops_per_token(c.model) * tokens / elapsed
        record = {
            "step": self.step,
            "tokens": self.step * c.tokens_per_step,
            "loss": self.last_loss,
            "learning_rate": optim.learning_rate(c, self.step - 1),
            "gradient_norm": norm,  # before it is clipped
            "seconds": self.seconds,
            "tokens_per_second": tokens / elapsed,
            "flops_per_second": flops,
            "peak_share": share_of_peak(flops / self.world.size, self.world.device),
            "memory": peak_memory(self.world.device),
            "balance": _balance(aux_loss, c),
        }
        if self.log:
            self.log.write("train", record)
        self.display.train(record)

    @torch.no_grad()
    def _validate(self) -> None:
        """Mean loss over fixed windows of held-out documents. Routers choose plain top-K here."""
        c = self.config
        self.model.eval()
        total = torch.zeros(2, device=self.world.device, dtype=torch.float64)
        per_call = self.micro_batch * self.world.size
        for x, y in self.held_out.spread(c.validation_sequences, per_call):
            mine = slice(self.world.rank, None, self.world.size)
            sequences = x[mine].shape[0]
            if not sequences:  # every rank must take part in the collectives
                mine = slice(1)
            x, y = x[mine].to(self.world.device), y[mine].to(self.world.device)
            with self.autocast():
                loss, _ = self.model(x, y, loss_chunk=c.loss_chunk)
            total += torch.stack([loss.double(), torch.ones_like(total[1])]) * sequences
        summed, count = self.world.sum(total).tolist()
        self.validation_loss = summed / count
        if not math.isfinite(self.validation_loss):
            message = f"The validation loss is {self.validation_loss} after step {self.step}."
            self.world.from_first(lambda: self._fail(message))
        record = {"step": self.step, "loss": self.validation_loss, "seconds": self.seconds}
        if self.log:
            self.log.write("validation", record)
        self.display.validation(record)

    def _off_the_clock(self, action) -> None:
        """Do something that is not training, without counting its time."""
        before = time.perf_counter()
        action()
        self._mark += time.perf_counter() - before

    def autocast(self):
        # With FSDP, parameters are already gathered in bfloat16.
        wanted = self.config.is_autocast and self.world.size == 1
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=wanted)

    # --- saving and loading -----------------------------------------------------------------------
    def _save(self) -> None:
        if not self.config.keep:
            return
        pending = self._read_pending()
        state = checkpoint.gather(self.model, self.optimizer, self.world)
        state |= {
            "config": self.config.to_dict(),
            "corpus": self.corpus_key,
            "step": self.step,
            "seconds": self.seconds + time.perf_counter() - self._mark
            if self.pending
            else self.seconds,
            "pending": pending,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "validation_loss": self.validation_loss,
        }

        def save() -> None:  # on the first rank, which alone has the whole state
            name = checkpoint.find_not_finite(state)
            if name is not None:
                self._fail(f"{name} is not finite after step {self.step}.")
            checkpoint.save(self.checkpoints, self.step, state, self.config.keep)

        self.world.from_first(save)

    def _read_pending(self) -> torch.Tensor:
        """(steps, 3): `pending` over all ranks. FloatingPointError if one is not finite."""
        if not self.pending:
            return torch.zeros(0, 3)
        found = self.world.mean(torch.stack(self.pending)).cpu()
        for step, (loss, _, norm) in enumerate(found.tolist(), self.step - len(found) + 1):
            if not math.isfinite(loss + norm):
                message = f"Step {step} has loss {loss:g} and a gradient of norm {norm:g}."
                self.world.from_first(functools.partial(self._fail, message, step))
        return found

    def _fail(self, what: str, bad_step: int | None = None) -> NoReturn:
        """Raise FloatingPointError with a command that continues from before it happened.

        The checkpoint right before `bad_step` is set aside: it leads to that step at any rate.
        """
        c = self.config
        if bad_step is not None:
            checkpoint.set_aside(self.checkpoints, bad_step - 1)
        usual = PRESETS.get(c.preset, c).learning_rate
        lower = f"--learning-rate {min(c.learning_rate / 10, usual):.2g}"
        sound = checkpoint.latest_sound(self.checkpoints)
        if sound is None:
            advice = f"There is no sound checkpoint: start again at a lower rate, with {lower}"
        else:
            advice = (
                f"The last sound checkpoint is that of step {sound}. Continue from it at a lower "
                f"rate: sonicmoe train --resume {shlex.quote(str(self.folder))} {lower}"
            )
        raise FloatingPointError(f"{what} The learning rate is {c.learning_rate:g}. {advice}")

    def _load(self, state: dict[str, Any]) -> None:
        if state["corpus"] != self.corpus_key:
            expected = f"the corpus {state['corpus']} of the checkpoint"
            remedy = "Continue with the data the run began with."
            raise bad_argument("data", expected, self.corpus_key, remedy)
        if state["step"] > self.config.steps:
            done = f"at least {state['step']}, which the run has done already"
            remedy = "Omit --steps, or pass more."
            raise bad_argument("steps", done, self.config.steps, remedy)
        checkpoint.restore(state, self.model, self.optimizer, self.world)
        self.step, self.seconds = state["step"], state["seconds"]
        self.pending = list(state["pending"].to(self.world.device))
        self.first_loss, self.last_loss = state["first_loss"], state["last_loss"]
        self.validation_loss = state["validation_loss"]


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _build_model(config: TrainConfig, world: parallel.World) -> Decoder:
    with world.device:
        fp8 = config.fp8_experts
        model = Decoder(config.model, config.backend, config.recompute, config.memory, fp8)
    if config.bf16_weights:
        model.to(torch.bfloat16)
    if config.compile:
        prepare_to_compile(config.backend)
        model.compile_blocks()
        for module in model.modules() if world.size == 1 else ():  # else FSDP gathers the weights
            if isinstance(module, MoE):
                module.refresh_fp8_weights()  # else the compiled layer quantizes in every call
    if world.size > 1:
        parallel.shard(model, model.blocks, world, config)
    return model


def make_deterministic(wanted: bool) -> None:
    """Make PyTorch use deterministic algorithms, or raise where it has none.

    Not `warn_only`: with it, attention keeps to kernels that do not repeat.
    """
    # cuBLAS reads it once, at the first GEMM of the process, so it must be set for later runs too.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    # Our kernels write every element of their outputs; filling buffers first would only cost time.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 for mypy


def _what_builds_code(config: TrainConfig, device: torch.device) -> str:
    if config.compile:
        return "torch.compile compiles the model, about half a minute without a cache"
    if device.type == "cuda":
        return "Triton compiles the kernels, some seconds without a cache"
    return ""


def check(config: TrainConfig, world: parallel.World) -> None:
    """Check backend, router, batch and memory for these ranks."""
    check_backend(config.backend, config)
    check_layer(config)
    parallel.check_expert_parallel(config, world)
    _check_batch(config, world)
    _check_memory(config, world)


def _check_batch(config: TrainConfig, world: parallel.World) -> None:
    """Raise unless a rank's share of the batch is below a micro-batch or a multiple of it."""
    share, rest = divmod(config.batch, world.size)
    if rest or share % min(config.micro_batch, max(share, 1)):
        unit = f"a multiple of micro_batch · ranks = {config.micro_batch} · {world.size}"
        raise bad_argument("batch", unit, config.batch, "Set batch or micro_batch.")


def _check_memory(config: TrainConfig, world: parallel.World) -> None:
    """Raise if the run does not fit, by estimate, instead of failing minutes later."""
    if world.device.type != "cuda":
        return
    micro_batch = min(config.micro_batch, config.batch // world.size)
    need = accounting.memory(dataclasses.replace(config, micro_batch=micro_batch), world.size)
    have = torch.cuda.get_device_properties(world.device).total_memory
    if need.total > have:
        parts = {"weights and optimizer": need.state, "kept for backward": need.kept}
        parts["head"] = need.head
        listed = ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items())
        got = f"{human_bytes(need.total)} by estimate ({listed})"
        remedy = "Lower micro_batch, set recompute=true or precision=bf16, or use torchrun."
        raise bad_argument("preset", f"a run that fits {human_bytes(have)} per GPU", got, remedy)


def share_of_peak(flops: float, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    peak = accounting.peak_flops(torch.cuda.get_device_name(device))
    return flops / peak if peak else None


def _balance(aux_loss: float, config: TrainConfig) -> float | None:
    """The Switch loss of a layer, E · Σ (share of probability · share of rows): 1 is even."""
    m = config.model
    if not m.aux_loss_coef or m.z_loss_coef:
        return None
    return aux_loss / m.num_layers / m.aux_loss_coef


@contextlib.contextmanager
def _stop_signals() -> Iterator:
    """The first SIGINT or SIGTERM only sets a flag; a second one ends the process."""
    seen: list[int] = []
    former: dict[int, Any] = {}

    def note(number, frame) -> None:
        seen.append(number)
        signal.signal(number, former[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            former[number] = signal.signal(number, note)
    except ValueError:  # not in the main thread: the caller handles signals
        former.clear()
    try:
        yield lambda: bool(seen)
    finally:
        for caught, handler in former.items():
            signal.signal(caught, handler)
