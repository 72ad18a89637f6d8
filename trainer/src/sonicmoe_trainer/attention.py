"""Causal attention: the fastest kernel, or one whose gradients repeat bit for bit.

By default PyTorch chooses the kernel: cuDNN on H100, H200 and B200, whose gradients differ from run
to run in their last bits. With deterministic algorithms it has only FlashAttention-2, in 2.6 times
the time (6.0 against 2.3 ms: 7B on an H200); compiled FlexAttention repeats too, and takes 3.2 ms.
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

_BLOCK = 128  # 64 and 256 took as long, within 4%
_SMALLEST_HEAD = 16  # of a GEMM in Triton


def repeatable_mask(length: int, head_dim: int, device: torch.device) -> BlockMask | None:
    """The mask with which compiled `attend` repeats bit for bit, or None if SDPA is right.

    None without deterministic algorithms, on a CPU, and for sizes that FlexAttention is not made
    for. Only for code that is compiled: otherwise FlexAttention keeps all scores.
    """
    wanted = device.type == "cuda" and torch.are_deterministic_algorithms_enabled()
    if not wanted or length < _BLOCK or head_dim < _SMALLEST_HEAD:
        return None
    return causal_mask(length, device)


@functools.lru_cache(maxsize=4)
def causal_mask(length: int, device: torch.device) -> BlockMask:
    """One object per length: another one would be compiled again."""
    return create_block_mask(_causal, None, None, length, length, str(device), _BLOCK)


def _causal(batch, head, query, key):
    return query >= key


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask | None = None,
) -> torch.Tensor:
    """q (B, heads, S, D), k and v (B, fewer or as many heads, L, D) → (B, heads, S, D).

    The S queries are those of the last S of L keys; `mask` is used where S = L.
    """
    grouped, queries, keys = q.shape[1] != k.shape[1], q.shape[2], k.shape[2]
    if queries == keys:
        if mask is not None:
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    past = None  # one query sees all keys
    if queries > 1:
        past = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=past, enable_gqa=grouped)
