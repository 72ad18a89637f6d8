"""Strided, offset, expanded and transposed arguments, in plain PyTorch."""

import pytest
import torch
from layouts import check_operator, check_public, operator_arguments, public_calls

CALLS = public_calls()


def test_operators():
    for name, args in operator_arguments():
        check_operator(name, args)


@pytest.mark.parametrize("call", CALLS)
def test_public_functions(call):
    check_public(*CALLS[call])


def test_a_main_grad_that_is_not_dense_is_refused():
    from operator_calls import operator_calls

    main_grad, *rest = operator_calls(b="torch")["up_backward_into"][0]
    wide = torch.zeros(*main_grad.shape[:2], 2 * main_grad.shape[2])[..., ::2]
    with pytest.raises(ValueError, match="main_grad"):
        torch.ops.sonicmoe.up_backward_into(wide, *rest)
