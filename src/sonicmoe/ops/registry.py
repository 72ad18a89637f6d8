"""Registration of operators as `torch.ops.sonicmoe.<name>`, each from one typed declaration.

The namespace is the name under which the package is imported, so that a copy under another name
can be used in the same process.

The signature of a declaration is the operator's schema. Its body returns empty tensors with the
shapes and dtypes of the results: PyTorch's fake implementation. The implementations have the same
name and parameters.

Operators have no autograd of their own: the nodes of `layer` and `routing` call them.
"""

import enum
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Annotated, Any, get_args, get_type_hints

import torch
from torch.utils.flop_counter import register_flop_formula

from .layout import laid_out, plan_of

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
    str | None: "str?",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
}
# Arguments of these types need no dispatcher; enums and tuples of tensors join them.
_plain = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, torch.dtype, type(None)}
_ABSENT = (0, 0, 0, 0)  # the shape of a result that is None: no other result has four dimensions


@cache
def stages(backend: str, name: str) -> ModuleType:
    """The module of a backend with this name, imported when it is needed."""
    folder = "launch" if backend == "triton" else "reference"
    return import_module(f"..{folder}.{name}", __package__)


class Signature:
    """The parameters of a declaration, and how they become the flat arguments of a schema.

    A NamedTuple becomes its fields, an enum its value.
    """

    def __init__(self, declaration: Callable, written: str | None = None) -> None:
        """`written` names a parameter that the operator writes to."""
        hints = get_type_hints(declaration, include_extras=True)
        if written is not None:
            hints[written] = Mutated
        results = hints.pop("return")
        self.hints = hints
        self.flat = list(_flat_parameters(hints))
        # Of tensors in tuples, only of those that callers allocate.
        self.of_callers = plan_of(hints, Mutated, own=False)
        self.of_all = plan_of(hints, Mutated, own=True)
        if list(hints)[-1] not in ("backend", "how"):  # by PyTorch alone, which needs no layout
            self.of_callers = self.of_all = []
        _plain.update(kind for kind in hints.values() if isinstance(kind, type))
        given = get_args(results)
        self.tuples = [kind for kind in given or (results,) if hasattr(kind, "_fields")]
        self.is_single = results in (torch.Tensor, type(None))
        self.returns = "()"
        if results is not type(None):
            count = sum(len(kind._fields) for kind in self.tuples) or len(given) or 1
            self.returns = "Tensor" if self.is_single else f"({', '.join(['Tensor'] * count)})"

    def schema(self, name: str) -> str:
        arguments = ", ".join(
            f"{kind.format(f'a{place}')} {argument}"
            for place, (argument, kind) in enumerate(self.flat)
        )
        return f"{name}({arguments}) -> {self.returns}"

    def unflatten(self, flat: Sequence) -> list:
        """The arguments of the declaration."""
        values = iter(flat)
        return [_made(kind, values) for kind in self.hints.values()]

    def restored(self, found: Any) -> Any:
        """The results of the declaration, from those of the schema."""
        if self.is_single:
            return found
        results = [None if t.dim() == len(_ABSENT) else t for t in found]
        if not self.tuples:
            return tuple(results)
        values = iter(results)
        made = tuple([kind._make(islice(values, len(kind._fields))) for kind in self.tuples])
        return made if len(made) > 1 else made[0]


def _flat_parameters(hints: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and types in the schema."""
    for name, kind in hints.items():
        if hasattr(kind, "_fields"):
            yield from _flat_parameters(get_type_hints(kind), f"{prefix}{name}_")
        else:
            is_enum = isinstance(kind, enum.EnumMeta)
            yield prefix + name, "str" if is_enum else _SCHEMA_TYPES[kind]


def flattened(values: Sequence) -> list:
    """The arguments of a schema, or all results."""
    flat: list = []
    for value in values:
        if isinstance(value, tuple):
            flat.extend(flattened(value))
        else:
            flat.append(value.value if isinstance(value, enum.Enum) else value)
    return flat


def _made(kind: Any, values: Iterator) -> Any:
    if hasattr(kind, "_fields"):
        return kind._make([_made(hint, values) for hint in get_type_hints(kind).values()])
    value = next(values)
    return kind(value) if isinstance(kind, enum.EnumMeta) else value


class Operator:
    """One operator of the namespace: `overload` for PyTorch's dispatcher, `chosen` without it."""

    def __init__(
        self, declaration: Callable, name: str, signature: Signature, find: Any, flops: Any
    ) -> None:
        self.declaration, self.signature = declaration, signature
        self.find, self.flops = find, flops
        self.function = declaration.__name__
        _library.define(signature.schema(name), tags=(torch.Tag.needs_exact_strides,))
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        self.overload = packet.default
        _library.impl(name, self.dispatched, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", self.fake, lib=_library)
        if flops is not None:
            register_flop_formula(packet, get_raw=True)(self.flop_formula)

    def chosen(self, args: Sequence, plan: list) -> tuple[Callable, Sequence]:
        """The implementation for these arguments, and the arguments as it takes them."""
        last, find = args[-1], self.find
        if type(find) is not str:
            return find(last, self.function), laid_out(args, plan, last.backend == "triton")
        if type(last) is not str:
            return getattr(stages("torch", find), self.function), laid_out(args, plan, False)
        args = laid_out(args, plan, last == "triton")
        return getattr(stages(last, find), self.function), args[:-1]

    def dispatched(self, *flat: Any) -> Any:
        function, args = self.chosen(self.signature.unflatten(flat), self.signature.of_all)
        return self.every_result(function(*args), flat)

    def fake(self, *flat: Any) -> Any:
        args = laid_out(self.signature.unflatten(flat), self.signature.of_all, False)
        return self.every_result(self.declaration(*args), flat)

    def every_result(self, found: Any, flat: Sequence) -> Any:
        """Flat, with a tensor in the place of None, as PyTorch expects it."""
        if self.signature.is_single:
            return found
        like = next(t for t in flat if isinstance(t, torch.Tensor))
        return tuple([like.new_empty(_ABSENT) if t is None else t for t in flattened(found)])

    def flop_formula(self, *flat: Any, out_val: Any = None, **_: Any) -> int:
        return self.flops(*self.signature.unflatten(flat))


def operator(
    find: str | Callable, flops: Callable[..., int] | None = None, into: str | None = None
) -> Callable[[Callable], Callable]:
    """Register the decorated declaration; returns the function that calls the operator.

    `find` names the module in `launch/` and `reference/` that has the implementation, which takes
    no `backend`; without such a parameter the reference serves both. Or it is a function of the
    last argument and the name. `flops` takes the arguments. If the argument `into` is given, a
    second operator `<name>_into` writes to it.
    """

    def register(declaration: Callable) -> Callable:
        name, rest = declaration.__name__, (find, flops)
        plain = writing = Operator(declaration, name, Signature(declaration), *rest)
        place = None
        if into is not None:
            signature = Signature(declaration, into)
            writing = Operator(declaration, f"{name}_into", signature, *rest)
            place = list(signature.hints).index(into)

        @wraps(declaration)
        def call(*args: Any) -> Any:
            own = plain if place is None or args[place] is None else writing
            if _needs_dispatcher(args):
                return own.signature.restored(own.overload(*flattened(args)))
            function, prepared = own.chosen(args, own.signature.of_callers)
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
