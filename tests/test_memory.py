"""What is kept for the backward pass: the formula against what autograd holds, to the byte."""

import gc

import pytest
import torch
from research.memory import saved_bytes

from sonicmoe import MoE, moe_TC_softmax_topk_layer
from sonicmoe.enums import ActivationType
from sonicmoe.layer.run import permute
from sonicmoe.tools import cost
from sonicmoe.tools.candidates import ours
from sonicmoe.tools.cases import ROUTERS, Case
from sonicmoe.tools.inputs import make_inputs

# Granularities at the same K·I and E·I: H/I = 2, 4, 8.
GRANULARITIES = ("96,64,32,4,2", "96,64,16,8,4", "96,64,8,16,8")


def held_and_expected(case: Case, dtype: torch.dtype, router: bool = True) -> tuple[int, int]:
    inputs = make_inputs(case, device="cpu", dtype=dtype)
    subject = ours(inputs, router=router)
    beside = [t for name, t in subject.leaves.items() if name != "scores"]
    held, _ = saved_bytes(subject.forward, beside)
    height = permute(inputs.ids, case.problem.E, dtype=dtype).tile_m
    kind = case.router if router else None
    return held, sum(cost.kept_bytes(case.problem, dtype.itemsize, height, kind).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("shape", GRANULARITIES)
def test_kept_bytes_to_the_byte(shape, router, dtype):
    held, expected = held_and_expected(Case.of_shape(shape, router=router), dtype)
    assert held == expected


@pytest.mark.parametrize("shape", GRANULARITIES)
def test_kept_bytes_with_the_router_out(shape):
    held, expected = held_and_expected(Case.of_shape(shape), torch.float32, router=False)
    assert held == expected


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", list(ActivationType))
def test_kept_bytes_of_every_activation(activation, bias):
    held, expected = held_and_expected(
        Case.of_shape(GRANULARITIES[1], activation, bias), torch.float32
    )
    assert held == expected


def test_kept_bytes_do_not_grow_with_granularity():
    """Beside Z, which is the same, only the routing's 20 bytes a row and the tile table differ."""
    held = [held_and_expected(Case.of_shape(shape), torch.float32)[0] for shape in GRANULARITIES]
    rows = [96 * k for k in (2, 4, 8)]
    routing = [total - 96 * 2 * 64 * 4 for total in held]
    assert all(bytes_ < 25 * r + 1024 for bytes_, r in zip(routing, rows, strict=True))


def test_inference_keeps_nothing():
    inputs = make_inputs(Case.of_shape(GRANULARITIES[0]), device="cpu", dtype=torch.float32)
    i = inputs
    held, _ = saved_bytes(
        lambda: moe_TC_softmax_topk_layer(
            i.x, i.router_w, i.w1.permute(1, 2, 0), None, i.w2.permute(1, 2, 0), None, 2,
            is_inference_mode_enabled=True,
        )[0],
        [],
    )  # fmt: skip
    layer = MoE(4, 2, 64, 32)
    module, _ = saved_bytes(lambda: layer(i.x, is_inference_mode=True)[0], [])
    assert held == module == 0


@pytest.mark.gpu
def test_kept_bytes_on_a_gpu():
    """The allocator rounds each tensor up to 512 bytes, and nothing else is held."""
    kept = []
    for shape in ("24576,1536,256,128,8", "24576,1536,512,64,4", "24576,1536,1024,32,2"):
        case = Case.of_shape(shape)
        inputs = make_inputs(case, device="cuda")
        subject = ours(inputs, router=True)
        subject.forward_backward()
        height = permute(inputs.ids, case.problem.E, dtype=inputs.x.dtype).tile_m
        expected = cost.kept_bytes(case.problem, 2, height, case.router)
        gc.collect()  # compiling leaves frames in cycles, and they hold the first gradients
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = subject.forward()
        held = torch.cuda.memory_allocated() - before - out.nbytes
        assert 0 <= held - sum(expected.values()) <= 512 * len(expected)
        assert held <= 200 * 2**20
        kept.append(held)
        del inputs, subject, out
        torch.cuda.empty_cache()
    assert max(kept) / min(kept) <= 1.02
