"""Kept FP8 weights in several threads."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from kept_weights import fresh, layer, tokens

from sonicmoe.layer import fp8_weights
from sonicmoe.reference import quantize, weights


def test_threads_quantize_once(quantized, monkeypatch):
    """The second thread waits for the weights that the first one quantizes."""
    moe, inside, go_on = layer(), threading.Event(), threading.Event()
    moe(tokens())
    with torch.no_grad():
        moe.c_fc.weight.mul_(2)
        moe.c_proj.weight.mul_(2)
    want = fresh(moe)
    quantized.clear()
    places = ((weights, "quantize_weight"), (quantize, "quantize_weight_into"))
    for module, name, original in [(m, name, getattr(m, name)) for m, name in places]:

        def waiting(*given, function=original):
            found = function(*given)
            inside.set()
            assert go_on.wait(60)
            return found

        monkeypatch.setattr(module, name, waiting)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: moe(tokens())[0])
        assert inside.wait(60)  # W1 is new, W2 is not yet
        second = pool.submit(lambda: moe(tokens())[0])
        time.sleep(0.2)
        go_on.set()
        assert torch.equal(first.result(), want) and torch.equal(second.result(), want)
    assert len(quantized) == 2


def test_threads_with_weights_of_their_own():
    """At every line of one thread, another one calls with other weights."""
    pairs = [[torch.full((4, 32, 32), value) for _ in range(2)] for value in (1.0, 16.0)]
    other = threading.Event()

    def scales(store, own):
        try:
            return [q.w_scale[0].item() for q in store.quantized(*own, "torch")]
        finally:
            other.set()

    with ThreadPoolExecutor(1) as pool:
        for stop in range(1, 1000):
            store, line, there = layer()._fp8_weights, 0, None

            def trace(frame, event, _):
                nonlocal line, there
                if frame.f_code.co_filename == fp8_weights.__file__ and event == "line":
                    line += 1
                    if line == stop:  # noqa: B023
                        other.clear()
                        there = pool.submit(scales, store, pairs[1])  # noqa: B023
                        other.wait(0.02)  # longer if it waits for this one
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                found = scales(store, pairs[0])
            finally:
                sys.settrace(before)
            assert found == [2.0**-8] * 2, f"at line {stop}"
            if there is None:
                break
            assert there.result(60) == [2.0**-4] * 2, f"at line {stop}"
    assert 20 < stop < 999
