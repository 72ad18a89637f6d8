"""One deliberate fault."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """`old` becomes `new` in a file of `package`; the named tests must then fail."""

    broken: str  # what the fault does, in words
    file: str
    old: str
    new: str
    tests: str  # a file, and after ` -k ` what selects tests in it
    gpu: bool = False
    interpreted: bool = False
    package: str = "src/sonicmoe"
