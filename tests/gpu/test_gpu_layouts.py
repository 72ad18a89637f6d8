"""Strided, offset, expanded and transposed arguments on a GPU."""

import pytest
import torch
from helpers import Case, make_inputs
from layouts import check_operator, check_public, operator_arguments, public_calls

import sonicmoe
from sonicmoe.layer.run import permute

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float32)
OPTIONS = ("triton", "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators(dtype):
    for name, args in operator_arguments(dtype, *OPTIONS):
        check_operator(name, args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_public_functions(dtype):
    for function, tensors in public_calls(dtype, *OPTIONS).values():
        check_public(function, tensors)


@pytest.mark.parametrize("sizes", ([700, 0, 301, 0], [-1, 5, 5, 5], [2**40, 0, 0, 0]), ids=str)
def test_counts_out_of_bounds_poison_the_output(sizes):
    given = make_inputs(Case("1000,64,64,4,1", torch.bfloat16), "cuda")
    x, w1 = given.x.requires_grad_(), given.w1.requires_grad_()
    out = sonicmoe.grouped_experts(x, torch.tensor(sizes, device="cuda"), w1, given.w2)
    dx, dw1 = torch.autograd.grad(out, (x, w1), given.dout)
    assert out.isnan().all() and dx.isnan().all() and (dw1 == 0).all()


def test_slots_and_ranges_out_of_order_poison_the_output():
    given = make_inputs(Case("100,64,64,4,1", torch.bfloat16), "cuda")
    pairs = (given.ids.flatten(), given.scores.flatten(), given.w1, given.w2)
    token = torch.arange(100, device="cuda", dtype=torch.int32)
    start = torch.arange(101, device="cuda", dtype=torch.int32)
    assert not sonicmoe.experts(given.x, *pairs, slot_token=token, token_start=start).isnan().any()
    assert sonicmoe.experts(given.x, *pairs, slot_token=token.flip(0)).isnan().any()
    for wrong in (start + 1000, torch.zeros_like(start), start - 10**6):
        out = sonicmoe.experts(given.x, *pairs, slot_token=token, token_start=wrong)
        assert out.isnan().any()
    for count, offset in (([5, 5, 5, 5], [0, 3, 50, 60]), ([1, 1, 1, 1], [200, 300, 400, 500])):
        sizes = [torch.tensor(t, device="cuda") for t in (count, offset)]
        out = sonicmoe.grouped_experts(given.x, sizes[0], *pairs[2:], offsets=sizes[1])
        assert out.isnan().all()


@pytest.mark.parametrize("experts", [5000, 20000, 32767])
def test_many_experts(experts):
    logits = torch.randn(300, experts, device="cuda")
    _, ids = sonicmoe.topk_scores(logits, 4)
    assert torch.equal(ids.long(), logits.topk(4).indices)
    got = permute(ids, experts, backend="triton")
    want = permute(ids.cpu(), experts, backend="torch")
    assert torch.equal(got.slot_row.cpu(), want.slot_row)
    assert torch.equal(got.expert_start.cpu(), want.expert_start)
