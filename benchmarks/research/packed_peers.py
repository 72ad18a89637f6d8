"""Other packages that run LoRA on packed experts, from a folder: nothing of them is in this one.

benchmarks/README.md says how to fill the folder. What is not in it is left out.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sonicmoe import Mxfp4, Nf4
from sonicmoe.packed import PackedWeight

from . import packed_candidates as plain
from .packed_candidates import NAMES, Forward
from .packed_layer import Inputs, activate

_AXOLOTL = "axolotl.integrations.kernels.libs.scattermoe_lora"
# Tiles of axolotl's forward kernel (M, N, K, warps, stages): of its 108 those with the largest M
# and N, whose trial for each size of a layer takes seconds, not minutes.
_TILES = [(128, 64, 64, 4, 3), (128, 64, 64, 8, 3), (128, 64, 64, 4, 4), (128, 64, 32, 4, 4)]


def _file(folder: Path, name: str) -> ModuleType:
    """A single file of a package, without what its package imports."""
    path = folder / "unsloth" / f"{name}.py"
    if not path.exists():
        raise ModuleNotFoundError(f"no {path}")
    spec = importlib.util.spec_from_file_location(f"peer_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where Triton looks for the source of its kernels
    spec.loader.exec_module(module)
    return module


# --- bitsandbytes ---------------------------------------------------------------------------------
def _state(packed: PackedWeight) -> tuple[torch.Tensor, Any]:
    """Codes and the `QuantState` of bitsandbytes; of weights as they are in memory."""
    from bitsandbytes.functional import QuantState

    assert isinstance(packed, Nf4) and packed.nested is None and not packed.transposed
    state = QuantState(
        packed.absmax, torch.Size(packed.shape), packed.code, 64, "nf4", torch.bfloat16
    )
    return packed.codes.view(-1, 1), state


def by_bitsandbytes(packed: PackedWeight) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(*_state(packed))


def peft_on_bitsandbytes(inputs: Inputs, weights: tuple[Any, Any]) -> Forward:
    """PEFT's own forward pass on experts that bitsandbytes parametrized."""
    from bitsandbytes.nn.parametrize import Bnb4bitParametrization

    module = plain.experts_module(inputs)
    for name, w in zip(NAMES, weights, strict=True):
        codes, state = _state(w)
        if inputs.layer.like_gpt_oss:
            raise NotImplementedError("its blocks run along the other side of the weight")
        module.register_parameter(name, nn.Parameter(codes, requires_grad=False))
        parametrization = Bnb4bitParametrization(state)
        nn.utils.parametrize.register_parametrization(module, name, parametrization, unsafe=True)
    return plain.with_peft(module, inputs)


# --- unsloth --------------------------------------------------------------------------------------
def unsloth_decoder(folder: Path) -> plain.Decoder:
    module = _file(folder, "mxfp4_dequant")

    def decode(packed: PackedWeight) -> torch.Tensor:
        assert isinstance(packed, Mxfp4)
        # Without the public function's choice of a device, for which it imports its package.
        options = (torch.bfloat16, False, None, None, None)
        return module._mxfp4_dequantize(packed.blocks, packed.scales, *options)

    return decode


def unsloth_nf4(folder: Path, inputs: Inputs, weights: tuple[Any, Any]) -> Forward:
    """Its grouped GEMM that reads NF4, within the layer of `plain.grouped`."""
    module = _file(folder, "moe_nf4_grouped")

    def gemm(packed: Any) -> plain.Gemm:
        _, n, k = packed.shape
        absmax, nothing = packed.absmax, packed.absmax[:1]
        spec = {
            "packed": packed.codes, "absmax": absmax, "code": packed.code, "absmax2": absmax,
            "code2": absmax, "offset": nothing, "K": k, "N": n, "kn_layout": False,
            "blocksize": 64, "blocksize2": 1, "nested": False,
            "w_dtype": module._W_DTYPE_ID[torch.bfloat16], "num_experts": len(packed),
        }  # fmt: skip
        return lambda rows, ends: module.nf4_grouped_mm(rows, ends, spec)

    return plain.grouped(inputs, (gemm(weights[0]), gemm(weights[1])))


# --- axolotl --------------------------------------------------------------------------------------
def _axolotl() -> ModuleType:
    module = importlib.import_module(_AXOLOTL)
    kernels = importlib.import_module(f"{_AXOLOTL}.kernels.lora_ops")
    _choose(kernels._scatter2scatter_lora, _TILES, "MNK")
    return module


def _choose(tuner: Any, tiles: Sequence[tuple[int, ...]], order: str) -> None:
    """Let a kernel's tuner try these tiles alone: sizes in this order, warps, stages."""

    def tile(config: Any) -> tuple[int, ...]:
        sizes = (config.kwargs[f"BLOCK_{name}"] for name in order)
        return (*sizes, config.num_warps, config.num_stages)

    chosen = [c for c in tuner.configs if tile(c) in tiles]
    assert chosen
    tuner.configs = chosen


def axolotl(inputs: Inputs, weight_of: Callable[[int], Any]) -> Forward:
    """Its forward pass; `weight_of(0)` and `weight_of(1)` are what its GEMMs take."""
    module, (i, E, K) = _axolotl(), (inputs, *inputs.layer.sizes[2:])
    # Compiled it only calls the same operators.
    sort = module.flatten_sort_count
    sort = getattr(sort, "_torchdynamo_orig_callable", sort)
    activation: Any = activate
    if i.x.is_cuda:
        activation = torch.compile(activate, dynamic=True)

    def forward() -> torch.Tensor:
        expert, order, ends = sort(i.ids, num_experts=E)

        def projection(x, at, k, lora, bias, **options):
            rank = len(lora.a) // E
            b = module.layers.peft_lora_B_to_scattermoe(lora.b, E, rank)
            return module.parallel_linear_lora(
                x, weight_of(at), k, expert, order, ends, lora.a, b, 1.0, expert_biases=bias,
                **options,
            )  # fmt: skip

        z = projection(i.x, 0, K, i.lora1, i.b1, grouped_in=False, grouped_out=True)
        a = activation(z, i.layer.like_gpt_oss)
        gates = i.scores.to(a.dtype)
        return projection(a, 1, 1, i.lora2, i.b2, grouped_in=True, grouped_out=False, gates=gates)

    return forward


def axolotl_nf4(inputs: Inputs, weights: tuple[Any, Any]) -> Forward:
    """Weights decoded by its kernel, in the backward pass again."""
    _axolotl()
    decoder = importlib.import_module(f"{_AXOLOTL}.selective_dequant_kernel")
    active = torch.arange(len(weights[0]), device=inputs.x.device)

    def decoded(packed: Any) -> torch.Tensor:
        dense = decoder.selective_dequant_nf4_triton(
            packed.codes, packed.absmax, active, tuple(packed.shape[1:]), 64, torch.bfloat16,
            packed.code,
        )  # fmt: skip
        return dense.mT

    return axolotl(inputs, lambda at: _with_recipe(decoded, weights[at]))


def axolotl_decoded(inputs: Inputs, weights: tuple[Any, Any], decode: plain.Decoder) -> Forward:
    """Weights decoded by another package, in the backward pass again."""
    return axolotl(inputs, lambda at: _with_recipe(lambda w: decode(w).mT, weights[at]))


def _with_recipe(decoded: Callable[[Any], torch.Tensor], packed: Any) -> torch.Tensor:
    """Its autograd function keeps `recipe` in place of a weight that has one."""
    dense: Any = decoded(packed)
    dense.recipe = lambda: decoded(packed)
    return dense


def axolotl_mxfp4(inputs: Inputs, weights: tuple[Any, Any]) -> Forward:
    """Its kernels that decode within the GEMM, with the tiles it measured on an H200."""
    _axolotl()
    kernels: Any = importlib.import_module(f"{_AXOLOTL}.kernels.lora_ops")
    mx = importlib.import_module(f"{_AXOLOTL}.mx_weights")
    # It takes them for two shapes with many tokens alone; others try 144 tiles, for minutes.
    _choose(kernels._scatter2scatter_lora_mx, kernels._GLM_MX_SUBSET, "MNK")
    _choose(kernels._scatter2scatter_lora_dX_mx, kernels._GLM_DX_MX_SUBSET, "MKN")
    made = []
    for packed in weights:
        experts, n, k = packed.shape
        codes = packed.blocks.view(experts, n, k // 2)
        made.append(
            mx.MXWeights(
                packed=codes, scales=packed.scales, K=k, N=n, layout=mx.MXLayout.FWD,
                block_size=32, num_experts=experts, orig_dtype=torch.bfloat16,
            )
        )  # fmt: skip
    return axolotl(inputs, lambda at: made[at])
