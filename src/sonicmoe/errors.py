"""Format of argument errors."""


def bad_argument(argument: str, expected: str, got: object, remedy: str) -> ValueError:
    """`argument: expected …, got …. Remedy.`; the caller raises it, so that `raise` is seen."""
    return ValueError(f"{argument}: expected {expected}, got {got}. {remedy}")
