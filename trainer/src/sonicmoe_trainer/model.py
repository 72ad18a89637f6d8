"""A compact decoder: attention, RMSNorm, rotary positions, a Mixture of Experts in every block.

It is exactly the architecture of Qwen3-MoE (heads normalized before the rotation, gate and up
concatenated, tied head), so that an exported model computes the same.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sonicmoe import ActivationType, MoE
from sonicmoe.routing import Router, TokenRounding

from .attention import attend, repeatable_mask
from .backends import run_layer
from .config import ModelConfig, TrainConfig
from .cross_entropy import linear_cross_entropy

Cache = list[tuple[torch.Tensor, torch.Tensor] | None]  # keys and values of each layer


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


def rotary(start: int, length: int, head_dim: int, theta: float, device: torch.device):
    """cos and sin (length, head_dim) of the positions from `start`, in fp32."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angle = torch.arange(start, start + length, device=device).float()[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x_i, x_{i+D/2}) by the angle of their position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def forward(self, x, cos, sin, mask=None, past=None, keep=False):
        """(B, S, H) → (B, S, H) and, with `keep`, keys and values including `past`."""

        def heads(t):
            return t.unflatten(-1, (-1, self.head_dim))

        q = rotate(self.q_norm(heads(self.q_proj(x))).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(heads(self.k_proj(x))).transpose(1, 2), cos, sin)
        v = heads(self.v_proj(x)).transpose(1, 2)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        out = attend(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v) if keep else None


def _router(c: ModelConfig) -> str | Router:
    name, _, subroutine = c.router.partition(":")
    if name != "token_rounding":
        return c.router
    return TokenRounding(
        c.num_experts, c.experts_per_token, tile=c.rounding_tile, subroutine=subroutine or "nr-f"
    )


def _layer(c: ModelConfig, memory: str, fp8: bool, device: str | None = None) -> MoE:
    sizes = (c.num_experts, c.experts_per_token, c.hidden_size, c.intermediate_size)
    options: dict[str, Any] = {"router": _router(c), "gate_up": "concatenated", "memory": memory}
    options |= {"aux_loss_coef": c.aux_loss_coef, "z_loss_coef": c.z_loss_coef, "device": device}
    if fp8:
        options |= {"precision": "fp8", "cache_fp8_weights": True}
    return MoE(*sizes, ActivationType.SWIGLU, False, c.init_std, **options)


def check_layer(config: TrainConfig) -> None:
    """Raise a ValueError if `MoE` rejects the sizes, the router or FP8; uses no memory."""
    _layer(config.model, config.memory, config.fp8_experts, device="meta")


class Block(nn.Module):
    """Attention and MoE layer. `recompute` checkpoints inside the block: a checkpoint around a
    compiled block would also recompute its output."""

    def __init__(
        self,
        c: ModelConfig,
        backend: str,
        recompute: bool = False,
        memory: str = "keep",
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self.backend, self.recompute = backend, recompute
        self.attention_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.attention = Attention(c)
        self.moe_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.moe = _layer(c, memory, fp8)

    def forward(self, x, cos, sin, mask=None, past=None, keep=False):
        if self.recompute and self.training and not keep:
            return checkpoint(self._forward, x, cos, sin, mask, use_reentrant=False)
        return self._forward(x, cos, sin, mask, past, keep)

    def _forward(self, x, cos, sin, mask=None, past=None, keep=False):
        attended, cache = self.attention(self.attention_norm(x), cos, sin, mask, past, keep)
        x = x + attended
        mixed, aux_loss = run_layer(self.moe, self.moe_norm(x), self.backend)
        return x + mixed, aux_loss, cache


class Decoder(nn.Module):
    """Token ids (B, S) → logits or their loss. The head is the embedding."""

    def __init__(
        self,
        config: ModelConfig,
        backend: str = "auto",
        recompute: bool = False,
        memory: str = "keep",
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        options = (config, backend, recompute, memory, fp8)
        blocks = (Block(*options) for _ in range(config.num_layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.is_compiled = False
        self.reset_parameters()

    def compile_blocks(self) -> None:
        """Compile the block, once for all layers, before the first call."""
        for block in self.blocks:
            block.compile()
        self.is_compiled = True

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights; projections into the residual stream are scaled down by the depth."""
        c = self.config
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=c.init_std)
        shrink = (2 * c.num_layers) ** -0.5
        for module in self.modules():
            if isinstance(module, Block):
                module.attention.o_proj.weight.mul_(shrink)
                module.moe.c_proj.weight.mul_(shrink)

    def forward(self, ids, targets=None, *, cache: Cache | None = None, loss_chunk: int = 0):
        """With targets: the mean cross-entropy and the sum of the layers' auxiliary losses.

        Without targets: the logits (B, S, V). A `cache` (one entry per layer, filled here)
        continues text: each call passes the tokens that follow those before.
        """
        x = self.embed(ids)
        if torch.is_autocast_enabled(x.device.type):  # the residual stream is bfloat16 there too
            x = x.to(torch.get_autocast_dtype(x.device.type))
        start = cache[0][0].shape[2] if cache and cache[0] else 0
        c = self.config
        cos, sin = rotary(start, ids.shape[1], c.head_dim, c.rope_theta, ids.device)
        repeatable = self.is_compiled and cache is None
        mask = repeatable_mask(ids.shape[1], c.head_dim, x.device) if repeatable else None
        aux_losses = []
        for i, block in enumerate(self.blocks):
            if cache is not None:
                x, aux_loss, cache[i] = block(x, cos, sin, past=cache[i], keep=True)
            else:
                x, aux_loss, _ = block(x, cos, sin, mask)
            aux_losses.append(aux_loss)
        x = self.norm(x)
        if targets is None:
            return F.linear(x, self.embed.weight)
        given = (x.flatten(0, 1), self.embed.weight, targets.flatten())
        return linear_cross_entropy(*given, loss_chunk), sum(aux_losses)
