"""The benchmarks of packed weights, as far as a CPU runs them."""

import json
import sys
import time

import pytest
import torch

pytest.importorskip("peft", reason="comes with the extra 'test'")

import packed_model as script
import packed_peers as peers
from packed_model import MODELS, WAYS, GptOssConfig, Run
from packed_random import FORMATS, random_packed
from research import packed_candidates as script_candidates
from research import packed_peers as of_folder
from research.packed_layer import Layer

from sonicmoe.bench.results import read
from sonicmoe.integrations.packed_parameter import PackedParameter
from sonicmoe.integrations.transformers import register

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("format", FORMATS)
def test_random_weights_are_near_one_over_root_k(format):
    w = random_packed(format, (2, 256, 1024), "cpu").dequantize().float()
    assert 0.2 < w.std() * 1024**0.5 < 5 and w.isfinite().all()


# --- a whole model --------------------------------------------------------------------------------
def test_a_tiny_model_trains_its_adapters(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "CONTEXT", 64)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)  # absent
    options = ["--model", "tiny", "--runs", "128,8,bf16", "64,4,fp32"]
    script.main([*options, "--peers", "folder", "--results", str(tmp_path)])
    told = capsys.readouterr()
    first, second = map(json.loads, told.out.splitlines())
    assert read(tmp_path) == [first, second]
    words = "python benchmarks/packed_model.py"
    assert first["command"] == " ".join([words, *options, "--peers", "FOLDER"])
    assert "no 8-bit Adam (" in told.err
    assert first["optimizer"].startswith("torch AdamW, states in bf16")
    assert second["optimizer"].startswith("torch AdamW, states in fp32")
    # r·E rows of A and columns of B for W1 (128, 64) and W2 (64, 64), in two layers.
    trained = 2 * 4 * (64 + 128 + 64 + 64)
    assert (first["trained"], second["trained"]) == (8 * trained, 4 * trained)
    for record in (first, second):
        assert (record["model"], record["way"]) == ("tiny", "ours to bf16")
        assert len(record["losses"]) == script.STEPS
        assert record["losses"][-1] < record["losses"][0]


def run_ways(tmp_path, *ways):
    given = ["--model", "tiny", "--ways", *(ways or ["all"]), "--runs", "128,8,fp32"]
    script.main([*given, "--results", str(tmp_path)])
    return read(tmp_path)


def test_every_way_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(script, "CONTEXT", 64)
    found = run_ways(tmp_path)
    assert [record["way"] for record in found] == list(WAYS)
    assert len({record["trained"] for record in found}) == 1
    first, in_fp8, dense, _ = (record["difference"] for record in found)
    assert first == dense == 0 and in_fp8 > 0.05


def test_in_fp32_every_way_has_the_same_gradients(monkeypatch, tmp_path):
    monkeypatch.setattr(script, "CONTEXT", 64)
    monkeypatch.setattr(script, "DTYPE", torch.float32)
    found = run_ways(tmp_path, "ours to bf16", "ours on bf16", "PEFT on bf16")
    assert all(record["difference"] < 1e-5 for record in found)


def is_refused(way, tmp_path):
    with pytest.raises(SystemExit, match=rf"{way}: gradients differ by \d"):
        run_ways(tmp_path)
    assert way not in {record["way"] for record in read(tmp_path)}


@pytest.mark.parametrize("part", ["lora_B", "base_layer"])  # the latter is the inner of two weights
def test_a_way_without_some_gradients_is_refused(part, monkeypatch, tmp_path):
    adapted = script.with_adapters

    def without(model, way, *given):
        tuned = adapted(model, way, *given)
        for name, p in tuned.named_parameters():
            if p.requires_grad and not way.by_us and part in name.partition("experts")[2]:
                p.register_hook(torch.zeros_like)
        return tuned

    monkeypatch.setattr(script, "CONTEXT", 64)
    monkeypatch.setattr(script, "with_adapters", without)
    is_refused("PEFT on bf16", tmp_path)


def test_a_way_with_a_transposed_weight_is_refused(monkeypatch, tmp_path):
    decode = script.dequantize_experts

    def transposed(module):
        decode(module)
        if "down_proj" in module._parameters:  # as many rows as columns
            module.down_proj.data = module.down_proj.data.mT.contiguous()

    monkeypatch.setattr(script, "CONTEXT", 64)
    monkeypatch.setattr(script, "dequantize_experts", transposed)
    is_refused("ours on bf16", tmp_path)


def test_other_ways_are_refused():
    with pytest.raises(SystemExit, match=r"--ways: expected some of ours to bf16, .* got theirs"):
        script.main(["--ways", "theirs"])


def test_adam_in_8_bits_if_it_is_there():
    pytest.importorskip("bitsandbytes", reason="comes with the extra 'test'")
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer, name = script.optimizer_of([p], Run(1024, 8, "bf16"))
    assert name == "bitsandbytes AdamW8bit" and type(optimizer).__name__ == "AdamW8bit"
    assert script.optimizer_of([p], Run(1024, 8, "fp32"))[1] == "torch AdamW, states in fp32"


def test_the_weights_of_the_large_model_take_what_gpt_oss_120b_does():
    """Weights of gpt-oss-120b, without memory: experts in MXFP4, the rest in bf16."""
    register()
    config = GptOssConfig(**MODELS["gpt-oss-120b"])
    model = script.frozen_model(config, WAYS["ours to bf16"], META)
    experts = [p for p in model.parameters() if isinstance(p, PackedParameter)]
    assert sum(p.numel() for p in experts) == 36 * 128 * 3 * 2880 * 2880
    resident = sum(script._bytes(p) for p in model.parameters())
    assert 60 * 2**30 < resident < 61.5 * 2**30


def test_experts_are_of_the_tiny_models_sizes():
    register()
    model = script.frozen_model(GptOssConfig(**MODELS["tiny"]), WAYS["ours to bf16"], CPU)
    experts = model.model.layers[1].mlp.experts
    assert experts.gate_up_proj.packed.shape == (4, 128, 64) and experts.gate_up_proj.swapped
    assert not any(p.requires_grad for p in model.parameters())
    model = script.frozen_model(GptOssConfig(**MODELS["tiny"]), WAYS["PEFT on bf16"], CPU)
    weight = model.model.layers[1].mlp.experts.gate_up_proj
    assert type(weight) is torch.nn.Parameter and weight.dtype == torch.bfloat16
    assert weight.shape == (4, 64, 128) and not weight.requires_grad


@pytest.mark.parametrize("text", ["1000,8,bf16", "1024,8,fp16"])
def test_other_runs_are_refused(text):
    with pytest.raises(SystemExit, match="TOKENS,RANK,ADAPTERS"):
        Run.of(text)


# --- beside other packages ------------------------------------------------------------------------
def layers():
    return [Layer((128, 64, 4, 2)), Layer((128, 64, 4, 2), like_gpt_oss=True)]


def with_outliers(inputs):
    """A token, a channel and a row of an adapter that are 30 times as large as the others."""
    with torch.no_grad():
        inputs.x[3] *= 30
        inputs.x[:, 5] *= 30
        inputs.lora1.b[7] *= 30
    return inputs


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("layer", layers(), ids=["qwen", "gpt-oss"])
@pytest.mark.parametrize("format", ["mxfp4", "nf4"])
def test_every_candidate_without_other_files_is_right(format, layer, outliers):
    if format == "nf4":
        pytest.importorskip("bitsandbytes", reason="comes with the extra 'test'")
    bench = peers.Bench(layer, format, 24, None, CPU, {})
    if outliers:  # which activations in e4m3 round more
        with_outliers(bench.inputs)
        del bench.makers["ours to e4m3"]
    bench.make()
    found = bench.check()
    assert not bench.failed and found.keys() == bench.makers.keys() and len(found) == 6 - outliers
    # PEFT rounds W + B·A to bf16, which outliers in B show.
    limits = {"ours to e4m3": 0.1, "PEFT on bf16, decoded before": 0.03}
    for label, of in found.items():
        assert max(of.values()) < limits.get(label, 0.015), label


def test_a_wrong_candidate_is_named_and_not_timed():
    bench = peers.Bench(layers()[0], "mxfp4", 24, None, CPU, {})
    decode = script_candidates.by_transformers

    def twice(inputs, weights):
        return script_candidates.decoded_for_ours(inputs, weights, lambda w: 1.05 * decode(w))

    def without_gradient(inputs, weights):
        lora2 = inputs.lora2._replace(b=inputs.lora2.b.detach())
        return script_candidates.ours(inputs._replace(lora2=lora2), weights)

    def broken(inputs, weights):
        raise ImportError("no such package")

    bench.makers |= {"twice": twice, "none": without_gradient, "broken": broken}
    bench.make()
    bench.check()
    assert bench.failed.keys() == {"twice", "none", "broken"}
    assert "out" in bench.failed["twice"] and bench.failed["none"] == "wrong: dB2"
    assert bench.failed["broken"] == "ImportError: no such package"
    assert bench.found.keys() == bench.makers.keys() - bench.failed.keys()


def test_a_candidate_that_compiles_for_ever_is_left_out(monkeypatch):
    def endless(inputs, weights):
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(peers, "SECONDS", 0.2)
    bench = peers.Bench(layers()[0], "mxfp4", 24, None, CPU, {})
    bench.makers = {"endless": endless}
    bench.make()
    assert bench.failed == {"endless": "TimeoutError: not done after 0.2 s"} and not bench.found


def test_experts_of_bitsandbytes_under_peft_are_reported():
    """PEFT 0.21.2 adds its adapter once more in every call, or raises in the second."""
    pytest.importorskip("bitsandbytes", reason="comes with the extra 'test'")
    bench = peers.Bench(layers()[0], "nf4", 24, None, CPU, {})
    bench.makers = {"PEFT": of_folder.peft_on_bitsandbytes}
    bench.make()
    bench.check()
    assert "PEFT" in bench.failed


def test_what_is_not_in_the_folder_is_left_out(tmp_path, capsys):
    bench = peers.Bench(layers()[0], "mxfp4", 24, tmp_path, CPU, {})
    bench.make()
    absent = {label for label in bench.makers if "unsloth" in label or "axolotl" in label}
    assert bench.failed.keys() == absent and len(absent) == 3
    assert capsys.readouterr().err.count("left out: ") == 3


@pytest.fixture
def timed(monkeypatch):
    """The steps in the order in which the script times them, on the CPU."""
    names = ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated", "empty_cache")
    for name in names:
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    order = []
    monkeypatch.setattr(peers, "_milliseconds", lambda run: order.append(run) or 2.0)
    monkeypatch.setitem(peers.LAYERS, "tiny", layers()[0])
    return order


ARGUMENTS = "--device cpu --layers tiny --formats mxfp4 --tokens 24 16 --rounds 2"


def test_the_script_keeps_a_line_for_each_layer_format_and_length(monkeypatch, tmp_path, timed):
    started = []
    monkeypatch.setattr(peers, "compile_in_parallel", lambda *args: started.append(args))
    peers.main([*ARGUMENTS.split(), "--results", str(tmp_path)])
    assert started == [(["tiny"], ["mxfp4"], ["--tokens", "24", "16"])]
    records = read(tmp_path)
    assert [r["tokens"] for r in records] == [24, 16]
    assert [len(r["errors"]) for r in records] == [6, 0]  # fp64 once
    assert all(r["not timed"] == {} and len(r["ms"]) == 6 for r in records)
    assert timed[:6] == timed[6:12][::-1]  # interleaved, in turn from both ends


def test_what_is_wrong_once_is_timed_at_no_length(monkeypatch, tmp_path, timed):
    monkeypatch.setattr(peers, "compile_in_parallel", lambda *args: None)
    plain = script_candidates.by_transformers
    monkeypatch.setattr(script_candidates, "by_transformers", lambda w: 1.05 * plain(w))
    peers.main([*ARGUMENTS.split(), "--results", str(tmp_path)])
    for record in read(tmp_path):
        assert record["ms"].keys() == {"ours to bf16", "ours to e4m3"}
        assert len(record["not timed"]) == 4
