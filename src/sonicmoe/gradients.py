"""Which gradients a backward pass needs: the others are not computed."""

from typing import NamedTuple


class DownGradients(NamedTuple):
    dz: bool
    dw2: bool
    db2: bool
    dscores: bool


class UpGradients(NamedTuple):
    dx: bool
    dw1: bool
    db1: bool


class Fp8DownGradients(NamedTuple):
    dz: bool
    dz_t: bool
    dw2: bool
    dscores: bool


class Fp8UpGradients(NamedTuple):
    dx: bool
    dw1: bool
