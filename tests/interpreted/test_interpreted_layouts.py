"""Strided, offset, expanded and transposed arguments of kernels."""

import pytest
from layouts import check_operator, check_public, operator_arguments, public_calls

CALLS = public_calls(backend="triton")


def test_operators():
    for name, args in operator_arguments(backend="triton"):
        check_operator(name, args)


@pytest.mark.parametrize("call", CALLS)
def test_public_functions(call):
    check_public(*CALLS[call])
