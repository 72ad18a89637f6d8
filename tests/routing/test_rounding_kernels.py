"""Kernels of token rounding against the implementation in plain PyTorch."""

import pytest
import torch
from devices import on, values_on
from helpers import run_poisoned
from score_matrices import SCORES, assert_softmax, top

from sonicmoe import MoE, ops
from sonicmoe.enums import KernelBackendMoE
from sonicmoe.launch import token_rounding as launch_token_rounding
from sonicmoe.reference.token_rounding import SUBROUTINES
from sonicmoe.routing import TokenRounding

# (T, E, K, tile)
ON_GPU = [(4096, 64, 4, 128), (1000, 20, 3, 96), (16384, 256, 4, 128), (50, 4, 2, 64)]


def same(scores, ids, tile, subroutine):
    uniform, device = torch.rand(scores.shape[1], device=scores.device), scores.device.type
    want = ops.round_tokens(scores, ids, tile, subroutine, uniform, "torch")

    def step():
        found = ops.round_tokens(scores, ids, tile, subroutine, uniform, "triton")
        return dict(zip(NAMES, found, strict=True))

    same_outputs(run_poisoned(step, device).values(), want)


NAMES = ("expert", "token", "score", "token_start", "rows", "chosen")


def same_outputs(got, want):
    for name, a, b in zip(NAMES, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)


@values_on(
    "shape, subroutine, kind",
    interpreter=[
        *(((40, 5, 2, 8), name, "softmax") for name in SUBROUTINES),  # more than a block
        ((50, 4, 4, 7), "balance-f", "softmax"),  # K = E, a tile that is no power of two
        ((6, 3, 1, 16), "up", "softmax"),  # fewer tokens than a tile
        ((6, 3, 1, 16), "nr-s", "softmax"),
        ((33, 1, 1, 4), "nr-f", "softmax"),  # one expert
        ((20, 3, 2, 1), "sr-f", "softmax"),  # nothing to round
        *(
            ((45, 3, 1, 8), subroutine, kind)
            for kind in sorted(SCORES.keys() - {"random"})
            for subroutine in ("up", "down", "nr-s")
        ),
    ],
    cuda=[
        (shape, subroutine, kind)
        for shape in ON_GPU for subroutine in SUBROUTINES for kind in ("random", "tied")
    ],
)  # fmt: skip
def test_keeps_what_plain_pytorch_keeps(shape, subroutine, kind, device):
    tokens, experts, k, tile = shape
    if kind == "softmax":
        scores = torch.randn(tokens, experts).softmax(-1)
    else:
        scores = SCORES[kind](tokens, experts, torch.Generator().manual_seed(0))
    scores = scores.to(device)
    same(scores, top(scores, k), tile, subroutine)


@on("interpreter")
@pytest.mark.parametrize(("tokens", "experts"), [(1100, 3), (70, 130), (0, 4)])
def test_more_tokens_and_experts_than_are_read_at_once(tokens, experts, monkeypatch):
    monkeypatch.setattr(launch_token_rounding, "_PAIRS", 16)
    scores = torch.randn(tokens, experts).softmax(-1)
    same(scores, top(scores, 2), 32, "balance-f")


@pytest.mark.parametrize("subroutine", SUBROUTINES)
@values_on(
    "shape, part",
    interpreter=[((570, 3, 1, 32), 32)],  # 256 to 512 keys are held
    cuda=[((40000, 8, 2, 128), None)],
)
def test_columns_longer_than_the_registers_hold(shape, part, subroutine, device, monkeypatch):
    if part:
        monkeypatch.setattr(launch_token_rounding, "_PART", part)
    tokens, experts, k, tile = shape
    scores = SCORES["tied"](tokens, experts, torch.Generator().manual_seed(0)).to(device)
    same(scores, top(scores, k), tile, subroutine)


@on("interpreter")
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
    assert len(ids.unique()) == experts
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
@values_on(
    "shape, kind",
    interpreter=[((70, 5, 2, 16), kind) for kind in LOGITS],
    cuda=[(shape, "bf16") for shape in ON_GPU],
)
def test_rounds_by_its_own_softmax(shape, kind, normalize, device):
    """The softmax to a few ulps, and the choice exactly that of the scores that come out."""
    tokens, experts, k, tile = shape
    with torch.device(device):
        logits = LOGITS[kind](tokens, experts)
    ids = ops.topk(logits, k, True, "torch")[1]
    scores = own_scores(logits, ids, normalize)
    assert_softmax(scores, logits, ids if normalize else None)
    for subroutine in ("nr-f", "up", "down", *(["balance-f"] if device == "cuda" else [])):
        want = ops.round_tokens(scores, ids, tile, subroutine, None, "torch")

        def step(subroutine=subroutine):
            options = (normalize, tile, subroutine, None, "triton")
            return dict(zip(NAMES, ops.round_logits(logits, ids, *options), strict=True))

        same_outputs(run_poisoned(step, device).values(), want)


@pytest.mark.parametrize("normalize", [False, True])
@values_on(
    "shape, dtype, subroutine",
    interpreter=[
        ((*shape, 8), dtype, "up")
        for shape in [(40, 5, 2), (33, 1, 1), (9, 130, 3), (0, 4, 2)]
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ],
    cuda=[
        (shape, dtype, "nr-f")
        for shape in [*ON_GPU, (512, 4096, 8, 16)]
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_gradient_of_the_logits(shape, dtype, subroutine, normalize, device):
    tokens, experts, k, tile = shape
    logits = torch.randn(tokens, experts, device=device).to(dtype)
    ids = ops.topk(logits, k, True, "torch")[1]
    options = (normalize, tile, subroutine, None, "torch")
    expert, _, score, start, *_ = ops.round_logits(logits, ids, *options)
    given = (torch.randn_like(score), logits, ids if normalize else None, expert, start)
    want = ops.round_logits_backward(*given, "torch")

    def step():
        return {"dlogits": ops.round_logits_backward(*given, "triton")}

    got = run_poisoned(step, device)["dlogits"]
    assert got.dtype == dtype
    if dtype == torch.float64:  # computed in fp32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    else:
        torch.testing.assert_close(got, want)


@on("interpreter")
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


@on("interpreter")
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


@on("interpreter")
@pytest.mark.parametrize("subroutine", SUBROUTINES)
def test_experts_named_twice_or_not_here(subroutine):
    scores = torch.rand(40, 5)
    ids = torch.randint(-1, 7, (40, 3))
    same(scores, ids, 8, subroutine)
