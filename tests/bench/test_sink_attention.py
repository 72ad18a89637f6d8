"""Attention with sinks of the benchmark of a whole model, against transformers' own."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="comes with the extra 'test'")

from research.sink_attention import register_sink_attention, sink_attention
from transformers import AttentionInterface
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

B, HEADS, KV, LENGTH, D = 2, 4, 2, 24, 16


@pytest.mark.parametrize("window", [None, 8, 1])
def test_it_is_that_of_transformers(window):
    torch.manual_seed(0)
    heads = (HEADS, KV, KV)
    q, k, v = (torch.randn(B, h, LENGTH, D, dtype=torch.float64) for h in heads)
    q[:, :, 3] *= 30  # outliers
    sinks = torch.tensor([-20.0, 0.0, 3.0, 20.0], dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=HEADS // KV, training=True)
    rows, columns = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    hidden = (columns > rows) | (columns <= rows - (window or LENGTH))
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    found = []
    for function, given in ((eager_attention_forward, mask), (sink_attention, None)):
        out, _ = function(
            module, q, k, v, given, scaling=0.25, dropout=0.0, sliding_window=window, s_aux=sinks
        )
        grads = torch.autograd.grad(out.square().sum(), leaves)
        found.append((out, *grads))
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_transformers_knows_it():
    name = register_sink_attention()
    assert AttentionInterface()[name] is sink_attention
