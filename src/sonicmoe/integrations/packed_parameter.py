"""Packed weights as parameters of modules: PEFT, `state_dict` and `.to` see the dense parameter.

`PackedParameter` has its shape and dtype, and the memory of the packed weight alone. `weight_of`
is what our adapters read; `dequantize_experts` goes back to dense parameters.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import bad_argument, say_once
from ..packed import ForFp8, Fp8Blocks, Int4, Mxfp4, NestedAbsmax, Nf4, PackedWeight

__all__ = ["PackedParameter", "dequantize_experts"]

_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default}
_REMEDY = "Make them dense first: sonicmoe.integrations.packed_parameter.dequantize_experts(model)."


class PackedParameter(torch.Tensor):
    """A packed weight with the shape and dtype of the dense parameter in whose place it is.

    `packed` is the weight as the GEMM sees it; `swapped` if the dense parameter is its transpose,
    as in gpt-oss. An operation of PyTorch sees the dequantized values, slowly; writing raises.
    """

    packed: PackedWeight
    swapped: bool
    # Results are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, packed: PackedWeight, dtype: torch.dtype, swapped: bool = False) -> Any:
        experts, n, k = packed.shape
        shape = (experts, k, n) if swapped else (experts, n, k)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)

    def __init__(self, packed: PackedWeight, dtype: torch.dtype, swapped: bool = False) -> None:
        self.packed, self.swapped = packed, swapped

    def dequantize(self) -> torch.Tensor:
        """The dense parameter."""
        dense = self.packed.dequantize(self.dtype)
        return dense.mT.contiguous() if self.swapped else dense

    @property
    def data(self) -> "PackedParameter":
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, PackedParameter):  # PyTorch would keep the packed values
            expected = "packed experts where packed experts are replaced"
            raise bad_argument("data", expected, type(value).__name__, _REMEDY)
        self.packed = value.packed

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
        return PackedParameter(_assembled(kind, rest, inner), dtype, swapped)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _SAME and isinstance(args[0], cls):
            return args[0]._changed(function, kwargs)
        if function is _aten.copy_.default and all(isinstance(a, cls) for a in args[:2]):
            return _copied(*args[:2])
        written = [a.name for a in function._schema.arguments if a.alias_info and a.is_write]
        of = dict(zip((a.name for a in function._schema.arguments), args, strict=False)) | kwargs
        if any(isinstance(leaf, cls) for name in written for leaf in pytree.tree_leaves(of[name])):
            name = function._schema.name.removeprefix("aten::")
            expected = "a dense parameter where its values are written"
            raise bad_argument("weight", expected, f"{name} on packed experts", _REMEDY)
        say_once(
            "an operation of PyTorch reads packed experts, which dequantizes them in every call."
            " With PEFT, call use_lora_experts(model)"
        )
        dense = pytree.tree_map_only(cls, lambda p: p.dequantize(), (args, kwargs))
        return function(*dense[0], **dense[1])

    def _changed(self, function: Any, kwargs: dict[str, Any]) -> "PackedParameter":
        """For operations that keep the values: a copy, another device, another dtype."""
        packed, device = self.packed, kwargs.get("device")
        if function is _aten.clone.default:
            packed = _mapped(packed, torch.clone)
        elif device is not None and torch.device(device) != packed.device:
            packed = packed.to(device)
        return PackedParameter(packed, kwargs.get("dtype") or self.dtype, self.swapped)


def _tensors(packed: PackedWeight) -> dict[str, torch.Tensor]:
    """Every tensor of a packed weight by a name of its own."""
    found: dict[str, torch.Tensor] = {}
    for field in fields(packed):  # type: ignore[arg-type]
        value, name = getattr(packed, field.name), f"packed_{field.name}"
        parts = {f"{name}_{n}": t for n, t in value._asdict().items()} if _named(value) else {}
        found |= {n: t for n, t in {name: value, **parts}.items() if isinstance(t, torch.Tensor)}
    return found


def _rest(packed: PackedWeight) -> tuple[type, tuple]:
    """What is no tensor: values that can be compared."""
    rest: list[tuple[str, Any, Any]] = []
    for field in fields(packed):  # type: ignore[arg-type]
        value = getattr(packed, field.name)
        if _named(value):
            options = [None if isinstance(t, torch.Tensor) else t for t in value]
            rest.append((field.name, type(value), tuple(options)))
        elif not isinstance(value, torch.Tensor):
            rest.append((field.name, None, value))
    return type(packed), tuple(rest)


def _assembled(kind: Any, rest: tuple, tensors: dict[str, torch.Tensor]) -> PackedWeight:
    """The weight that `_rest` and `_tensors` describe."""
    names = {field.name for field in fields(kind)}
    given = {n: tensors[f"packed_{n}"] for n in names if f"packed_{n}" in tensors}
    for name, of, value in rest:
        if of is not None:
            parts = zip(of._fields, value, strict=True)
            value = of(*[tensors.get(f"packed_{name}_{n}", option) for n, option in parts])
        given[name] = value
    return kind(**given)


def _named(value: Any) -> bool:
    return hasattr(value, "_fields")


def _mapped(packed: PackedWeight, function: Callable) -> PackedWeight:
    return _assembled(*_rest(packed), {n: function(t) for n, t in _tensors(packed).items()})


def _copied(destination: PackedParameter, source: PackedParameter) -> PackedParameter:
    """Copy a packed weight into another of the same format, as `load_state_dict` does."""
    ours, theirs = (replace(p.packed, fp8=None) for p in (destination, source))  # type: ignore
    into, values = _tensors(ours), _tensors(theirs)
    same = type(ours) is type(theirs) and into.keys() == values.keys()
    if not same or any(t.shape != values[name].shape for name, t in into.items()):
        got = f"{source!r} for {destination!r}"
        raise bad_argument("weight", "packed experts of the same format and sizes", got, _REMEDY)
    for name, t in into.items():
        t.copy_(values[name])
    destination.packed = ours  # scales for FP8 are computed again
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
    found = [
        (module, name)
        for module in model.modules()
        for name in _weight_names(module)
        if packed_of(module, name) is not None
    ]
    for module, name in found:
        packed = packed_of(module, name)
        assert packed is not None
        dense = nn.Parameter(packed.dequantize(), requires_grad=False)
        if parametrize.is_parametrized(module, name):
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        delattr(module, name)
        module.register_parameter(name, dense)
    for part in model.modules():
        quantizer: Any = vars(part).get("hf_quantizer")  # not what a PeftModel finds in its model
        if found and hasattr(quantizer, "leave_out_experts"):
            quantizer.leave_out_experts(part)
    return len(found)


def _weight_names(module: nn.Module) -> Iterator[str]:
    """Names of the experts' weights of a module."""
    parametrized = vars(module)["_modules"].get("parametrizations") or ()
    for name, weight in vars(module)["_parameters"].items():
        params4bit = hasattr(module, "is_transposed") and hasattr(weight, "quant_state")
        if params4bit or isinstance(weight, PackedParameter):
            yield name
    yield from (name for name in parametrized if hasattr(module, "is_transposed"))
