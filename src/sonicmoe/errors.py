"""One shape for every complaint about an argument."""


def bad_argument(argument: str, expected: str, got: object, remedy: str) -> ValueError:
    """`argument: expected …, got …. Remedy.` — returned, so that the caller's `raise` is seen."""
    return ValueError(f"{argument}: expected {expected}, got {got}. {remedy}")
