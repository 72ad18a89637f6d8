"""`from_pretrained` that keeps quantized experts packed, for models that run by our experts.

Each class is transformers' quantizer of one method. Before the file is read, a weight of the
experts is replaced by the tensors that the file has for it, so that transformers puts these where
the model goes; afterwards they become one `PackedParameter`. All other layers are transformers'.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
import transformers.modeling_utils
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ..errors import bad_argument
from .packed_formats import (
    EXPERT_COUNTS,
    Format,
    Sizes,
    asks_for_dense,
    check_method,
    entry,
    format_of,
)
from .packed_parameter import PackedParameter, dequantize_experts, nf4_of_state

_SLICE = 2**30  # weights that bitsandbytes quantizes at once: its kernels count in 32 bits


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """The weights of an experts module of transformers; none of another module."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
        return ()
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


class _PackedExperts(HfQuantizer):
    """What all methods have in common."""

    format: Format
    # Sizes and dtype of the dense weights, by path of the module and name.
    experts: dict[str, dict[str, tuple[Sizes, torch.dtype]]]

    @property
    def is_trainable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model, **kwargs):
        self._replace_layers(model, **kwargs)
        self.experts = {
            path: {name: _described(module, name) for name in weight_names(module)}
            for path, module in model.named_modules()
            if weight_names(module) and self._quantizes(path)
        }
        if self.experts:
            self.format = self._format()
        for path, weights in self.experts.items():
            module = model.get_submodule(path)
            for name, (sizes, _) in weights.items():
                with torch.device("meta"):
                    tensors = self.format.tensors(sizes)  # raises for sizes outside the blocks
                if self.pre_quantized:
                    _expect(module, name, tensors)

    def _replace_layers(self, model: nn.Module, **kwargs: Any) -> None:
        """What transformers does with the other layers; sets `modules_to_not_convert`."""
        super()._process_model_before_weight_loading(model, **kwargs)

    def _quantizes(self, path: str) -> bool:
        return should_convert_module(path, self.modules_to_not_convert)

    def _format(self) -> Format:
        return format_of(self.quantization_config)

    def _process_model_after_weight_loading(self, model, **kwargs):
        for path, weights in self.experts.items() if self.pre_quantized else ():
            module = model.get_submodule(path)
            for name, (sizes, dtype) in weights.items():
                self._pack(module, path, name, sizes, dtype)
        return super()._process_model_after_weight_loading(model, **kwargs)

    def _pack(self, module: Any, path: str, name: str, sizes: Sizes, dtype: torch.dtype) -> None:
        """Make one `PackedParameter` of what the file has."""
        with torch.device("meta"):
            expected = self.format.tensors(sizes)
        found = {}
        for suffix, want in expected.items():
            t = module._parameters.pop(name + suffix)
            _check_loaded(f"{path}.{name}{suffix}", t, want)
            found[suffix] = t.data.to(want.dtype)
        packed = self.format.pack(found, sizes)
        module.register_parameter(name, _parameter(packed, dtype, sizes))

    def get_state_dict_and_metadata(self, model):
        """The state dict in the format of the file."""
        state, metadata = super().get_state_dict_and_metadata(model)
        if not self.experts:
            return state, metadata
        state = model.state_dict() if state is None else state
        for path, weights in self.experts.items():
            for name, (sizes, _) in weights.items():
                key = f"{path}.{name}"
                if isinstance(state.get(key), PackedParameter):
                    tensors = self.format.unpack(state.pop(key).packed, sizes)
                    state.update({key + suffix: t for suffix, t in tensors.items()})
        return state, metadata

    def _dequantize(self, model, dtype=None):
        """Of `model.dequantize()`."""
        model = super()._dequantize(model, dtype=dtype)
        dequantize_experts(model)
        return model

    def leave_out_experts(self, model: nn.Module) -> None:
        """Say in the configuration of the model that its experts are dense now."""
        raise NotImplementedError


def _described(module: Any, name: str) -> tuple[Sizes, torch.dtype]:
    weight = getattr(module, name)
    experts, n, k = weight.shape
    n, k = (k, n) if module.is_transposed else (n, k)
    parts = 2 if name == "gate_up_proj" else 1
    return Sizes(experts, n, k, bool(module.is_transposed), parts), weight.dtype


def _expect(module: Any, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Put what the file has in the place of a dense parameter."""
    del module._parameters[name]
    for suffix, t in tensors.items():
        module.register_parameter(name + suffix, nn.Parameter(t, requires_grad=False))
    # transformers would initialize the dense parameter, which is absent now.
    module._is_hf_initialized = True


def _check_loaded(key: str, t: torch.Tensor, want: torch.Tensor) -> None:
    if not getattr(t, "_is_hf_initialized", False):
        remedy = "Load the original in 16 bits, or a checkpoint in a format that stays packed."
        raise bad_argument("checkpoint", f"a tensor {key}", "none", remedy)
    if t.device.type == "meta":
        got, remedy = "offload to disk or CPU", "Pass a device_map of GPUs alone."
        raise bad_argument("device_map", f"{key} in memory", got, remedy)
    exact = t.dtype is want.dtype
    if want.dtype in (torch.int64, torch.float32, torch.float8_e8m0fnu):  # sizes, scales
        exact = exact or torch.equal(t.to(want.dtype).float(), t.float())
    if t.shape != want.shape or not exact:
        expected = f"{key} {tuple(want.shape)} of {want.dtype}"
        remedy = "Load it with dequantize=True in its quantization_config."
        raise bad_argument("checkpoint", expected, f"{tuple(t.shape)} of {t.dtype}", remedy)


def _parameter(packed: Any, dtype: torch.dtype, sizes: Sizes) -> nn.Parameter:
    made = nn.Parameter(PackedParameter(packed, dtype, sizes.swapped), requires_grad=False)
    made._is_hf_initialized = True  # type: ignore[attr-defined]
    return made


class _Mxfp4(_PackedExperts, Mxfp4HfQuantizer):
    def validate_environment(self, *args, **kwargs):
        """Nothing: only experts are in MXFP4, and ours need no kernels of transformers."""

    def _replace_layers(self, model, **kwargs):
        self.modules_to_not_convert = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )

    def get_weight_conversions(self):
        return []

    def _dequantize(self, model, dtype=None):
        dequantize_experts(model)
        return model

    def leave_out_experts(self, model):
        self.remove_quantization_config(model)


class _Fp8(_PackedExperts, FineGrainedFP8HfQuantizer):
    def validate_environment(self, *args, **kwargs):
        # Without an FP8 GPU transformers makes everything dense. Our experts run anywhere.
        super().validate_environment(*args, **kwargs)
        self.without_gpu = self.quantization_config.dequantize
        self.quantization_config.dequantize = False

    def get_modules_to_not_convert(self, model, *args, **kwargs):
        """Experts too, which transformers would replace; `_quantizes` has those of the file."""
        self.left_out = super().get_modules_to_not_convert(model, *args, **kwargs)
        return [*self.left_out, *(p for p, m in model.named_modules() if weight_names(m))]

    def _quantizes(self, path):
        return should_convert_module(path, self.left_out)

    def _replace_layers(self, model, **kwargs):
        super()._replace_layers(model, **kwargs)
        linear = [path for path, m in model.named_modules() if type(m).__name__.startswith("FP8")]
        if self.without_gpu and linear:
            expected = "no FP8 layers but experts, without a GPU of compute capability 8.9"
            remedy = "Load it with FineGrainedFP8Config(dequantize=True)."
            raise bad_argument("quantization_config", expected, linear[0], remedy)

    def leave_out_experts(self, model):
        config = self.quantization_config
        config.modules_to_not_convert = [*(config.modules_to_not_convert or ()), *self.experts]


class _Nf4(_PackedExperts, Bnb4BitHfQuantizer):
    asked = True  # whether the model runs by our experts; else those that we saved stay packed
    codes: str | None = ""  # the end of the name of codes in the file; None if it has none

    def _replace_layers(self, model, checkpoint_files=None, **kwargs):
        super()._replace_layers(model, checkpoint_files=checkpoint_files, **kwargs)
        if self.pre_quantized and checkpoint_files is not None:
            self.codes = _codes_in(checkpoint_files)

    def _quantizes(self, path):
        if not super()._quantizes(path):
            return False
        if self.codes is None and self.asked:
            remedy = "Load the original in 16 bits with BitsAndBytesConfig(load_in_4bit=True)."
            raise bad_argument("checkpoint", "experts in 4 bits", f"{path} in 16 bits", remedy)
        return self.codes is not None

    def _format(self):
        found = super()._format()
        found.codes = self.codes
        return found

    def param_needs_quantization(self, model, param_name, **kwargs):
        path, _, name = param_name.rpartition(".")
        return name in self.experts.get(path, ()) or super().param_needs_quantization(
            model, param_name, **kwargs
        )

    def get_quantize_ops(self):
        return _QuantizeNf4(self, super().get_quantize_ops())

    def _process_model_after_weight_loading(self, model, **kwargs):
        # Codes of all experts cannot be saved apart.
        names = {name for weights in self.experts.values() for name in weights}
        model._weight_conversions = [
            conversion
            for conversion in getattr(model, "_weight_conversions", None) or ()
            if not any(t.rstrip("$").endswith(tuple(names)) for t in conversion.target_patterns)
        ]
        return super()._process_model_after_weight_loading(model, **kwargs)

    def leave_out_experts(self, model):
        config = self.quantization_config
        config.llm_int8_skip_modules = [*self.modules_to_not_convert, *self.experts]


class _QuantizeNf4(ConversionOps):
    """Quantize a weight of experts; `other` quantizes all others."""

    def __init__(self, quantizer: _Nf4, other: ConversionOps) -> None:
        self.quantizer, self.other = quantizer, other

    def convert(self, input_dict, full_layer_name=None, model=None, missing_keys=None, **kwargs):
        path, _, name = full_layer_name.rpartition(".")
        if name not in self.quantizer.experts.get(path, ()):
            options = {"full_layer_name": full_layer_name, "model": model, **kwargs}
            return self.other.convert(input_dict, missing_keys=missing_keys, **options)
        (weight,) = input_dict.values()
        weight = weight[0] if isinstance(weight, list) else weight
        sizes, dtype = self.quantizer.experts[path][name]
        config = self.quantizer.quantization_config
        state = quantize_nf4(
            weight, config.bnb_4bit_quant_type, nested=config.bnb_4bit_use_double_quant
        )
        packed = nf4_of_state(*state, sizes.swapped)
        return {full_layer_name: _parameter(packed, dtype, sizes)}


def quantize_nf4(weight: torch.Tensor, quant_type: str, nested: bool) -> tuple[torch.Tensor, Any]:
    """Codes and `QuantState` as `bitsandbytes.functional.quantize_4bit` makes them, in slices."""
    from bitsandbytes import functional as bnb

    step = max(1, _SLICE // weight[0].numel())
    slices = [
        bnb.quantize_4bit(part.contiguous(), blocksize=64, quant_type=quant_type)
        for part in weight.split(step)
    ]
    codes = torch.cat([codes for codes, _ in slices])
    state = slices[0][1]
    state.shape = weight.shape
    state.absmax = torch.cat([s.absmax for _, s in slices])
    if nested:
        state.offset = state.absmax.mean()
        state.absmax, state.state2 = bnb.quantize_blockwise(
            state.absmax - state.offset, blocksize=256
        )
        state.nested = True
    return codes, state


class _Int4(_PackedExperts, CompressedTensorsHfQuantizer):
    def _quantizes(self, path):
        from compressed_tensors.utils.match import is_match

        config = self.compressor.quantization_config
        linear = nn.Linear(1, 1, device="meta")
        targets = [t for group in config.config_groups.values() for t in group.targets]
        name = f"{path}.0.gate_proj"
        return is_match(name, linear, targets, config.ignore or ())

    def _replace_layers(self, model, checkpoint_files=None, **kwargs):
        super()._replace_layers(model, checkpoint_files=checkpoint_files, **kwargs)
        _check_scales(checkpoint_files or ())
        if not any(hasattr(m, "quantization_scheme") for m in model.modules()):
            # Nothing to decompress: the first call would wrap every module for nothing.
            self.compressor.remove_decompression_hook(model)

    def update_weight_conversions(self, weight_conversions, *model):
        if model:
            return super().update_weight_conversions(weight_conversions, *model)
        # Up to transformers 5.20 the pattern of a weight matches all that begins with it.
        return [*weight_conversions, *self.get_weight_conversions()]

    def leave_out_experts(self, model):
        config = self.quantization_config.quantization_config
        config.ignore = [*(config.ignore or ()), *(f"re:{path}\\..*" for path in self.experts)]


def _codes_in(files: Any) -> str | None:
    """`_Nf4.codes` of a checkpoint."""
    names = []
    for file in files:
        if file.endswith(".safetensors"):  # as all that we saved are
            with safe_open(file, framework="pt") as tensors:
                names += tensors.keys()
    if any(name.endswith("_proj_codes") for name in names):
        return "_codes"
    return "" if any(name.endswith("_proj_absmax") for name in names) else None


def _check_scales(files: Any) -> None:
    """transformers would round other scales to bf16 while it reads them."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118, it is no dict
                if ".experts." in key and key.endswith("weight_scale"):
                    if (got := tensors.get_slice(key).get_dtype()) != "BF16":
                        remedy = "Load it with dequantize=True in its quantization_config."
                        raise bad_argument("checkpoint", f"{key} in BF16", got, remedy)
                    return


# --- in place of transformers' --------------------------------------------------------------------
_OURS = {
    "mxfp4": _Mxfp4,
    "fp8": _Fp8,
    "bitsandbytes_4bit": _Nf4,
    "compressed-tensors": _Int4,
}


@cache  # once by each build of this package in a process
def keep_experts_packed(runs_ours: Any) -> None:
    """Choose these quantizers for models whose configuration satisfies `runs_ours`, and for files
    in 4 bits of bitsandbytes, where experts that we saved may be."""
    original = transformers.modeling_utils.get_hf_quantizer

    @wraps(original)
    def chosen(config, quantization_config, *others, **newer):  # newer: gguf_file
        choose = partial(original, config, quantization_config, *others, **newer)
        ours = runs_ours(config)
        in_file = getattr(config, "quantization_config", None) or getattr(
            config.get_text_config(decoder=True), "quantization_config", None
        )
        taken = AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] is not Bnb4BitHfQuantizer  # by a build
        if not ours and (taken or not entry(in_file, "load_in_4bit")):
            return choose()
        if ours and any(hasattr(config.get_text_config(), name) for name in EXPERT_COUNTS):
            check_method(in_file, quantization_config, newer.get("gguf_file"))
        if asks_for_dense(in_file) or asks_for_dense(quantization_config):
            return choose()
        with _our_quantizers():
            quantizer, *rest = choose()
        if isinstance(quantizer, _Nf4):
            quantizer.asked = ours
        return quantizer, *rest

    transformers.modeling_utils.get_hf_quantizer = chosen


@contextmanager
def _our_quantizers() -> Iterator[None]:
    before = {method: AUTO_QUANTIZER_MAPPING[method] for method in _OURS}
    AUTO_QUANTIZER_MAPPING.update(_OURS)
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING.update(before)
