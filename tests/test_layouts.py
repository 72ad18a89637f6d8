"""Strided, offset, expanded and transposed arguments, in plain PyTorch."""

import pytest
import torch
from layouts import check_operator, check_public, operator_arguments, public_calls
from operator_calls import operator_calls

from sonicmoe.ops import layout

CALLS = public_calls()


def test_operators():
    for name, args in operator_arguments():
        check_operator(name, args)


@pytest.mark.parametrize("call", CALLS)
def test_public_functions(call):
    check_public(*CALLS[call])


def test_a_main_grad_that_is_not_dense_is_refused():
    main_grad, *rest = operator_calls(b="torch")["weight_gradient_into"][0]
    wide = torch.zeros(*main_grad.shape[:2], 2 * main_grad.shape[2])[..., ::2]
    with pytest.raises(ValueError, match="main_grad"):
        torch.ops.sonicmoe.weight_gradient_into(wide, *rest)


def test_one_row_of_a_wider_matrix_has_the_strides_of_its_shape():
    """PyTorch calls it contiguous whatever its first stride is; a TMA descriptor reads that."""
    row = torch.randn(3, 33)[:1, :16]
    assert row.is_contiguous() and row.stride() == (33, 1)
    found = layout.for_tma(row)
    assert found.stride() == (16, 1) and torch.equal(found, row)
