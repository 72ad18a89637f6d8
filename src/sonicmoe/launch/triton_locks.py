"""Triton among threads: two of its steps mix threads up, and are taken one at a time from here on.

Importing this module is all it takes; `launch` does.
"""

import threading
from collections.abc import Callable
from functools import wraps
from types import ModuleType, SimpleNamespace

from triton.runtime import build
from triton.runtime.jit import JITCallable


def parsed_alone(parse: Callable) -> Callable:
    """Python 3.11 counts how deep its parser is for all threads together: where two parse at once
    it may end in a SystemError, as it did once in the tests."""
    parsing = threading.Lock()

    @wraps(parse)
    def alone(*args, **kwargs):
        with parsing:
            return parse(*args, **kwargs)

    return alone


def loaded_alone(load: Callable[..., ModuleType]) -> Callable[..., SimpleNamespace]:
    """Python makes one module of all launchers, since they share a name. Of 20000 that were loaded
    by eight threads 1348 had another's function, unless it was taken out before the next came."""
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
