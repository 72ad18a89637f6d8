"""Packed weights as parameters of modules: PEFT, `state_dict` and `.to` see the dense parameter.

`PackedParameter` has its shape and dtype, and the memory of the packed weight alone. `weight_of`
is what our adapters read; `dequantize_experts` goes back to dense parameters.
"""

import copy
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..distributed.packed import leave_whole
from ..errors import bad_argument, say_once
from ..packed import ForFp8, Fp8Blocks, Int4, Mxfp4, NestedAbsmax, Nf4, PackedWeight

__all__ = ["PackedParameter", "dequantize_experts"]

_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default}
_REMEDY = "Make them dense first: sonicmoe.integrations.packed_parameter.dequantize_experts(model)."


class ReadOnly(torch.Tensor):
    """A tensor that is read as `dequantize()` is, and raises when it is written.

    Views of a packed parameter, such as `p[0]`, are `ReadOnly`: what is written to the memory of
    decoded values would be lost. All other results are plain tensors.
    """

    dense: torch.Tensor
    # Results are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, dense: torch.Tensor) -> Any:
        if type(dense) is not torch.Tensor:  # a fake one, which torch.compile traces
            return dense
        made = torch.Tensor._make_subclass(cls, dense)
        made.dense = dense
        return made

    def dequantize(self) -> torch.Tensor:
        """The values."""
        return self.dense

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.dense)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copy.deepcopy(self.dense, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.is_view and torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # a view is as normal as its base
                return function(*args, **kwargs)
        if function in _SAME and isinstance(args[0], PackedParameter):
            return args[0]._changed(function, kwargs)
        if function is _aten.copy_.default and all(isinstance(a, PackedParameter) for a in args):
            return _copied(*args)
        parameters = function._schema.arguments
        of = dict(zip((a.name for a in parameters), args, strict=False)) | kwargs
        written = pytree.tree_leaves([of.get(a.name) for a in parameters if a.is_write])
        if any(isinstance(leaf, ReadOnly) for leaf in written):
            name = function._schema.name.removeprefix("aten::")
            expected = "a dense parameter where its values are written"
            raise bad_argument("weight", expected, f"{name} on packed experts", _REMEDY)
        if any(issubclass(kind, PackedParameter) for kind in types):
            say_once(
                "an operation of PyTorch reads packed experts, which dequantizes them in every"
                " call. With PEFT, call use_lora_experts(model)"
            )
        dense = pytree.tree_map_only(ReadOnly, lambda t: t.dequantize(), (args, kwargs))
        out = function(*dense[0], **dense[1])
        return pytree.tree_map_only(torch.Tensor, ReadOnly, out) if function.is_view else out


class PackedParameter(ReadOnly):
    """A packed weight with the shape and dtype of the dense parameter in whose place it is.

    `packed` is the weight as the GEMM sees it; `swapped` if the dense parameter is its transpose,
    as in gpt-oss. An operation of PyTorch sees the dequantized values, slowly; writing raises.
    """

    packed: PackedWeight
    swapped: bool
    __deepcopy__, __reduce_ex__ = torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__

    @staticmethod
    def __new__(cls, packed: PackedWeight, dtype: torch.dtype, swapped: bool = False) -> Any:
        experts, n, k = packed.shape
        shape = (experts, k, n) if swapped else (experts, n, k)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)

    def __init__(self, packed: PackedWeight, dtype: torch.dtype, swapped: bool = False) -> None:
        self.packed, self.swapped = packed, swapped
        leave_whole(PackedParameter)

    def dequantize(self) -> torch.Tensor:
        """The dense parameter."""
        dense = self.packed.dequantize(self.dtype)
        return dense.mT.contiguous() if self.swapped else dense

    @property
    def data(self) -> "PackedParameter":
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, PackedParameter) or value.shape != self.shape:
            expected = f"packed experts {tuple(self.shape)} in the place of packed experts"
            got = f"{type(value).__name__} {tuple(value.shape)}"
            raise bad_argument("data", expected, got, _REMEDY)
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.packed, self.swapped = value.packed, value.swapped

    def share_memory_(self) -> "PackedParameter":
        self.packed.map(torch.Tensor.share_memory_)
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        kind, dtype = type(self.packed).__name__, str(self.dtype).removeprefix("torch.")
        return f"PackedParameter({kind}, {tuple(self.shape)}, {dtype}, {self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(_tensors(self.packed)), (*_rest(self.packed), self.dtype, self.swapped)

    def __getattr__(self, name: str) -> torch.Tensor:
        """The tensors that `__tensor_flatten__` names."""
        found = _tensors(self.__dict__["packed"]) if "packed" in self.__dict__ else {}
        if name in found:
            return found[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @staticmethod
    def __tensor_unflatten__(inner: dict, context: Any, size: Any, stride: Any) -> Any:
        kind, rest, dtype, swapped = context
        given = {name.removeprefix("packed_"): t for name, t in inner.items()}
        nested = [given.pop(name) for name in NestedAbsmax._fields if name in given]
        more = {"nested": NestedAbsmax(*nested)} if nested else {}
        return PackedParameter(kind(**given, **more, **dict(rest)), dtype, swapped)

    def _changed(self, function: Any, kwargs: dict[str, Any]) -> "PackedParameter":
        """For operations that keep the values: an alias, a copy, another device, another dtype."""
        packed, device = self.packed, kwargs.get("device")
        if device is not None and torch.device(device) != packed.device:
            packed = packed.to(device)
        elif function in (_aten.clone.default, _aten._to_copy.default):
            packed = packed.map(torch.clone)
        return PackedParameter(packed, kwargs.get("dtype") or self.dtype, self.swapped)


def _tensors(packed: PackedWeight) -> dict[str, torch.Tensor]:
    """Every tensor of a packed weight by a name that no tensor of PyTorch has."""
    return {f"packed_{name}": t for name, t in packed.tensors()}


def _rest(packed: PackedWeight) -> tuple[type, tuple]:
    """What is no tensor: values that can be compared."""
    values = [(f.name, getattr(packed, f.name)) for f in fields(packed)]  # type: ignore[arg-type]
    tensors = torch.Tensor | NestedAbsmax
    return type(packed), tuple((n, v) for n, v in values if not isinstance(v, tensors))


def _copied(destination: PackedParameter, source: PackedParameter) -> PackedParameter:
    """Copy a packed weight into another of the same format, as `load_state_dict` does."""
    into, values = _tensors(destination.packed), _tensors(source.packed)
    forms = [
        (p.swapped, _rest(p.packed), {n: (t.shape, t.dtype) for n, t in tensors.items()})
        for p, tensors in ((destination, into), (source, values))
    ]
    if forms[0] != forms[1]:
        got = f"{source!r} for {destination!r}"
        raise bad_argument("weight", "packed experts of the same format and sizes", got, _REMEDY)
    for name, t in into.items():
        t.copy_(values[name])
    torch.autograd.graph.increment_version(into.values())  # below autograd, PyTorch does not
    return destination


# What `torch.load` may make of a file.
torch.serialization.add_safe_globals(
    [PackedParameter, Mxfp4, Nf4, Fp8Blocks, Int4, NestedAbsmax, ForFp8]
)


# --- what our adapters read -----------------------------------------------------------------------
def packed_of(module: nn.Module, name: str) -> PackedParameter | None:
    """The packed weight `name` of a module, also as bitsandbytes keeps it; None if it is dense."""
    weight = vars(module)["_parameters"].get(name)
    if isinstance(weight, PackedParameter):
        return weight
    if (state := getattr(weight, "quant_state", None)) is not None:  # Params4bit
        return _of_bitsandbytes(module, name, weight, state)
    if name in (vars(module)["_modules"].get("parametrizations") or ()):
        parts: Any = module.parametrizations[name]  # type: ignore[index]
        if type(parts[0]).__name__ == "Bnb4bitParametrization":
            if len(parts) > 1:
                raise bad_argument(
                    name,
                    "experts of bitsandbytes that nothing else changes",
                    " and ".join(type(p).__name__ for p in parts),
                    "PEFT's own forward pass leaves its adapter there in every call: load the"
                    " model again and call use_lora_experts(model) before it runs.",
                )
            return _of_bitsandbytes(module, name, parts.original, parts[0].quant_state)
    return None


def is_packed(module: Any) -> bool:
    """Whether a weight of a module may be packed; does not look into it."""
    weights = module._parameters.values()
    return "parametrizations" in module._modules or any(
        isinstance(weight, PackedParameter) or type(weight).__name__ == "Params4bit"
        for weight in weights
    )


def _of_bitsandbytes(module: Any, name: str, codes: Any, state: Any) -> PackedParameter:
    if state.blocksize != 64 or len(state.shape) != 3:
        got = f"blocksize={state.blocksize}, shape {tuple(state.shape)}"
        remedy = "Quantize (E, N, K) with blocksize=64."
        raise bad_argument(name, "weights (E, N, K) in blocks of 64", got, remedy)
    swapped = bool(getattr(module, "is_transposed", False))
    packed = nf4_of_state(codes.data.view(torch.uint8), state, swapped)
    return PackedParameter(packed, state.dtype, swapped)


def nf4_of_state(codes: torch.Tensor, state: Any, swapped: bool) -> Nf4:
    """Codes and a `QuantState` of bitsandbytes; `swapped` if its shape is (E, K, N)."""
    experts, rows, columns = state.shape
    nested = None
    if state.state2 is not None:
        second = state.state2
        nested = NestedAbsmax(second.code, second.absmax, state.offset, second.blocksize)
    sizes = (experts, columns, rows) if swapped else (experts, rows, columns)
    return Nf4(codes, state.absmax, sizes, state.code, nested, transposed=swapped)


def weight_of(module: Any, name: str) -> torch.Tensor | PackedWeight:
    """The weight `name` of an experts module as `experts` takes it: (E, N, K), dense or packed."""
    packed = packed_of(module, name)
    if packed is not None:
        if packed.requires_grad:
            remedy = "module.requires_grad_(False), and train adapters. " + _REMEDY
            raise bad_argument(name, "frozen weights, as they are packed", "requires_grad", remedy)
        return packed.packed
    weight = getattr(module, name)
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    kind = type(weight)
    foreign = is_traceable_wrapper_subclass(weight) and not kind.__module__.startswith("torch.")
    if foreign or not weight.dtype.is_floating_point:
        raise bad_argument(
            name,
            "a dense weight, or one packed as MXFP4, NF4, FP8 or INT4",
            f"{kind.__name__} of {weight.dtype}",
            "Load the model without quantization of its experts.",
        )
    return weight.mT if module.is_transposed else weight


# --- back to dense --------------------------------------------------------------------------------
def dequantize_experts(model: nn.Module) -> int:
    """Make packed experts dense parameters, in place; return how many weights.

    Then adapters can be merged, and the model trained or saved as a dense one. Other quantized
    layers stay as they are, and the model's configuration says so.
    """
    found, made = 0, dict[Any, nn.Parameter]()  # by the place of the codes: ties are kept
    for module in model.modules():
        for name in list(_weight_names(module)):
            if (packed := packed_of(module, name)) is None:
                continue
            codes = next(packed.packed.tensors())[1]
            place = codes.untyped_storage()._cdata, codes.storage_offset(), packed.shape
            if place not in made:
                made[place] = nn.Parameter(packed.dequantize(), requires_grad=False)
            del packed, codes  # before the next one is dequantized
            if parametrize.is_parametrized(module, name):
                parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            delattr(module, name)
            module.register_parameter(name, made[place])
            found += 1
    for part in model.modules():
        quantizer: Any = vars(part).get("hf_quantizer")  # not what a PeftModel finds in its model
        if found and hasattr(quantizer, "leave_out_experts"):
            quantizer.leave_out_experts(part)
    return found


def _weight_names(module: nn.Module) -> Iterator[str]:
    """Names of the experts' weights of a module."""
    parametrized = vars(module)["_modules"].get("parametrizations") or ()
    for name, weight in vars(module)["_parameters"].items():
        params4bit = hasattr(module, "is_transposed") and hasattr(weight, "quant_state")
        if params4bit or isinstance(weight, PackedParameter):
            yield name
    yield from (name for name in parametrized if hasattr(module, "is_transposed"))
