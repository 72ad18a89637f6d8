"""The benchmarks of packed weights, as far as a CPU runs them."""

import json
import sys

import pytest
import torch

pytest.importorskip("peft", reason="comes with the extra 'test'")

import packed_model as script
from packed_model import LARGE, TINY, GptOssConfig, Run
from packed_random import FORMATS, random_packed

from sonicmoe.integrations.packed_parameter import PackedParameter
from sonicmoe.integrations.transformers import register

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("format", FORMATS)
def test_random_weights_are_near_one_over_root_k(format):
    w = random_packed(format, (2, 256, 1024), "cpu").dequantize().float()
    assert 0.2 < w.std() * 1024**0.5 < 5 and w.isfinite().all()


# --- a whole model --------------------------------------------------------------------------------
def test_a_tiny_model_trains_its_adapters(capsys, monkeypatch):
    monkeypatch.setattr(script, "CONTEXT", 64)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)  # absent
    script.main(["--tiny", "--runs", "128,8,bf16", "64,4,fp32"])
    told = capsys.readouterr()
    about, first, second = map(json.loads, told.out.splitlines())
    assert about["device"] == "CPU" or torch.cuda.is_available()
    assert "no 8-bit Adam (" in told.err
    assert first["optimizer"].startswith("torch AdamW, states in bf16")
    assert second["optimizer"].startswith("torch AdamW, states in fp32")
    # r·E rows of A and columns of B for W1 (128, 64) and W2 (64, 64), in two layers.
    trained = 2 * 4 * (64 + 128 + 64 + 64)
    assert (first["trained"], second["trained"]) == (8 * trained, 4 * trained)
    for record in (first, second):
        assert len(record["losses"]) == script.STEPS
        assert record["losses"][-1] < record["losses"][0]


def test_adam_in_8_bits_if_it_is_there():
    pytest.importorskip("bitsandbytes", reason="comes with the extra 'test'")
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer, name = script.optimizer_of([p], Run(1024, 8, "bf16"))
    assert name == "bitsandbytes AdamW8bit" and type(optimizer).__name__ == "AdamW8bit"
    assert script.optimizer_of([p], Run(1024, 8, "fp32"))[1] == "torch AdamW, states in fp32"


def test_the_weights_of_the_large_model_take_what_gpt_oss_120b_does():
    """Weights of gpt-oss-120b, without memory: experts in MXFP4, the rest in bf16."""
    register()
    model = script.packed_model(GptOssConfig(**LARGE), META)
    experts = [p for p in model.parameters() if isinstance(p, PackedParameter)]
    assert sum(p.numel() for p in experts) == 36 * 128 * 3 * 2880 * 2880
    resident = sum(script._bytes(p) for p in model.parameters())
    assert 60 * 2**30 < resident < 61.5 * 2**30


def test_experts_are_of_the_tiny_models_sizes():
    register()
    model = script.packed_model(GptOssConfig(**TINY), CPU)
    experts = model.model.layers[1].mlp.experts
    assert experts.gate_up_proj.packed.shape == (4, 128, 64) and experts.gate_up_proj.swapped
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("text", ["1000,8,bf16", "1024,8,fp16"])
def test_other_runs_are_refused(text):
    with pytest.raises(SystemExit, match="TOKENS,RANK,ADAPTERS"):
        Run.of(text)
