"""CUDA graphs of a module for a few shapes of its inputs, with the gradients that eager calls give.

`torch.cuda.make_graphed_callables` captures. It leaves results wrong without an error where
gradients accumulate, where a call comes between a forward pass and its backward pass, and where an
input has another shape or a parameter was replaced. `Graphed` sees to these.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import bad_argument
from .graph_inputs import Call, Inputs, as_inputs, in_words
from .graph_state import CapturedState

__all__ = ["Graphed", "graphed"]

OTHER = ("eager", "error")


def graphed(
    module: nn.Module, *samples: Any, other: str = "eager", copy_outputs: bool = True
) -> "Graphed":
    """`module` as CUDA graphs: one of the forward and one of the backward pass for each sample.

    A sample is a tensor, a tuple of arguments or a dict of keyword arguments, with the shapes,
    dtypes and `requires_grad` of later calls; arguments that are not tensors are None, numbers or
    strings. Calls with other arguments, another train or eval mode or autocast state run eagerly,
    or with `other="error"` raise a ValueError. The module returns tensors in tuples, dicts or
    `ModelOutput`s; its Python code, hooks included, runs during the capture alone.

    One backward pass may follow each call, before the next one. Parameters and buffers may change
    in place, not be replaced. Outputs are copies unless `copy_outputs=False`, where they hold until
    the next call. So do gradients that `torch.autograd.grad` returns for parameters. Those in
    `.grad` accumulate as usual, and are copied unless `zero_grad` comes before a call. Each sample
    needs the memory of its outputs and of all gradients, and shares that of its activations with
    the others.
    """
    if not isinstance(module, nn.Module):
        remedy = "Wrap a function in a module."
        raise bad_argument("module", "a torch.nn.Module", type(module).__name__, remedy)
    for name, p in module.named_parameters():
        if not p.is_cuda or hasattr(p, "_local_tensor"):
            kind = f"{type(p).__name__} on {p.device}"
            remedy = "Move the module to a GPU; a sharded one cannot be captured."
            raise bad_argument(name, "a parameter whole and on a GPU", kind, remedy)
    for sample in samples:
        for name, t in as_inputs(sample).tensors():
            if not t.is_cuda:
                raise bad_argument(name, "a tensor on a GPU", str(t.device), "Move the sample.")
    return Graphed(module, samples, _platform_capture(), other, copy_outputs)


Captured = Callable[..., tuple[torch.Tensor, ...]]
Capture = Callable[["Flat", tuple[torch.Tensor, ...]], Captured]


def _platform_capture() -> Capture:
    """Capture into one pool: of all graphs only one is between its two passes at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(flat: "Flat", static: tuple[torch.Tensor, ...]) -> Captured:
        options: dict[str, Any] = {"allow_unused_input": True, "pool": pool}
        graphs: Any = torch.cuda.make_graphed_callables(flat, static, **options)
        return graphs.forward

    return capture


class Flat(nn.Module):
    """The module with tensors alone as arguments and results, as PyTorch captures it.

    PyTorch replaces the forward of what it captures: of this object, so that the module may be
    captured several times and still be called eagerly.
    """

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.module = module
        self._inputs = inputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._inputs.filled(tensors)
        leaves, self.structure = pytree.tree_flatten(self.module(*args, **kwargs))
        self.leaves = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor | None | bool | int | float | str):
                raise bad_argument(
                    "module",
                    "one that returns tensors, None, numbers or strings",
                    type(leaf).__name__,
                    "Return it no more; transformers: pass use_cache=False.",
                )
        found = tuple([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        self.differentiable = [t.requires_grad for t in found]
        return found

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the module returned, with these tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if constant is None else constant[0] for constant in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)


class _Size:
    """The graphs for one sample."""

    def __init__(self, module: nn.Module, inputs: Inputs, capture: Capture) -> None:
        self.words = in_words(inputs)
        self.gradients = torch.is_grad_enabled()
        # Copies: a replay writes to them, and the sample is the caller's.
        static = tuple(
            [t.detach().clone().requires_grad_(t.requires_grad) for _, t in inputs.tensors()]
        )
        self.needs = [t.requires_grad for t in static]
        self.flat = Flat(module, inputs.without_tensors())
        self.replay = capture(self.flat, static)

    def covers(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the backward graph has every gradient that a call with `tensors` needs."""
        if not torch.is_grad_enabled():
            return True
        pairs = zip(tensors, self.needs, strict=True)
        return self.gradients and not any(t.requires_grad and not had for t, had in pairs)


class Graphed(nn.Module):
    """What `graphed` returns. `replays` and `other_calls` count the calls."""

    def __init__(
        self,
        module: nn.Module,
        samples: Sequence[Any],
        capture: Capture,
        other: str = "eager",
        copy_outputs: bool = True,
    ) -> None:
        super().__init__()
        if not samples:
            raise bad_argument("samples", "one or more", "none", "Pass inputs as later calls do.")
        if other not in OTHER:
            raise bad_argument("other", f"one of {OTHER}", repr(other), "See help(graphed).")
        self.module = module
        self.other, self.copy_outputs = other, copy_outputs
        self.replays = self.other_calls = 0
        self._turn = 0  # of the last call: the activations in memory are its own
        self._addresses: set[int] = set()  # of gradients that the graphs write
        self._outputs: list[torch.Tensor] = []  # of the last call, without copy_outputs
        self._state = CapturedState(module)
        self._sizes: dict[Any, _Size] = {}
        inputs = [as_inputs(sample) for sample in samples]
        with self._state.preserved():
            # Later captures take freed memory of earlier ones: the largest comes first.
            for each in sorted(inputs, key=Inputs.size, reverse=True):
                if each.key in self._sizes:
                    expected, remedy = "samples that differ", "Pass each one once."
                    raise bad_argument("samples", expected, f"twice {in_words(each)}", remedy)
                self._sizes[each.key] = _Size(module, each, capture)
        self._state.note_fp8_weights()

    def extra_repr(self) -> str:
        shapes = "; ".join(size.words for size in self._sizes.values())
        return f"{shapes}, other={self.other!r}, copy_outputs={self.copy_outputs}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(args, kwargs)
        size = self._sizes.get(call.key)
        same_mode = self._state.has_same_mode()
        if size is None or not size.covers(call.tensors) or not same_mode:
            return self._other_call(args, kwargs, same_mode)
        self._state.check()
        self._keep_gradients()
        self.replays += 1
        self._turn += 1
        if self._outputs:
            # Autograd raises if it needs one of them: the replay writes to its memory.
            torch.autograd.graph.increment_version(self._outputs)
        found = size.replay(*call.tensors)
        node = next((t.grad_fn for t in found if t.grad_fn is not None), None)
        if node is not None:
            backward = _Backward(self, self._turn, len(call.tensors))
            node.register_prehook(backward.before)
            node.register_hook(backward.after)
        self._outputs = [] if self.copy_outputs else [t.detach() for t in found]
        pairs = zip(found, size.flat.differentiable, strict=True)
        found = tuple([t if needs else t.detach() for t, needs in pairs])
        return size.flat.result([t.clone() for t in found] if self.copy_outputs else found)

    def _other_call(self, args: tuple, kwargs: dict, same_mode: bool) -> Any:
        self.other_calls += 1
        if self.other == "eager":
            return self.module(*args, **kwargs)
        if not same_mode:
            expected, got = "the train or eval mode and the autocast state of the capture", "others"
        else:
            captured = "; ".join(size.words for size in self._sizes.values())
            expected = f"one of the captured: {captured}"
            got = in_words(Inputs(args, kwargs))
        remedy = "Capture a sample like it, or pass other='eager'."
        raise bad_argument("inputs", expected, got, remedy)

    def _keep_gradients(self) -> None:
        """Copy each `p.grad` whose memory the next replay would write to.

        Autograd makes the graph's own buffer `p.grad`, without a copy. Already the forward pass,
        also for another sample, may have its activations there. Where `zero_grad` comes before the
        call, there is nothing to copy.
        """
        for p in self._state.parameters:
            if p.grad is not None and p.grad.data_ptr() in self._addresses:
                p.grad.data = p.grad.clone()


class _Backward:
    """The backward pass of one call."""

    def __init__(self, owner: Graphed, turn: int, inputs: int) -> None:
        self.owner, self.turn, self.inputs = owner, turn, inputs
        self.versions = owner._state.versions()
        self.is_over = False

    def before(self, gradients: tuple) -> None:
        owner = self.owner
        if self.is_over or owner._turn != self.turn:
            got = "a second one" if self.is_over else "another call of the graphs before it"
            remedy = "Call, run the backward pass, then call again; or use the module eagerly."
            expected = "one backward pass right after each call, which overwrites activations"
            raise bad_argument("backward pass", expected, got, remedy)
        if owner._state.versions() != self.versions:
            raise bad_argument(
                "parameters",
                "the values of the forward pass in its backward pass",
                "a change in between",
                "Step the optimizer after the backward pass.",
            )

    def after(self, gradients: tuple, _: tuple) -> tuple:
        """Gradients of inputs are copies, those of parameters the graph's own."""
        self.is_over = True
        state = self.owner._state
        p: Any
        for p, gradient in zip(state.parameters, gradients[self.inputs :], strict=True):
            if gradient is not None:
                self.owner._addresses.add(gradient.data_ptr())
            if getattr(p, "grad_added_to_main_grad", None) is False:
                p.grad_added_to_main_grad = True
        own = [None if g is None else g.clone() for g in gradients[: self.inputs]]
        return (*own, *gradients[self.inputs :])
