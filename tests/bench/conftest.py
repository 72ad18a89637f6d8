"""Benchmarks without a clock: one call instead of many."""

import pytest


@pytest.fixture
def quick(monkeypatch):
    """Call once and report 1 ms: these tests look at what is kept, not at the clock."""
    from research import host, timing

    monkeypatch.setattr(timing, "_clocked", lambda call, device, budget_s, least: [1.0])

    def once(call, device, calls, queued):
        call()
        return 1.0

    monkeypatch.setattr(host, "host_ms", once)
