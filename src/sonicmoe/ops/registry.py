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
from functools import cache, wraps
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, get_type_hints

import torch
from torch.utils.flop_counter import register_flop_formula

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

    def __init__(self, declaration: Callable) -> None:
        hints = get_type_hints(declaration, include_extras=True)
        self.results = hints.pop("return")
        # Strings, which Dynamo can compare.
        self.types = [(kind, _form(kind)) for kind in hints.values()]
        self.tensors = {
            place: name
            for place, (name, kind) in enumerate(hints.items())
            if kind in (torch.Tensor, torch.Tensor | None, Mutated, Mutated | None)
        }
        self.tuples: dict[int, Sequence[str]] = {}  # the fields that are tensors
        self.flat: list[tuple[str, str]] = []  # name and type in the schema
        for place, (name, kind) in enumerate(hints.items()):
            if _form(kind) == "tuple":
                fields = get_type_hints(kind)
                optional = (torch.Tensor, torch.Tensor | None)
                if tensors := [field for field, t in fields.items() if t in optional]:
                    self.tuples[place] = tensors
                self.flat += [(field, _SCHEMA_TYPES[t]) for field, t in fields.items()]
            else:
                self.flat.append((name, "str" if _form(kind) == "enum" else _SCHEMA_TYPES[kind]))
            if _form(kind) != "plain":
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
        for (_, form), a in zip(self.types, args, strict=True):
            if form == "tuple":
                flat.extend(a)  # Dynamo of PyTorch 2.11 knows no list += NamedTuple
            else:
                flat.append(a.value if form == "enum" else a)
        return flat

    def unflatten(self, flat: Sequence) -> list:
        """The arguments of the declaration."""
        values = iter(flat)
        args: list = []
        for kind, form in self.types:
            if form == "tuple":
                args.append(kind(*[next(values) for _ in kind._fields]))
            else:
                args.append(kind(next(values)) if form == "enum" else next(values))
        return args


def _form(kind: Any) -> str:
    if isinstance(kind, enum.EnumMeta):
        return "enum"
    return "tuple" if hasattr(kind, "_fields") else "plain"


def operator(
    reference: ModuleType, launch: str | None, flops: Callable[[SimpleNamespace], int] | None = None
) -> Callable[[Callable], Callable]:
    """Register the decorated declaration; returns the function that calls the operator.

    `launch` names the module in `launch/`, imported when it is needed; None: the reference serves
    both backends. `flops` gets the flat arguments by name, shapes in the place of tensors.
    """

    def register(declaration: Callable) -> Callable:
        name = declaration.__name__
        signature = Signature(declaration)
        _library.define(signature.schema(name), tags=(torch.Tag.needs_exact_strides,))
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        overload = packet.default
        layout = Layout(signature.tensors, signature.tuples) if launch else None

        @cache
        def launch_module() -> ModuleType:
            return import_module(f"..launch.{launch}", __package__)

        def chosen(args: Sequence, dispatched: bool = False) -> tuple[Callable, Sequence]:
            """The implementation for these arguments, and the arguments as it takes them."""
            if layout is None:
                return getattr(reference, name), args
            *args, backend = args
            for_kernels = backend == "triton"
            module = launch_module() if for_kernels else reference
            return getattr(module, name), layout.dense(args, for_kernels, dispatched)

        def dispatched(*flat: Any) -> Any:
            function, args = chosen(signature.unflatten(flat), dispatched=True)
            return every_result(function(*args), flat)

        def fake(*flat: Any) -> Any:
            args = signature.unflatten(flat)
            if layout is not None:
                args = layout.dense(args, for_kernels=False)
            return every_result(declaration(*args), flat)

        def every_result(found: Any, flat: Sequence) -> Any:
            """Replace None, a result that is not needed, by the empty tensor PyTorch expects."""
            if signature.returns == "()":
                return None
            like = next(t for t in flat if isinstance(t, torch.Tensor))
            every = found if type(found) is tuple else (found,)
            every = tuple([like.new_empty(0) if t is None else t for t in every])
            return every if type(found) is tuple else every[0]

        def flop_formula(*flat: Any, out_shape: Any = None, **_: Any) -> int:
            assert flops is not None
            names = [argument for argument, _ in signature.flat]
            return flops(SimpleNamespace(**dict(zip(names, flat, strict=True))))

        @wraps(declaration)
        def call(*args: Any) -> Any:
            if _needs_dispatcher(args):
                return overload(*signature.flatten(args))
            function, prepared = chosen(args)
            return function(*prepared)

        _library.impl(name, dispatched, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        if flops is not None:
            register_flop_formula(packet)(flop_formula)
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
