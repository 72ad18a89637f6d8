"""Tensors of more than 2³¹ elements, and the accuracy at a size that is trained with.

fp64 of everything would not fit: rows and experts are sampled, the last ones always among them,
because an index that wrapped around goes wrong there.
"""

import math
from dataclasses import replace

import pytest
import torch
from helpers import Case, Inputs, compare, make_inputs, ours, plain, run
from quick_start import PUBLISHED_QUICK_START

import sonicmoe
from sonicmoe.shapes import Problem

pytestmark = pytest.mark.gpu
LIMIT = 2**31


def _large_inputs(shape: str) -> Inputs:
    """As `make_inputs`, drawn on the device."""
    p = Problem.parse(shape)

    def normal(*size, scale=1.0):
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16).mul_(scale)

    offset = torch.randint(p.E, (p.T, 1), device="cuda")
    return Inputs(
        x=normal(p.T, p.H),
        ids=((offset + torch.arange(p.K, device="cuda")) % p.E).to(torch.int32),
        scores=torch.rand(p.T, p.K, device="cuda") + 0.5,
        w1=normal(p.E, p.N, p.H, scale=1 / math.sqrt(p.H)),
        w2=normal(p.E, p.H, p.I, scale=1 / math.sqrt(p.I)),
        b1=None,
        b2=None,
        dout=normal(p.T, p.H),
    )


def _check_tokens(got: dict, given: Inputs, tokens: torch.Tensor, case: Case) -> None:
    """Output, dX and dscores of these tokens: they depend on no other token."""
    part = replace(
        given, x=given.x[tokens], ids=given.ids[tokens], scores=given.scores[tokens],
        dout=given.dout[tokens], differentiable=("x", "scores"),
    )  # fmt: skip
    # Only the experts of these tokens, or fp64 weights would not fit.
    busy, part.ids = part.ids.unique(return_inverse=True)
    part.w1, part.w2 = given.w1[busy.long()], given.w2[busy.long()]
    mine = {name: got[name][tokens] for name in ("out", "dx", "dscores")}
    compare(mine, run(plain(case), part), run(plain(case), part.double()), case.dtype)


def _check_expert(got: dict, given: Inputs, expert: int, case: Case) -> None:
    """dW1 and dW2 of this expert: they depend on its own rows alone."""
    token, slot = (given.ids == expert).nonzero(as_tuple=True)
    part = Inputs(
        given.x[token], torch.zeros_like(token)[:, None], given.scores[token, slot][:, None],
        given.w1[expert : expert + 1], given.w2[expert : expert + 1], None, None,
        given.dout[token], ("w1", "w2"),
    )  # fmt: skip
    rough, exact = run(plain(case), part), run(plain(case), part.double())
    mine = {name: got[name][expert : expert + 1] for name in ("dw1", "dw2")}
    compare(mine, rough, exact, case.dtype)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("66000,4096,64,8,8", lambda p: p.R * p.H),  # Y and dX̃, the rows of the gathered X
        ("540000,4096,64,8,1", lambda p: p.T * p.H),  # X, dX, O and dO themselves
        ("66000,64,2048,8,8", lambda p: p.R * p.N),  # Z and dZ
        ("600,4096,4096,136,2", lambda p: p.E * p.H * p.I),  # W2; W1 twice as many, and gradients
    ],
    ids=["rows", "tokens", "z", "weights"],
)
def test_more_elements_than_32_bits_count(shape, size):
    case, p = Case(shape), Problem.parse(shape)
    assert size(p) > LIMIT
    given = _large_inputs(shape)
    got = run(ours(case, "triton"), given)
    ends = [torch.arange(8), p.T - 1 - torch.arange(8), torch.randint(p.T, (8,))]
    tokens = torch.cat(ends).cuda()
    last = (given.ids == p.E - 1).any(-1).nonzero()[-8:, 0]  # the last rows of Y are theirs
    _check_tokens(got, given, torch.cat([tokens, last]).unique(), case)
    for expert in (0, p.E // 2, p.E - 1):
        _check_expert(got, given, expert, case)


def test_logits_of_more_elements_than_32_bits_count():
    tokens, experts = 540_000, 4096
    logits = torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16).requires_grad_()
    scores, ids = sonicmoe.topk_scores(logits, 2, softmax_over_topk=False)
    dscores = torch.randn_like(scores)
    (dlogits,) = torch.autograd.grad(scores, logits, dscores)
    for some in (slice(0, 64), slice(tokens - 64, tokens)):
        few = logits.detach()[some].clone().requires_grad_()
        want, order = sonicmoe.topk_scores(few, 2, softmax_over_topk=False, backend="torch")
        (dwant,) = torch.autograd.grad(want, few, dscores[some])
        assert torch.equal(ids[some], order)
        torch.testing.assert_close(scores[some], want, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(dlogits[some], dwant, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    "shape",
    [
        "24576,1536,256,128,8",
        "9000,2048,4104,3,2",  # weights that no cache keeps, and rows for three bands of tiles
    ],
)
def test_accuracy_at_a_size_that_is_trained_with(shape):
    """The output and every gradient in full, at most 1.1 times the error of plain bf16 PyTorch."""
    case = Case(shape, routing="uniform")
    given = make_inputs(case, "cuda")
    got = run(ours(case, "triton"), given)
    compare(got, run(plain(case), given), run(plain(case), given.double()), case.dtype)


def test_the_published_quick_start_runs_as_it_stands():
    said = {}
    exec(PUBLISHED_QUICK_START, said)
    moe, x, output, aux_loss = (said[name] for name in ("moe", "x", "output", "aux_loss"))
    assert output.shape == x.shape and output.dtype == torch.bfloat16
    assert aux_loss.dim() == 0 and 0.9 < aux_loss.item() < 1.5  # 1 where the experts share evenly
    output.sum().backward()

    few = torch.randint(len(x), (64,), device="cuda")
    with torch.no_grad():
        scores, ids = sonicmoe.topk_scores(moe.router(x), 8, backend="torch")
    weights = (moe.c_fc.weight.detach(), moe.c_proj.weight.detach(), None, None)
    given = Inputs(x[few], ids[few], scores[few], *weights, x[few])
    case = Case("64,4096,1536,128,8")
    with torch.no_grad():
        rough = {"out": plain(case)(**given.arguments())}
        exact = {"out": plain(case)(**given.double().arguments())}
    compare({"out": output.detach()[few]}, rough, exact, case.dtype)
