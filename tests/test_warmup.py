"""What `warmup` compiles is what a training step runs."""

import pytest
import torch
from machine_code import compiling

import sonicmoe
from sonicmoe import ActivationType, validation
from sonicmoe.warmup import _stages

H, I, E, K = 64, 32, 48, 2


@pytest.fixture(autouse=True)
def _kernels_on_cpu_tensors(monkeypatch):
    monkeypatch.setattr(validation, "_interpreting", lambda: True)


def step(tokens, bias, gate_up):
    """The kernels of a forward and backward pass, through the public functions."""

    def new(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    x, logits = new(tokens, H), new(tokens, E)
    w1, w2 = new(E, 2 * I, H), new(E, H, I)
    b1, b2 = (new(E, 2 * I), new(E, H)) if bias else (None, None)
    with compiling(90) as compiled:
        scores, _ = sonicmoe.topk_scores(logits, K, backend="triton")
        ids = torch.zeros(tokens, K, dtype=torch.int32)
        out = sonicmoe.experts(
            x, ids, scores, w1, w2, b1, b2, gate_up=gate_up, backend="triton"
        )  # fmt: skip
        out.backward(torch.ones_like(out))
    return compiled


@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_step_after_warmup_compiles_nothing(bias, gate_up):
    concatenated = gate_up == "concatenated"
    with compiling(90) as warm:
        for _, run in _stages(
            H, I, E, K, torch.bfloat16, ActivationType.SWIGLU, concatenated, bias, True,
            torch.device("cpu"),
        ):  # fmt: skip
            run()
    needed = step(999, bias, gate_up)
    missing = {k.metadata.name for k in needed if all(k is not w for w in warm)}
    assert len(needed) >= 15
    assert not missing


def test_warmup_needs_a_gpu():
    with pytest.raises(ValueError, match="device: expected a GPU, got cpu"):
        sonicmoe.warmup(H, I, E, K, device="cpu")
