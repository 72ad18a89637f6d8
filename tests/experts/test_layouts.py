"""Strided, offset, expanded and transposed arguments of every operator and public function."""

from functools import partial

import pytest
import torch
from devices import on, values_on
from helpers import Case, make_inputs, ours, poisoned, run, same_bits
from layouts import (
    check_operator,
    check_public,
    laid_out,
    operator_arguments,
    public_calls,
    written_arguments,
)
from operator_calls import operator_calls

import sonicmoe
from sonicmoe.ops import layout

DTYPES = (torch.bfloat16, torch.float32)
CALLS = list(public_calls())
OF_KERNELS = [call for call in CALLS if not call.startswith("moe_")]  # these choose the backend


@values_on("dtype", cpu=[torch.float32], interpreter=[torch.float32], cuda=DTYPES)
def test_operators(dtype, device, backend):
    for name, args in operator_arguments(dtype, backend, device):
        check_operator(name, args)


@values_on(
    "dtype, call",
    cpu=[(torch.float32, call) for call in CALLS],
    interpreter=[(torch.float32, call) for call in OF_KERNELS],
    cuda=[(dtype, call) for dtype in DTYPES for call in CALLS],
)
def test_public_functions(dtype, call, device, backend):
    check_public(*public_calls(dtype, backend, device)[call])


@pytest.mark.parametrize("name", [name for name in operator_calls() if written_arguments(name)])
def test_what_is_written_to_is_never_a_copy(name):
    """A buffer that is not dense is refused, or written to by its strides."""
    overload, args = getattr(torch.ops.sonicmoe, name).default, operator_calls()[name][0]
    for i in written_arguments(name):
        if args[i] is None:
            continue
        argument = overload._schema.arguments[i].name
        given = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        given[i] = strided = laid_out(args[i], "strided")
        if name == "router_gradient_into":
            overload(*given)
            overload(want := args[i].clone(), *given[1:])
            assert torch.equal(strided, want)
        else:
            with pytest.raises(ValueError, match=f"^{argument}: expected "):
                overload(*given)


@on("cuda")
def test_a_buffer_that_is_not_aligned_is_refused():
    args = list(operator_calls(b="triton", device="cuda")["quantize_weight_into"][0])
    args[0] = laid_out(args[0], "offset")
    with pytest.raises(ValueError, match=r"^w8: expected .* 16-byte aligned, got .* element 1 "):
        torch.ops.sonicmoe.quantize_weight_into(*args)


def test_one_row_of_a_wider_matrix_has_the_strides_of_its_shape():
    """PyTorch calls it contiguous whatever its first stride is; a TMA descriptor reads that."""
    row = torch.randn(3, 33)[:1, :16]
    assert row.is_contiguous() and row.stride() == (33, 1)
    found = layout.for_tma(row)
    assert found.stride() == (16, 1) and torch.equal(found, row)


@on("interpreter", "cuda")
@pytest.mark.parametrize("memory", ["keep", "recompute"])
def test_saved_tensors_that_a_hook_returns_strided(memory, device, backend):
    case = Case("12,16,8,4,2", torch.float32, bias=True, routing="dropped")
    given = make_inputs(case, device)
    layer = partial(ours(case, backend), memory=memory)
    want = run(layer, given)

    def strided(t):
        return laid_out(t, "strided") if t.dim() else t

    with poisoned(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, strided):
        same_bits(want, run(layer, given))


@on("cuda")
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
