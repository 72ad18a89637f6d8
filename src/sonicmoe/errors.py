"""What users are told: argument errors, and warnings that are shown once."""

import warnings
from functools import cache


def bad_argument(argument: str, expected: str, got: object, remedy: str) -> ValueError:
    """`argument: expected …, got …. Remedy.`; the caller raises it, so that `raise` is seen."""
    return ValueError(f"{argument}: expected {expected}, got {got}. {remedy}")


@cache
def say_once(message: str) -> None:
    warnings.warn(f"sonicmoe: {message}", stacklevel=3)
