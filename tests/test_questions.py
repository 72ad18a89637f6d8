"""docs/questions.md: what it converts computes what the other packages define."""

from pathlib import Path

import pytest
import torch
from test_documents import BLOCK, run
from torch.nn import functional as F

from sonicmoe import MoE

DOCUMENT = Path(__file__).parents[1] / "docs" / "questions.md"
E, K, H, I = 8, 2, 64, 32


@pytest.fixture(scope="module")
def snippet() -> dict:
    """The names that the section about migrating defines."""
    section = DOCUMENT.read_text().split("## How do I migrate")[1].split("\n## ")[0]
    (block,) = BLOCK.finditer(section)
    return run(block[1], {"torch": torch}, str(DOCUMENT))


def layer(state_dict: dict, router: str, activation: str, x: torch.Tensor) -> torch.Tensor:
    options = {"router": router, "activation_function": activation, "gate_up": "concatenated"}
    moe = MoE(E, K, H, I, **options, dtype=torch.float64)  # type: ignore[arg-type]
    moe.load_state_dict(state_dict)
    return moe(x)[0]


def test_scattermoe(snippet):
    """GLUMLP: two halves of one GEMM, of which the second goes through the activation."""
    fc, proj = (torch.randn(shape, dtype=torch.float64) for shape in ((E, 2 * I, H), (E, H, I)))
    router, x = (torch.randn(n, H, dtype=torch.float64) for n in (E, 20))
    scores, ids = (x @ router.T).topk(K)
    expected = torch.zeros_like(x)
    for t, (weights, chosen) in enumerate(zip(scores.softmax(-1), ids, strict=True)):
        for weight, e in zip(weights, chosen, strict=True):
            h, gates = (fc[e] @ x[t]).chunk(2)
            expected[t] += weight * (proj[e] @ (F.silu(gates) * h))
    theirs = {"experts.weight": fc, "output_experts.weight": proj}
    found = layer(snippet["from_scattermoe"](theirs, router), "softmax_over_topk", "swiglu", x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("normalized", [False, True])
def test_megablocks(snippet, normalized):
    """dMoE with GLU: act(x · w1ᵀ) · (x · v1ᵀ), then · w2; a softmax over all experts."""
    w1, v1, w2 = (torch.randn(E * I, H, dtype=torch.float64) for _ in range(3))
    router, x = (torch.randn(n, H, dtype=torch.float64) for n in (E, 20))
    scores, ids = (x @ router.T).softmax(-1).topk(K)
    if normalized:
        scores = scores / torch.norm(scores, p=1, dim=-1, keepdim=True)
    expected = torch.zeros_like(x)
    for t, (weights, chosen) in enumerate(zip(scores, ids, strict=True)):
        for weight, e in zip(weights, chosen, strict=True):
            rows = slice(e * I, (e + 1) * I)
            a = F.gelu(x[t] @ w1[rows].T, approximate="tanh") * (x[t] @ v1[rows].T)
            expected[t] += weight * (a @ w2[rows])
    names = ("w1", "v1", "w2")
    theirs = {f"experts.mlp.{name}": w for name, w in zip(names, (w1, v1, w2), strict=True)}
    theirs["router.layer.weight"] = router
    kind = "topk_over_softmax" + ("_normalized" if normalized else "")
    found = layer(snippet["from_megablocks"](theirs), kind, "geglu_tanh", x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_megatron(snippet, pre_softmax):
    """TEGroupedMLP: a linear layer per expert, the first half of which is the gate."""
    fc1 = {f"experts.linear_fc1.weight{e}": torch.randn(2 * I, H).double() for e in range(E)}
    fc2 = {f"experts.linear_fc2.weight{e}": torch.randn(H, I).double() for e in range(E)}
    router, x = (torch.randn(n, H, dtype=torch.float64) for n in (E, 20))
    logits = x @ router.T
    if pre_softmax:
        scores, ids = logits.softmax(-1).topk(K)
    else:
        chosen_logits, ids = logits.topk(K)
        scores = chosen_logits.softmax(-1)
    expected = torch.zeros_like(x)
    for t, (weights, chosen) in enumerate(zip(scores, ids.tolist(), strict=True)):
        for weight, e in zip(weights, chosen, strict=True):
            gate, up = F.linear(x[t], fc1[f"experts.linear_fc1.weight{e}"]).chunk(2)
            expected[t] += weight * F.linear(
                F.silu(gate) * up, fc2[f"experts.linear_fc2.weight{e}"]
            )
    kind = "topk_over_softmax" if pre_softmax else "softmax_over_topk"
    theirs = {"router.weight": router, **fc1, **fc2}
    found = layer(snippet["from_megatron"](theirs), kind, "swiglu", x)
    torch.testing.assert_close(found, expected)
