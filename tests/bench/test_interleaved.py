"""Contenders are timed interleaved, and a backward pass is what both take less the forward pass."""

from types import SimpleNamespace

import pytest
import torch

from sonicmoe import MoE
from sonicmoe.bench import host, timing
from sonicmoe.bench.measure import Timers, time_interleaved
from sonicmoe.bench.timing import interleaved
from sonicmoe.shapes import Problem


def test_every_timer_has_its_turn_in_every_round():
    turns = []

    def timer(name, times):
        left = iter(times)
        return lambda: turns.append(name) or next(left)

    found = interleaved(
        {"a": timer("a", (1.0, 9.0, 2.0)), "b": timer("b", (7.0, 5.0, 6.0))}, rounds=3
    )
    assert turns == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": 2.0, "b": 6.0}


def test_times_and_rates_of_each_contender():
    p = Problem(T=1000, H=100, I=10, E=4, K=2)
    found = time_interleaved(
        p, {0: Timers(lambda: 2.0, lambda: 5.0), 1: Timers(lambda: 1.0, lambda: 4.0)}
    )
    assert [(f["fwd_ms"], f["bwd_ms"], f["fwd_bwd_ms"]) for f in found.values()] == [
        (2.0, 3.0, 5.0), (1.0, 3.0, 4.0)
    ]  # fmt: skip
    work = 6 * 2000 * 100 * 10
    assert found[0]["fwd_tflops"] == pytest.approx(work / 2e-3 / 1e12)
    assert found[0]["bwd_tflops"] == pytest.approx(2 * work / 3e-3 / 1e12)
    assert found[1]["fwd_bwd_tflops"] == pytest.approx(3 * work / 4e-3 / 1e12)


def test_the_queue_of_the_device_stays_short(monkeypatch):
    """Between two waits no more than ten layers are queued, alone or in a stack of eight."""
    queued, most = [0], [0]

    def layers(number):
        queued[0] += number
        most[0] = max(most[0], queued[0])

    monkeypatch.setattr(timing, "synchronize", lambda device: queued.__setitem__(0, 0))
    timing.host_ms(lambda: layers(1), "cpu", calls=35, queued=10)
    assert most == [10]

    def ours(inputs, *, router, layers=1, run=layers):
        return SimpleNamespace(forward=lambda: run(layers), forward_backward=lambda: run(layers))

    most[0] = 0
    monkeypatch.setattr(host, "ours", ours)
    monkeypatch.setattr(host, "_dense", lambda inputs: ours(inputs, router=False))
    monkeypatch.setattr(host, "_module", lambda inputs, captured: {"fwd": lambda: layers(1)})
    host.measure_host("cpu", torch.float32)
    assert most == [10]


def test_the_figures_of_the_host_take_turns(monkeypatch):
    """A layer's share of a stack; two in the calling thread; a graph on a GPU alone."""
    threads = []

    def host_ms(call, device, calls, queued):
        threads.append(torch._C._is_multithreading_enabled())
        return 16.0

    monkeypatch.setattr(host, "host_ms", host_ms)
    found = host.measure_host("cpu", torch.float32)
    there = [True] * 6 + [False] * 2 + [True] * 4
    rounds = [there[::-1] if number % 2 else there for number in range(timing.ROUNDS)]
    assert threads == [thread for each in rounds for thread in each]
    assert list(found.values()) == [16.0] * 4 + [2.0] * 2 + [16.0] * 6

    captured = []
    monkeypatch.setattr(host, "is_cuda", lambda device: True)
    monkeypatch.setattr(
        torch.cuda, "make_graphed_callables", lambda layer, args: captured.append(layer) or layer
    )
    found = host.measure_host("cpu", torch.float32)
    assert list(found)[-2:] == ["graph_host_fwd_ms", "graph_host_fwd_bwd_ms"]
    assert threads[-14:] == [True] * 6 + [False] * 2 + [True] * 6
    assert [type(layer) for layer in captured] == [MoE]
