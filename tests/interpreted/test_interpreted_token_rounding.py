"""Token rounding under the interpreter, against its implementation in plain PyTorch."""

import pytest
import torch
from helpers import poisoned
from score_matrices import SCORES, assert_softmax, top

from sonicmoe import MoE, ops
from sonicmoe.enums import KernelBackendMoE
from sonicmoe.launch import token_rounding as launch_token_rounding
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
    same_outputs(got, want)


def same_outputs(got, want):
    names = ("expert", "token", "score", "token_start", "rows", "chosen")
    for name, a, b in zip(names, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)


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


@pytest.mark.parametrize(("tokens", "experts"), [(1100, 3), (70, 130), (0, 4)])
def test_more_tokens_and_experts_than_are_read_at_once(tokens, experts, monkeypatch):
    monkeypatch.setattr(launch_token_rounding, "_PAIRS", 16)
    scores = torch.randn(tokens, experts).softmax(-1)
    same(scores, top(scores, 2), 32, "balance-f")


@pytest.mark.parametrize("subroutine", SUBROUTINES)
def test_columns_longer_than_the_registers_hold(subroutine, monkeypatch):
    monkeypatch.setattr(launch_token_rounding, "_PART", 32)  # 256 to 512 keys are held
    scores = SCORES["tied"](570, 3, torch.Generator().manual_seed(0))
    same(scores, top(scores, 1), 32, subroutine)


def test_scores_that_are_no_numbers():
    scores = torch.rand(40, 4)
    scores[::7], scores[3, 1], scores[5, 2] = float("nan"), -1.0, float("inf")
    for subroutine in ("up", "down"):
        want = ops.round_tokens(scores.clamp(min=0), top(scores, 2), 8, subroutine, None, "torch")
        got = ops.round_tokens(scores, top(scores, 2), 8, subroutine, None, "triton")
        same_outputs(got, want)


# --- from logits ----------------------------------------------------------------------------------
def own_scores(logits, ids, normalize):
    """(T, E), as the kernel computes them: a tile of T rows that goes up takes in every pair."""
    tokens, experts = logits.shape
    assert set(ids.flatten().tolist()) == set(range(experts))
    _, _, score, *_ = ops.round_logits(logits, ids, normalize, tokens, "up", None, "triton")
    return score[: tokens * experts].view(tokens, experts)


LOGITS = {
    "bf16": lambda t, e: torch.randn(t, e).bfloat16(),
    "fp16": lambda t, e: torch.randn(t, e).half(),
    "fp64": lambda t, e: torch.randn(t, e).double(),
    "a slice": lambda t, e: torch.randn(t, e + 3)[:, 1:-2],
    "transposed": lambda t, e: torch.randn(e, t).T,
    "large": lambda t, e: 50 * torch.randn(t, e),
    "tied": lambda t, e: torch.randint(0, 3, (t, e)).float(),
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", LOGITS)
def test_rounds_by_its_own_softmax(kind, normalize):
    """The softmax to a few ulps, and the choice exactly that of the scores that come out."""
    logits = LOGITS[kind](70, 5)
    ids = ops.topk(logits, 2, True, "torch")[1]
    scores = own_scores(logits, ids, normalize)
    assert_softmax(scores, logits, ids if normalize else None)
    for subroutine in ("up", "nr-f", "down"):
        want = ops.round_tokens(scores, ids, 16, subroutine, None, "torch")
        with poisoned():
            got = ops.round_logits(logits, ids, normalize, 16, subroutine, None, "triton")
        same_outputs(got, want)


@pytest.mark.parametrize("shape", [(40, 5, 2), (33, 1, 1), (9, 130, 3), (0, 4, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradient_of_the_logits(shape, dtype, normalize):
    tokens, experts, k = shape
    logits = torch.randn(tokens, experts).to(dtype)
    ids = ops.topk(logits, k, True, "torch")[1]
    expert, _, score, start, *_ = ops.round_logits(logits, ids, normalize, 8, "up", None, "torch")
    given = (torch.randn_like(score), logits, ids if normalize else None, expert, start)
    want = ops.round_logits_backward(*given, "torch")
    with poisoned():
        got = ops.round_logits_backward(*given, "triton")
    assert got.dtype == dtype
    if dtype == torch.float64:  # computed in fp32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    else:
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("normalize", [False, True])
def test_logits_that_are_no_numbers(normalize):
    logits = torch.randn(40, 4)
    logits[3, 1], logits[5], logits[7, 0] = float("nan"), float("-inf"), float("inf")
    logits[9, 2] = float("-inf")
    ids = ops.topk(logits, 2, True, "torch")[1]
    want = ops.round_logits(logits, ids, normalize, 8, "nr-f", None, "torch")
    got = ops.round_logits(logits, ids, normalize, 8, "nr-f", None, "triton")
    for name, a, b in zip(("expert", "token", "score", "start"), got, want, strict=False):
        torch.testing.assert_close(a, b, equal_nan=True, msg=name)
    assert got[2].isnan().any()


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


@pytest.mark.parametrize("subroutine", SUBROUTINES)
def test_experts_named_twice_or_not_here(subroutine):
    scores = torch.rand(40, 5)
    ids = torch.randint(-1, 7, (40, 3))
    same(scores, ids, 8, subroutine)
