"""Token rounding under the interpreter, against its implementation in plain PyTorch."""

import pytest
import torch
from helpers import poisoned
from score_matrices import SCORES, top

from sonicmoe import MoE, ops
from sonicmoe.enums import KernelBackendMoE
from sonicmoe.reference.token_rounding import SUBROUTINES
from sonicmoe.routing import TokenRounding

CASES = [
    *((40, 5, 2, 8, name) for name in SUBROUTINES),  # more than a block, E no power of two
    (50, 4, 4, 7, "balance-f"),  # K = E, a tile that is no power of two
    (6, 3, 1, 16, "up"),  # fewer tokens than a tile
    (6, 3, 1, 16, "nr-s"),
    (33, 1, 1, 4, "nr-f"),  # one expert
    (20, 3, 2, 1, "sr-f"),  # nothing to round
]


def same(scores, ids, tile, subroutine):
    uniform = torch.rand(scores.shape[1])
    want = ops.round_tokens(scores, ids, tile, subroutine, uniform, "torch")
    with poisoned():
        got = ops.round_tokens(scores, ids, tile, subroutine, uniform, "triton")
    names = ("expert", "token", "score", "token_start", "rows", "chosen")
    for name, a, b in zip(names, got, want, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_the_plain_one(case):
    tokens, experts, k, tile, subroutine = case
    scores = torch.randn(tokens, experts).softmax(-1)
    same(scores, top(scores, k), tile, subroutine)


@pytest.mark.parametrize("kind", sorted(SCORES.keys() - {"random"}))
@pytest.mark.parametrize("subroutine", ["up", "down", "nr-s"])
def test_ties_and_skew(kind, subroutine):
    scores = SCORES[kind](45, 3, torch.Generator().manual_seed(0))
    same(scores, top(scores, 1), 8, subroutine)


@pytest.mark.parametrize(("tokens", "experts"), [(4100, 3), (70, 130), (0, 4)])
def test_more_tokens_and_experts_than_are_read_at_once(tokens, experts):
    scores = torch.randn(tokens, experts).softmax(-1)
    same(scores, top(scores, 2), 32, "balance-f")


def test_whole_layer():
    moe = MoE(3, 2, 16, 8, router=TokenRounding(3, 2, tile=8))
    x = torch.randn(40, 16, requires_grad=True)
    upstream, found = torch.randn(40, 16), []
    for backend in (KernelBackendMoE.torch, KernelBackendMoE.sonicmoe):
        out, aux = moe(x, kernel_backend_moe=backend)
        grads = torch.autograd.grad((out * upstream).sum() + aux, [x, *moe.parameters()])
        found.append([out, aux, *grads])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
