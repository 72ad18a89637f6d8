"""How checkpoint files store packed experts: the tensors of one weight, and what they become.

A weight `experts.gate_up_proj` has a tensor per suffix, such as `experts.gate_up_proj_blocks`. The
files of some families have these tensors for each expert; transformers stacks them.
"""

import re
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from ..errors import bad_argument
from ..packed import Fp8Blocks, Int4, Mxfp4, NestedAbsmax, Nf4, PackedWeight
from ..shapes import ceil_div

__all__ = ["Format", "Sizes", "check_method", "format_of"]

_DENSE = "Load it with dequantize=True in its quantization_config."


class Sizes(NamedTuple):
    """A weight (E, N, K); `swapped` if the dense parameter is (E, K, N)."""

    experts: int
    n: int
    k: int
    swapped: bool
    parts: int = 1  # matrices that a file has apart in the rows of this one: gate and up

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.experts, self.n, self.k

    def check_multiple(self, format: str, block: int) -> None:
        if self.k % block:
            expected = f"a multiple of {block} in {format}"
            raise bad_argument("in_features", expected, self.k, _DENSE)


class Format:
    """One way to store a weight: tensors by the suffix of their names."""

    def tensors(self, sizes: Sizes) -> dict[str, torch.Tensor]:
        """Empty ones, of the sizes and dtypes in the file, on the current device."""
        raise NotImplementedError

    def pack(self, found: dict[str, torch.Tensor], sizes: Sizes) -> PackedWeight:
        """The weight of the tensors in the file."""
        raise NotImplementedError

    def unpack(self, packed: Any, sizes: Sizes) -> dict[str, torch.Tensor]:
        """The inverse of `pack`."""
        raise NotImplementedError


class _Mxfp4(Format):
    def tensors(self, sizes):
        sizes.check_multiple("MXFP4", 32)
        scales = (sizes.experts, sizes.n, sizes.k // 32)
        return {
            "_blocks": torch.empty(*scales, 16, dtype=torch.uint8),
            "_scales": torch.empty(scales, dtype=torch.uint8),
        }

    def pack(self, found, sizes):
        return Mxfp4(found["_blocks"].contiguous(), found["_scales"].contiguous())

    def unpack(self, packed, sizes):
        return {"_blocks": packed.blocks, "_scales": packed.scales}


class _Fp8(Format):
    def __init__(self, scale_dtype: torch.dtype = torch.float32) -> None:
        self.scale_dtype = scale_dtype

    def tensors(self, sizes):
        rows = sizes.n // sizes.parts
        if sizes.parts > 1 and rows % 128:
            expected = "a multiple of 128 rows of gate and of up, which share no block in the file"
            raise bad_argument("intermediate_size", expected, rows, _DENSE)
        scales = (sizes.experts, ceil_div(sizes.n, 128), ceil_div(sizes.k, 128))
        return {
            "": torch.empty(sizes.shape, dtype=torch.float8_e4m3fn),
            "_scale_inv": torch.empty(scales, dtype=self.scale_dtype),
        }

    def pack(self, found, sizes):
        return Fp8Blocks(found[""].contiguous(), found["_scale_inv"].contiguous())

    def unpack(self, packed, sizes):
        return {"": packed.weight, "_scale_inv": packed.scale_inv}


class _Int4(Format):
    def tensors(self, sizes):
        sizes.check_multiple("INT4", 32)
        experts, n, k = sizes.shape
        return {
            "_packed": torch.empty(experts, n, k // 8, dtype=torch.int32),
            "_scale": torch.empty(experts, n, k // 32, dtype=torch.bfloat16),
            "_shape": torch.empty(experts, 2 * sizes.parts, dtype=torch.int64),
        }

    def pack(self, found, sizes):
        want = self._shapes(sizes)
        if not torch.equal(found["_shape"].cpu().long(), want):
            got = found["_shape"].unique(dim=0).tolist()
            raise bad_argument("weight_shape", f"{want[0].tolist()} of every expert", got, _DENSE)
        return Int4(found["_packed"].contiguous(), found["_scale"].contiguous())

    def unpack(self, packed, sizes):
        shape = self._shapes(sizes).to(packed.device)
        return {"_packed": packed.packed, "_scale": packed.scale, "_shape": shape}

    def _shapes(self, sizes: Sizes) -> torch.Tensor:
        of_one = [sizes.n // sizes.parts, sizes.k] * sizes.parts
        return torch.tensor(of_one).repeat(sizes.experts, 1)


class _Nf4(Format):
    """Ours: transformers and bitsandbytes have no files with quantized 3-D weights.

    The codes have the name of the dense weight, whose shape differs: so a program that does not
    know the format raises, and does not take the weight for missing and make a random one.
    """

    codes = ""  # "_codes" in the files of earlier versions

    def __init__(self, nested: bool = False) -> None:
        self.nested = nested

    def tensors(self, sizes):
        if sizes.n * sizes.k % 64:
            expected = "weights of an expert in blocks of 64"
            remedy = "Leave the experts out: llm_int8_skip_modules=['experts']."
            raise bad_argument("experts", expected, sizes.shape, remedy)
        weights = sizes.experts * sizes.n * sizes.k
        found = {
            self.codes: torch.empty(weights // 2, 1, dtype=torch.uint8),
            "_absmax": torch.empty(weights // 64, dtype=torch.float32),
            "_code": torch.empty(16, dtype=torch.float32),
        }
        if self.nested:
            found["_absmax"] = found["_absmax"].to(torch.uint8)
            found["_absmax2"] = torch.empty(ceil_div(weights // 64, 256), dtype=torch.float32)
            found["_code2"] = torch.empty(256, dtype=torch.float32)
            found["_offset"] = torch.empty((), dtype=torch.float32)
        return found

    def pack(self, found, sizes):
        nested = None
        if self.nested:
            nested = NestedAbsmax(found["_code2"], found["_absmax2"], found["_offset"])
        codes, absmax, code = (found[name] for name in (self.codes, "_absmax", "_code"))
        return Nf4(codes, absmax, sizes.shape, code, nested, transposed=sizes.swapped)

    def unpack(self, packed, sizes):
        found = {"": packed.codes, "_absmax": packed.absmax, "_code": packed.code.clone()}
        if packed.nested is not None:
            code2, absmax2, offset, _ = packed.nested
            found |= {"_code2": code2.clone(), "_absmax2": absmax2, "_offset": offset}
        return found


def format_of(config: Any) -> Format:
    """The format of experts in a file with this `quantization_config`; a ValueError for others."""
    method = _text(config.quant_method)
    if method == "fp8":
        _require("activation_scheme", "dynamic", config)
        _require("weight_block_size", [128, 128], config)
        _require("expert_dtype", "fp8", config)
        e8m0 = getattr(config, "scale_fmt", None) == "ue8m0"
        return _Fp8(torch.float8_e8m0fnu if e8m0 else torch.float32)
    if method == "bitsandbytes":
        return _Nf4(config.bnb_4bit_use_double_quant)
    if method == "compressed-tensors":
        _check_int4(config.quantization_config)
        return _Int4()
    return _Mxfp4()


def _text(option: Any) -> str:
    return str(getattr(option, "value", option))


def _require(name: str, value: Any, config: Any) -> None:
    got = getattr(config, name, value)
    got = list(got) if isinstance(got, tuple) else got
    if got != value:
        raise bad_argument(name, f"{value} for experts that stay in FP8", got, _DENSE)


def _check_int4(config: Any) -> None:
    """Raise unless the experts' scheme of compressed-tensors is symmetric INT4 in groups of 32."""
    from transformers.integrations.compressed_tensors import get_experts_scheme

    scheme = get_experts_scheme(config)
    weights = scheme.weights
    found = {
        "num_bits": weights.num_bits,
        "type": _text(weights.type),
        "symmetric": weights.symmetric,
        "strategy": _text(weights.strategy),
        "group_size": weights.group_size,
        "actorder": bool(weights.actorder),
        "format": _text(scheme.format or config.format),
    }
    wanted = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "actorder": False,
        "format": "pack-quantized",
    }
    wrong = {name: value for name, value in found.items() if value != wanted[name]}
    if scheme.input_activations is not None:
        wrong["input_activations"] = scheme.input_activations.num_bits
    if wrong:
        expected = ", ".join(f"{name}={value}" for name, value in wanted.items())
        got = ", ".join(f"{name}={value}" for name, value in wrong.items())
        raise bad_argument("quantization_config", expected, got, _DENSE)


# --- which of them can be loaded ------------------------------------------------------------------
def entry(config: Any, name: str) -> Any:
    """An entry of a `quantization_config`, which is a dict in a file."""
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def asks_for_dense(config: Any) -> bool:
    return bool(entry(config, "dequantize"))


# Of experts in a configuration; before a model is made, others may be dense.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LISTS = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")


def _names_all_experts(name: str) -> bool:
    """False for shared experts, and for those of one layer: others would be quantized."""
    return "experts" in name and "shared" not in name and not re.search(r"\.\d+\.", name)


# The oldest transformers that reads all that a format needs, and rounds as our experts do.
_SINCE = {
    "mxfp4": "5.10",
    "bitsandbytes": "5.10",
    "fp8": "5.14",
    "compressed-tensors": "5.17",
}


def _numbers(number: str) -> list[int]:
    return [int(part) for part in number.split(".")[:2]]


def check_method(in_file: Any, given: Any, gguf_file: Any = None) -> None:
    """Raise a ValueError where experts would be quantized in a way that ours cannot run."""
    if gguf_file is not None and not asks_for_dense(given):
        remedy = "Pass quantization_config=GgufConfig(dequantize=True)."
        raise bad_argument("gguf_file", "None for experts that stay packed", gguf_file, remedy)
    config = in_file or given
    if config is None or gguf_file is not None:
        return
    method = entry(config, "quant_method")
    method = str(getattr(method, "value", method))
    if method == "bitsandbytes" and entry(config, "load_in_8bit"):
        method = "bitsandbytes in 8 bits"
    supported = method in _SINCE
    here = version("transformers")
    old = supported and _numbers(here) < _numbers(_SINCE[method])
    if (supported and not old) or asks_for_dense(config) or asks_for_dense(given):
        return
    left_out = [str(name) for key in _LISTS for name in entry(config, key) or ()]
    if any(_names_all_experts(name) for name in left_out):
        return
    if old:
        expected = f"transformers {_SINCE[method]} or newer, for packed experts of {method}"
        remedy = "Update transformers, or load the original in 16 bits."
        raise bad_argument("quantization_config", expected, f"transformers {here}", remedy)
    raise bad_argument(
        "quantization_config",
        "experts in MXFP4, FP8, INT4 of compressed-tensors or 4 bits of bitsandbytes",
        method,
        "Load a checkpoint in one of these formats, load the original with"
        " BitsAndBytesConfig(load_in_4bit=True), or leave the experts out of the quantization"
        f" ({', '.join(_LISTS[:2])}).",
    )
