"""Whether a linear layer computes X Wᵀ and nothing else, so that a fused node may replace its call.

Hooks, global ones included, and another `forward` must run, so they prevent it.
"""

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_FILE = nn.Linear.extra_repr.__code__.co_filename
_FORWARD = nn.Linear.forward
# If it was patched before this import, nothing is fused.
_IS_PATCHED = getattr(getattr(_FORWARD, "__code__", None), "co_filename", None) != _FILE


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is an `nn.Linear`, not a subclass, without hooks of its own."""
    forward_hooks = module._forward_hooks or module._forward_pre_hooks
    backward_hooks = module._backward_hooks or module._backward_pre_hooks
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    return not forward_hooks and not backward_hooks


def is_plain_linear(module: nn.Module) -> bool:
    """Whether reading `weight` does the same as calling `module`."""
    if not is_linear(module) or module.bias is not None or _has_any_global_hook():
        return False
    return nn.Linear.forward is _FORWARD and not _IS_PATCHED
