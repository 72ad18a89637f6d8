"""Registration of operators as `torch.ops.sonicmoe.<name>`, each from one typed declaration.

The namespace is the name under which the package is imported, so that a copy under another name
can be used in the same process.

The signature of a declaration is the operator's schema. Its body returns empty tensors with the
shapes and dtypes of the results: PyTorch's fake implementation. The implementations have the same
name and parameters, without `backend`: in `reference/` for "torch", in `launch/` for "triton".

Operators have no autograd of their own: the nodes of `layer` and `routing` call them.
"""

import enum
import re
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from importlib import import_module
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, get_type_hints

import torch
from torch.utils.flop_counter import register_flop_formula

from ..tensors import Packed
from .layout import Layout

Mutated = Annotated[torch.Tensor, "the operator writes to it"]

NAMESPACE = re.sub(r"\W", "_", __name__.removesuffix(".ops.registry"))
_library = torch.library.Library(NAMESPACE, "DEF")
_SCHEMA_TYPES = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    Mutated: "Tensor({}!)",  # the alias set: each argument has its own
    Mutated | None: "Tensor({}!)?",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
}
# Arguments of these types need no dispatcher; enums and tuples of tensors join them.
_plain = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, torch.dtype, type(None)}


class Signature:
    """The parameters of a declaration, and how they become the flat arguments of a schema.

    A NamedTuple becomes its fields, an enum its value.
    """

    def __init__(self, declaration: Callable, packed: str | None = None) -> None:
        """`packed` names a parameter that is a `Packed` instead."""
        hints = get_type_hints(declaration, include_extras=True)
        self.packed = None if packed is None else list(hints).index(packed)
        if packed is not None:
            hints[packed] = Packed
        self.results = hints.pop("return")
        self.kinds = list(hints.values())
        # A letter for each: a compiled model compares one string per operator in every call.
        self.forms = "".join(map(_form, self.kinds))
        self.tensors = _places(hints, torch.Tensor)
        self.written = _places(hints, Mutated)
        self.tuples: dict[int, dict[int, str]] = {}  # their fields that are tensors
        self.flat: list[tuple[str, str]] = []  # name and type in the schema
        for place, (name, kind) in enumerate(hints.items()):
            if _form(kind) == "t":
                fields = get_type_hints(kind)
                if tensors := _places(fields, torch.Tensor):
                    self.tuples[place] = tensors
                self.flat += [(field, _SCHEMA_TYPES[t]) for field, t in fields.items()]
            else:
                self.flat.append((name, "str" if _form(kind) == "e" else _SCHEMA_TYPES[kind]))
            if _form(kind) != "p":
                _plain.add(kind)
        assert len(dict(self.flat)) == len(self.flat), f"a name occurs twice: {self.flat}"
        if self.results is type(None):
            self.returns = "()"
        else:
            count = len(getattr(self.results, "__args__", ())) or 1
            self.returns = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"

    def schema(self, name: str) -> str:
        arguments = ", ".join(
            f"{kind.format(f'a{place}')} {argument}"
            for place, (argument, kind) in enumerate(self.flat)
        )
        return f"{name}({arguments}) -> {self.returns}"

    def flatten(self, args: Sequence) -> list:
        flat: list = []
        for form, a in zip(self.forms, args, strict=True):
            if form == "t":
                flat.extend(a)  # Dynamo of PyTorch 2.11 knows no list += NamedTuple
            else:
                flat.append(a.value if form == "e" else a)
        return flat

    def unflatten(self, flat: Sequence) -> list:
        """The arguments of the declaration."""
        values = iter(flat)
        args: list = []
        for kind, form in zip(self.kinds, self.forms, strict=True):
            if form == "t":
                args.append(kind._make(islice(values, len(kind._fields))))
            else:
                args.append(kind(next(values)) if form == "e" else next(values))
        return args


def _places(hints: dict[str, Any], kind: Any) -> dict[int, str]:
    """Places and names of the parameters of this type, or of it or None."""
    found = enumerate(hints.items())
    return {place: name for place, (name, hint) in found if hint in (kind, kind | None)}


def _form(kind: Any) -> str:
    """A letter: e, an enum; t, a NamedTuple; p, what the schema has as it is."""
    if isinstance(kind, enum.EnumMeta):
        return "e"
    return "t" if hasattr(kind, "_fields") else "p"


class Operator:
    """One operator of the namespace: `overload` for PyTorch's dispatcher, `chosen` without it."""

    def __init__(
        self,
        declaration: Callable,
        name: str,
        signature: Signature,
        reference: ModuleType,
        launch: str | None,
        flops: Callable[[SimpleNamespace], int] | None,
    ) -> None:
        self.declaration, self.signature, self.flops = declaration, signature, flops
        self.reference, self.launch = reference, launch
        of_arguments = (signature.tensors, signature.tuples, signature.written)
        self.layout = Layout(*of_arguments) if launch else None
        self.function = declaration.__name__
        _library.define(signature.schema(name), tags=(torch.Tag.needs_exact_strides,))
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        self.overload = packet.default
        _library.impl(name, self.dispatched, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", self.fake, lib=_library)
        if flops is not None:
            register_flop_formula(packet)(self.flop_formula)

    @cached_property
    def launch_module(self) -> ModuleType:
        return import_module(f"..launch.{self.launch}", __package__)

    def chosen(self, args: Sequence, dispatched: bool = False) -> tuple[Callable, Sequence]:
        """The implementation for these arguments, and the arguments as it takes them."""
        if self.layout is None:
            return getattr(self.reference, self.function), args
        *args, backend = args
        for_kernels = backend == "triton"
        module = self.launch_module if for_kernels else self.reference
        return getattr(module, self.function), self.layout.dense(args, for_kernels, dispatched)

    def dispatched(self, *flat: Any) -> Any:
        function, args = self.chosen(self.signature.unflatten(flat), dispatched=True)
        return self.every_result(function(*args), flat)

    def fake(self, *flat: Any) -> Any:
        args = self.signature.unflatten(flat)
        if self.layout is not None:
            args = self.layout.dense(args, for_kernels=False, dispatched=True)
        return self.every_result(self.declaration(*args), flat)

    def every_result(self, found: Any, flat: Sequence) -> Any:
        """Replace None, a result that is not needed, by the empty tensor PyTorch expects."""
        if self.signature.returns == "()":
            return None
        every = found if type(found) is tuple else (found,)
        if not any(t is None for t in every):
            return found
        like = next(t for t in flat if isinstance(t, torch.Tensor))
        every = tuple([like.new_empty(0) if t is None else t for t in every])
        return every if type(found) is tuple else every[0]

    def flop_formula(self, *flat: Any, out_shape: Any = None, **_: Any) -> int:
        assert self.flops is not None
        given = {name: value for (name, _), value in zip(self.signature.flat, flat, strict=True)}
        if self.signature.packed is not None:
            # The weight's shape, by the names that the formulas use.
            w = Packed(*[given[name] for name in Packed._fields])
            given |= dict.fromkeys(("w1", "w2", "w8"), w.shape)
        return self.flops(SimpleNamespace(**given))


def operator(
    reference: ModuleType,
    launch: str | None,
    flops: Callable[[SimpleNamespace], int] | None = None,
    packed: str | None = None,
) -> Callable[[Callable], Callable]:
    """Register the decorated declaration; returns the function that calls the operator.

    `launch` names the module in `launch/`, imported when it is needed; None: the reference serves
    both backends. `flops` gets the flat arguments by name, shapes in the place of tensors. The
    parameter `packed`, a weight, may also be a `Packed`: a second operator `<name>_packed`.
    """

    def register(declaration: Callable) -> Callable:
        name, rest = declaration.__name__, (reference, launch, flops)
        plain = Operator(declaration, name, Signature(declaration), *rest)
        of_packed, place = plain, None
        if packed is not None:
            signature = Signature(declaration, packed)
            of_packed = Operator(declaration, f"{name}_packed", signature, *rest)
            place = signature.packed

        @wraps(declaration)
        def call(*args: Any) -> Any:
            is_packed = place is not None and type(args[place]) is Packed
            own = of_packed if is_packed else plain
            if _needs_dispatcher(args):
                return own.overload(*own.signature.flatten(args))
            function, prepared = own.chosen(args)
            return function(*prepared)

        return call

    return register


def _needs_dispatcher(args: Sequence) -> bool:
    """Whether a mode, a transform, a profiler or a tensor subclass must see the operator.

    Else `call` skips PyTorch's dispatcher: 8% of the host time at 64,128,64,8,2 in a stack (H200).
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0  # FLOPs, checkpoint policies, fake tensors
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
        or not _plain.issuperset(map(type, args))
    )
