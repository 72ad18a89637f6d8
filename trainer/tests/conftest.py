"""A small corpus with a grammar to be learnt, and a model small enough to learn it in seconds."""

import contextlib
import os
import random
import signal

import pytest
import torch

from sonicmoe_trainer.presets import preset

TINY = {
    "vocab_size": 320, "context": 32, "num_layers": 2, "hidden_size": 32, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 16, "num_experts": 4, "experts_per_token": 2,
    "intermediate_size": 32, "steps": 30, "batch": 4, "micro_batch": 2, "warmup_steps": 3,
    "log_every": 1, "validate_every": 10, "validation_sequences": 8, "checkpoint_every": 10,
    "validation_fraction": 0.2, "tensorboard": False, "device": "cpu", "learning_rate": 1e-2,
}  # fmt: skip

_SUBJECTS = ("the old sailor", "a quiet engine", "our neighbour", "the river", "every router")
_VERBS = ("carries", "watches", "forgets", "repairs", "divides", "remembers")
_OBJECTS = ("the harbour", "seven letters", "a wooden bridge", "its own echo", "the first snow")


def _story(seed: int) -> str:
    draw = random.Random(seed)
    sentences = (
        f"{draw.choice(_SUBJECTS).capitalize()} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)}."
        for _ in range(60)
    )
    return " ".join(sentences)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"story-{i:02d}.txt").write_text(_story(i))
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny(text_folder):
    """The tiny configuration; `tiny.override({...})` varies it."""
    return preset("demo").override({**TINY, "data": [str(text_folder)], "target_loss": None})


@pytest.fixture
def command(text_folder, cache, tmp_path, monkeypatch):
    """`command(steps=4, …)`: the arguments of a tiny `sonicmoe train` below tmp_path/runs.

    Without pictures, which take longer than the training.
    """
    for picture in ("loss_curve", "comparison"):
        monkeypatch.setattr(f"sonicmoe_trainer.plots.{picture}", lambda *given: None)

    def arguments(**changes) -> list[str]:
        settings = TINY | {"data": str(text_folder)} | changes
        pairs = [x for k, v in settings.items() for x in ("--set", f"{k}={v}")]
        return ["train", "--preset", "demo", "--cache", str(cache), "--runs",
                str(tmp_path / "runs"), *pairs]  # fmt: skip

    return arguments


@pytest.fixture(autouse=True)
def one_thread():
    """Small GEMMs gain nothing from threads, and one is the same on every machine."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def stop_after(monkeypatch):
    """Within `with stop_after(n):`, a run gets a SIGTERM in its n-th step."""
    from sonicmoe_trainer import loop

    @contextlib.contextmanager
    def block(last: int):
        step = loop.Trainer.train_step

        def step_and_stop(self):
            step(self)
            if self.step == last:
                os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(loop.Trainer, "train_step", step_and_stop)
            yield

    return block


@pytest.fixture(scope="session")
def trained(tiny, cache, tmp_path_factory):
    """The folder and the numbers of a finished run."""
    from sonicmoe_trainer import run

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return folder, run.train(tiny, folder, cache)
