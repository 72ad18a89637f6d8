"""Attention with sinks, as gpt-oss has, by PyTorch's memory-efficient kernel.

A sink is one more key whose value is zero and whose logit is a number of the head. transformers'
own eager attention keeps the probabilities of all pairs, which take more memory than the experts.
"""

import torch
from torch import nn
from torch.nn import functional as F

NAME = "with_sinks"  # of the attention implementation
_PAD = 8  # keys and columns are added in eights, as the kernel wants them


def register_sink_attention() -> str:
    """Make `NAME` a valid `attn_implementation` of transformers; return it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, sink_attention)
    return NAME


def sink_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it, for whole sequences: query (B, heads, S, d), s_aux (heads,).

    The mask is causal, with a window if the layer has one; transformers passes none for this name.
    """
    assert attention_mask is None and s_aux is not None and dropout == 0
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    # q' = [q, 1] and k' = [k, 0] have the logit q·k, and with the sink's k' = [0, sink] its own.
    sink = (s_aux / scaling).to(query.dtype)[None, :, None, None]
    q = F.pad(F.pad(query, (0, 1), value=1.0), (0, _PAD - 1))
    k, v = (t.repeat_interleave(groups, 1) for t in (key, value))
    of_sink = F.pad(sink, (query.shape[3], _PAD - 1)).expand(len(q), -1, _PAD, -1)
    k = torch.cat([F.pad(k, (0, _PAD)), of_sink], 2)
    v = F.pad(v, (0, 0, 0, _PAD))
    mask = _mask(length, sliding_window, query.device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _mask(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which keys a query sees: those before it within the window, and one of the eight sinks."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    return F.pad(F.pad(seen, (0, 1), value=True), (0, _PAD - 1))
