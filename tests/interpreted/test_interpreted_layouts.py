"""Strided, offset, expanded and transposed arguments of kernels."""

import pytest
from layouts import LAYOUTS, check_operator, check_public, operator_arguments, public_calls

CALLS = public_calls(backend="triton")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operators(layout):
    for name, args in operator_arguments(backend="triton"):
        check_operator(name, args, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_public_functions(call, layout):
    check_public(*CALLS[call], layout)
