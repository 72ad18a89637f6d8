"""What tests of kept FP8 weights share."""

import pytest

from sonicmoe.reference import fp8


@pytest.fixture
def quantized(monkeypatch):
    """Weights that were quantized, in order."""
    found, quantize, into = [], fp8.quantize_weight, fp8.quantize_weight_into
    monkeypatch.setattr(fp8, "quantize_weight", lambda w, *o: found.append(w) or quantize(w, *o))
    monkeypatch.setattr(
        fp8, "quantize_weight_into", lambda *given: found.append(given[-1]) or into(*given)
    )
    return found
