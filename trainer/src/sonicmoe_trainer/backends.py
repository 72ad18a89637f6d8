"""Backends of the layer: this package's kernels, plain PyTorch, or a peer to compare with.

Peers get the same weights and the same choice of experts and differ only in how the expert GEMMs
are computed. Autograd decides what they keep for the backward pass.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sonicmoe import KernelBackendMoE, MoE, topk_scores
from sonicmoe.plugins import bad_argument, need

from .config import TrainConfig

_LAYER = {"auto": None, "sonicmoe": KernelBackendMoE.sonicmoe, "torch": KernelBackendMoE.torch}


def run_layer(moe: MoE, x: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(…, H) → (…, H) and the auxiliary loss."""
    if backend in _LAYER:
        return moe(x, kernel_backend_moe=_LAYER[backend])
    return _peer_layer(moe, x, _PEERS[backend])


def check_backend(backend: str, config: TrainConfig) -> None:
    """Raise a ValueError if there is no such backend, or if it would ignore a setting."""
    if backend not in BACKENDS:
        raise bad_argument("backend", f"one of {', '.join(BACKENDS)}", repr(backend), "See --help.")
    only_ours = {
        f"router={config.model.router}": config.model.router != "softmax_over_topk",
        f"precision={config.precision}": config.fp8_experts,
        f"memory={config.memory}": config.memory != "keep",
        f"z_loss_coef={config.model.z_loss_coef:g}": config.model.z_loss_coef != 0,
    }
    for setting, is_set in only_ours.items():
        if is_set and backend in _PEERS:
            expected, remedy = f"{', '.join(_LAYER)} with {setting}", "The other packages lack it."
            raise bad_argument("backend", expected, backend, remedy)
    if backend == "scattermoe":
        need("scattermoe.mlp", "backend=scattermoe")


def prepare_to_compile(backend: str) -> None:
    """Keep ScatterMoE out of compiled graphs: it tunes its kernels when they run."""
    if backend == "scattermoe":
        _PEERS[backend] = torch.compiler.disable(_scattermoe)


def _peer_layer(moe: MoE, x: torch.Tensor, experts: Callable):
    flat = x.reshape(-1, x.shape[-1])
    logits = moe.router(flat)
    scores, ids = topk_scores(logits, moe.top_k)
    w1: torch.Tensor = moe.c_fc.weight
    w2: torch.Tensor = moe.c_proj.weight
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        flat, w1, w2 = flat.to(dtype), w1.to(dtype), w2.to(dtype)
    out = experts(flat, scores.to(flat.dtype), ids.long(), w1, w2)
    return out.view(x.shape), _balance_loss(moe, logits, ids)


def _balance_loss(moe: MoE, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    share = logits.float().softmax(-1).mean(0)
    rows = torch.bincount(ids.flatten(), minlength=moe.num_experts)
    return moe.aux_loss_coef * moe.num_experts * (share * rows / ids.numel()).sum()


def _gather_grouped_mm(x, scores, ids, w1, w2):
    """Plain PyTorch: sort, gather the rows, two grouped GEMMs, scatter back."""
    experts, k = w1.shape[0], ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    token = order // k
    ends = torch.bincount(ids.flatten(), minlength=experts).cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(x[token], w1.mT, offs=ends).chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, w2.mT, offs=ends)
    return torch.zeros_like(x).index_add(0, token, y * scores.flatten()[order, None])


def _scattermoe(x, scores, ids, w1, w2):
    """ScatterMoE's fused scatter-to-group GEMMs."""
    peer = need("scattermoe.parallel_experts", "backend=scattermoe")
    experts, k = w1.shape[0], ids.shape[1]
    sorted_ids, order, offsets = peer.flatten_sort_count(ids, num_experts=experts)
    common = (sorted_ids, order, offsets)
    h = peer.parallel_linear(x, w1.mT, k, *common, grouped_out=True)
    gate, up = h.chunk(2, dim=-1)
    return peer.parallel_linear(F.silu(gate) * up, w2.mT, 1, *common, grouped_in=True, gates=scores)


_PEERS: dict[str, Callable] = {"grouped_mm": _gather_grouped_mm, "scattermoe": _scattermoe}
LAYER_BACKENDS = tuple(_LAYER)
BACKENDS = (*LAYER_BACKENDS, *_PEERS)
