"""Locks around two functions of Triton that are not thread-safe. Importing this installs them."""

import threading
from collections.abc import Callable
from functools import wraps
from types import ModuleType, SimpleNamespace

from triton.runtime import build
from triton.runtime.jit import JITCallable


def parsed_alone(parse: Callable) -> Callable:
    """Serialize parsing. Python 3.11 counts the depth of its parser for all threads together: two
    that parse at once may end in a SystemError, as they did once in the tests."""
    parsing = threading.Lock()

    @wraps(parse)
    def alone(*args, **kwargs):
        with parsing:
            return parse(*args, **kwargs)

    return alone


def loaded_alone(load: Callable[..., ModuleType]) -> Callable[..., SimpleNamespace]:
    """Serialize loading, and copy the names out of the module. All launchers share one module name,
    so Python reuses one module: of 20000 loaded by eight threads 1348 had another's function."""
    loading = threading.Lock()

    @wraps(load)
    def alone(*args, **kwargs):
        with loading:
            return SimpleNamespace(**vars(load(*args, **kwargs)))

    return alone


for owner, name, alone in (
    (JITCallable, "parse", parsed_alone),
    (build, "_load_module_from_path", loaded_alone),
):
    if hasattr(owner, name):  # in Triton 3.6 to 3.9
        setattr(owner, name, alone(getattr(owner, name)))
