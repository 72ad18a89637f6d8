"""Warnings that are shown once per message."""

import warnings
from functools import cache


@cache
def say_once(message: str) -> None:
    warnings.warn(f"sonicmoe: {message}", stacklevel=3)
