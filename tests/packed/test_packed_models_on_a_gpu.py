"""Models whose experts stay packed on the way to a GPU: memory, logits, gradients of the input."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="comes with the extra 'test'")

import packed_checkpoints
import transformers
from packed_checkpoints import write

from sonicmoe.integrations.packed_parameter import PackedParameter, dequantize_experts
from sonicmoe.integrations.transformers import register

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "fp8_e8m0", "int4", "dense", "dense_swapped"])
def test_packed_on_the_gpu(kind, tmp_path):
    options = {}
    if kind == "int4":
        pytest.importorskip("compressed_tensors", reason="comes with the extra 'test'")
    if kind.startswith("dense"):
        pytest.importorskip("bitsandbytes", reason="comes with the extra 'test'")
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            llm_int8_skip_modules=["self_attn", "lm_head"],
        )
    register()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        write(kind, tmp_path),
        experts_implementation="sonicmoe_experts",
        device_map="cuda",
        **options,
    )
    packed = [p for p in model.parameters() if isinstance(p, PackedParameter)]
    assert len(packed) == 4 and all(p.packed.device.type == "cuda" for p in packed)
    dense = copy.deepcopy(model)
    assert dequantize_experts(dense) == 4
    x = torch.randn(2, 16, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    results = []
    for m in (model, dense):
        given = x.clone().requires_grad_()
        logits = m(inputs_embeds=given).logits
        logits.backward(torch.ones_like(logits))
        results.append((logits.detach(), given.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_no_dense_weight_while_loading(tmp_path, monkeypatch):
    """Experts of 26 MiB in MXFP4, 96 MiB in 16 bits: the peak stays near the first."""
    sizes = dict(hidden_size=1024, intermediate_size=1024, num_local_experts=8)
    config = packed_checkpoints.gpt_oss(**sizes)
    monkeypatch.setattr(packed_checkpoints, "gpt_oss", lambda: config)
    path = write("mxfp4", tmp_path)
    register()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, experts_implementation="sonicmoe_experts", device_map="cuda"
    )
    weights = [p for p in model.parameters() if isinstance(p, PackedParameter)]
    kept = sum(t.nbytes for p in weights for _, t in p.packed.tensors())
    others = sum(p.nbytes for p in model.parameters() if not isinstance(p, PackedParameter))
    dense = sum(p.numel() * 2 for p in weights)
    assert kept == dense * 17 // 64
    peak = torch.cuda.max_memory_allocated() - before
    assert kept + others <= peak < 1.25 * (kept + others) + 2**20 < dense
