"""Processes that are forked from one that has imported PyTorch, and `torchrun` with such ranks.

Importing takes a process longer than most of what tests let it do.
"""

import contextlib
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed import run as torchrun_module
from torch.distributed.launcher.api import elastic_launch

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.multiprocessing",
    "sonicmoe_trainer.run",
]


def context() -> ForkServerContext:
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(PRELOADED)
    return forked


def start(function: Callable, *args: Any):
    """A process that calls an importable function with one thread for PyTorch, and is silent."""
    process = context().Process(target=_call, args=(os.devnull, function, *args), daemon=True)
    process.start()
    return process


def _call(output: str, function: Callable, *args: Any) -> None:
    torch.set_num_threads(1)
    with open(output, "a", buffering=1) as file, contextlib.redirect_stdout(file):
        function(*args)


def torchrun(*command: str, output: Path | str = os.devnull) -> None:
    """What the command does, its script and its arguments being the last ones.

    Options, rendezvous, agent and the environment of a rank are its own. What the ranks print is
    appended to `output`.
    """
    args = torchrun_module.parse_args(command)
    script = args.training_script, tuple(args.training_script_args), str(output)

    def launch(config, entrypoint):
        config.start_method = "forkserver"
        return lambda *_: elastic_launch(config, _run_script)(*script)

    context()
    with (
        mock.patch.object(torchrun_module, "elastic_launch", launch),
        ThreadPoolExecutor(1) as pool,  # the main thread would lose its handlers of signals
    ):
        pool.submit(torchrun_module.run, args).result()


def _run_script(script: str, arguments: tuple[str, ...], output: str) -> None:
    sys.argv = [script, *arguments]
    _call(output, runpy.run_path, script, None, "__main__")
