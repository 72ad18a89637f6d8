"""What a user should know once: something slower than expected is running, or long work began."""

import warnings
from functools import cache


@cache
def say_once(message: str) -> None:
    warnings.warn(f"sonicmoe: {message}", stacklevel=3)
