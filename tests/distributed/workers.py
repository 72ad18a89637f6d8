"""Processes that stay, so that many tests pay for starting them once."""

import os
import queue
import socket
import sys
import traceback
from datetime import timedelta

import forked
import torch
import torch.distributed as dist

SECONDS = 240  # a hang is an error, and said before the limit of a test


class Workers:
    """`size` processes in one gloo group, which `run` makes call a function."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list = []

    def start(self) -> None:
        context = forked.context()
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(self.size)]
        for rank, tasks in enumerate(self.tasks):
            arguments = (rank, self.size, port, sys.path, tasks, self.results)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()

    def run(self, function, *args) -> list:
        """The results of `function(rank, *args)`, which must be importable, on every rank."""
        if not self.processes:
            self.start()
        for tasks in self.tasks:
            tasks.put((function.__module__, function.__name__, args))
        found: dict = {}
        while len(found) < self.size:
            try:
                rank, error, result = self.results.get(timeout=SECONDS)
            except queue.Empty:
                missing = sorted(set(range(self.size)) - set(found))
                error = f"no answer from ranks {missing} in {SECONDS} s"
            if error:
                self.stop()
                raise AssertionError(f"rank {rank} of {self.size}: {error}")
            found[rank] = result
        return [found[rank] for rank in range(self.size)]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes.clear()


def _serve(rank, size, port, path, tasks, results) -> None:
    sys.path[:] = path
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS / 2)
    )
    while True:
        module, name, args = tasks.get()
        try:
            torch.manual_seed(0)
            function = getattr(__import__(module, fromlist=[name]), name)
            results.put((rank, None, function(rank, *args)))
        except BaseException:
            results.put((rank, traceback.format_exc(), None))
