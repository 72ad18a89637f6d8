"""What tests of kept FP8 weights share."""

import pytest

from sonicmoe.reference import quantize, weights


@pytest.fixture
def quantized(monkeypatch):
    """Weights that were quantized, in order."""
    found, new, into = [], weights.quantize_weight, quantize.quantize_weight_into
    monkeypatch.setattr(
        weights, "quantize_weight", lambda w, *o: found.append(w.dense) or new(w, *o)
    )
    monkeypatch.setattr(
        quantize, "quantize_weight_into", lambda *given: found.append(given[-1]) or into(*given)
    )
    return found
