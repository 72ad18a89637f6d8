"""Whole checkpoints of Hugging Face models in the names of `MoE` and back."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import same_bits
from hf_models import small
from safetensors.torch import load_file, save_file

from sonicmoe import MoE
from sonicmoe.integrations.convert import (
    checkpoint_from_hf,
    checkpoint_to_hf,
    from_hf,
    load_checkpoint,
    moe_options,
)
from sonicmoe.integrations.convert.__main__ import main

FAMILIES = {
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "olmoe": "Olmoe",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {key: t for file in files for key, t in load_file(file).items()}


class Block(MoE):
    """In the place of a model's MoE block: returns the output alone, or what gpt-oss expects."""

    def forward(self, x):
        out = super().forward(x)
        return out if self.router.bias is not None else out[0]


def with_our_layers(model, **options) -> torch.nn.Module:
    """The model with `MoE` in place of its MoE layers, and other weights."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp = Block(**moe_options(model.config), **options)
    for t in model.state_dict().values():
        t.fill_(0.5)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_there_and_back(family, tmp_path):
    """In other shards, none larger than asked for: the same logits, then the same bits."""
    model = small(FAMILIES[family]).bfloat16().float().eval()
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    gate_up = "concatenated" if family in ("olmoe", "gpt_oss") else "interleaved"
    told = []

    def progress(*what):
        told.append(what)

    checkpoint_from_hf(
        tmp_path / "hf", tmp_path / "ours", gate_up=gate_up, shard_size=30000, progress=progress
    )
    layers = [n for n, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    assert [(done, of) for done, of, _ in told] == [(i, len(layers)) for i in range(len(layers))]
    ours = tensors(tmp_path / "ours")
    shards = [load_file(file) for file in (tmp_path / "ours").glob("*.safetensors")]
    sizes = [[t.nbytes for t in shard.values()] for shard in shards]
    assert all(sum(size) <= 30000 or len(size) == 1 for size in sizes) and len(sizes) > 1
    prefix = f"model.layers.{layers[-1]}.mlp."
    block = model.model.layers[layers[-1]].mlp.state_dict()
    converted = {prefix + key: t for key, t in from_hf(block, family, gate_up=gate_up).items()}
    same_bits({key: t for key, t in ours.items() if key.startswith(prefix)}, converted)

    other = with_our_layers(model, gate_up=gate_up)
    load_checkpoint(other, tmp_path / "ours")
    ids = torch.randint(1, 64, (2, 16))
    with torch.no_grad():
        want, got = model(ids).logits, other(ids).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * want.abs().max().item())

    checkpoint_to_hf(tmp_path / "ours", tmp_path / "back")
    same_bits(tensors(tmp_path / "back"), tensors(tmp_path / "hf"))
    for folder in ("ours", "back"):
        config = (tmp_path / folder / "config.json").read_bytes()
        assert config == (tmp_path / "hf" / "config.json").read_bytes()
    same_bits(type(model).from_pretrained(tmp_path / "back").state_dict(), model.state_dict())


def test_dtypes_are_kept_and_files_are_whole(tmp_path):
    """bf16 with a bias in fp32, one shard; transformers finds nothing to load in our folder."""
    model = small("DeepseekV3").bfloat16()
    model.model.layers[1].mlp.gate.e_score_correction_bias.data = torch.randn(8)
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "hf" / "pytorch_model.bin").touch()
    checkpoint_from_hf(tmp_path / "hf", tmp_path / "ours")
    names = {"config.json", "generation_config.json", "sonicmoe.safetensors", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names
    found = tensors(tmp_path / "ours")
    assert found["model.layers.1.mlp.routing.selection_bias"].dtype == torch.float32
    assert found["model.layers.1.mlp.c_fc.weight"].dtype == torch.bfloat16
    with pytest.raises(OSError, match=r"model.safetensors"):
        type(model).from_pretrained(tmp_path / "ours")
    checkpoint_to_hf(tmp_path / "ours", tmp_path / "back")
    same_bits(tensors(tmp_path / "back"), tensors(tmp_path / "hf"))


def mixtral(folder: Path, experts: int, hidden: int, intermediate: int, layers: int = 1) -> Path:
    """Layers of Mixtral, an embedding and a number, in a folder."""
    weights = {"model.embed_tokens.weight": torch.randn(8, hidden), "scale": torch.tensor(3.0)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}.block_sparse_moe."
        weights[f"{prefix}gate.weight"] = torch.randn(experts, hidden)
        for e in range(experts):
            for name in ("w1", "w2", "w3"):
                sizes = (hidden, intermediate) if name == "w2" else (intermediate, hidden)
                weights[f"{prefix}experts.{e}.{name}.weight"] = torch.randn(sizes)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the peak of memory")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """32 layers of 1 MiB are converted, and back; the process grows by less than a third."""
    source = mixtral(tmp_path / "hf", experts=8, hidden=128, intermediate=85, layers=32)
    assert (source / "model.safetensors").stat().st_size > 30 * 2**20

    def peak_mib():
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    checkpoint_from_hf(source, tmp_path / "first", shard_size=2**20)  # imports, and pools of memory
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far becomes what is held now
    before = peak_mib()
    checkpoint_from_hf(source, tmp_path / "ours", shard_size=2**20)
    checkpoint_to_hf(tmp_path / "ours", tmp_path / "back", shard_size=2**20)
    assert peak_mib() - before < 10
    same_bits(tensors(tmp_path / "back"), tensors(source))


def test_command(tmp_path, capsys):
    source = mixtral(tmp_path / "hf", experts=4, hidden=16, intermediate=8)
    main(["from_hf", str(source), str(tmp_path / "ours"), "--gate-up", "concatenated"])
    assert "0/1 model.layers.0.block_sparse_moe" in capsys.readouterr().err
    main(["to_hf", str(tmp_path / "ours"), str(tmp_path / "back")])
    same_bits(tensors(tmp_path / "back"), tensors(source))
    with pytest.raises(SystemExit) as stop:
        main(["from_hf", str(source), str(tmp_path / "ours")])
    assert stop.value.code == 1 and "target: expected a new folder" in capsys.readouterr().err


def test_what_cannot_be_converted(tmp_path):
    source = mixtral(tmp_path / "hf", experts=4, hidden=16, intermediate=8)
    weights = load_file(source / "model.safetensors")

    def refused(match, changed, config='{"model_type": "mixtral"}'):
        save_file(changed, source / "model.safetensors")
        (source / "config.json").write_text(config)
        with pytest.raises(ValueError, match=match):
            checkpoint_from_hf(source, tmp_path / "ours")
        assert {path.name for path in tmp_path.iterdir()} == {"hf"}  # nothing is left behind

    key = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    without = {name: t for name, t in weights.items() if name != key}
    refused(r"block_sparse_moe: state_dict: expected a key experts\.3\.w2\.weight", without)
    more = {**weights, key.replace("weight", "weight_scale_inv"): torch.ones(1)}
    refused("only the weights of one layer of mixtral, got 1 more", more)
    refused("expected one of BF16, F16, F32, F64, got F8_E4M3", {key: torch.zeros(1).to(
        torch.float8_e4m3fn)})  # fmt: skip
    for name in ("w1", "w2", "w3"):  # would become a dtype that is not that of every expert
        other = key.replace("w2", name)
        refused("block_sparse_moe: state_dict: expected experts of one dtype, got torch.bfloat16 "
                "and torch.float32", {**weights, other: weights[other].bfloat16()})  # fmt: skip
    refused("a checkpoint of mixtral with MoE layers", {"lm_head.weight": torch.ones(2)})
    fused = {"model.layers.1.mlp.experts.gate_up_proj": torch.ones(4, 16, 16)}
    refused("source: expected MoE layers that are stored alike", weights | fused)
    refused("family: expected one of mixtral", weights, '{"model_type": "llama"}')
    (source / "config.json").unlink()
    with pytest.raises(ValueError, match=r"a folder with config\.json"):
        checkpoint_from_hf(source, tmp_path / "ours")
    with pytest.raises(ValueError, match=r"a folder with sonicmoe\.safetensors or sonicmoe\.safe"):
        checkpoint_to_hf(source, tmp_path / "ours")
    data = (source / "model.safetensors").read_bytes()
    (source / "config.json").write_text('{"model_type": "mixtral"}')
    for cut in (5, 100, len(data) - 1):
        (source / "model.safetensors").write_bytes(data[:cut])
        with pytest.raises(ValueError, match="source: expected"):
            checkpoint_from_hf(source, tmp_path / "ours")
        assert {path.name for path in tmp_path.iterdir()} == {"hf"}
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="the file model-00001-of-00002"):
        checkpoint_from_hf(source, tmp_path / "ours")


def test_a_model_that_does_not_fit_is_not_filled(tmp_path):
    model = small("Mixtral").eval()
    model.save_pretrained(tmp_path / "hf")
    checkpoint_from_hf(tmp_path / "hf", tmp_path / "ours")
    other = with_our_layers(model)
    before = copy.deepcopy(other.state_dict())

    def refused(match, changed):
        with pytest.raises(ValueError, match=match):
            load_checkpoint(changed, tmp_path / "ours")

    refused("gate_up of model.layers.0.mlp: expected 'interleaved'", with_our_layers(
        model, gate_up="concatenated"))  # fmt: skip
    refused(r"only in the model model\.layers\.0\.mlp\.gate\.weight, .*, …, only in the", model)
    refused("expected a tensor with data, not sharded", with_our_layers(model).to("meta"))
    smaller = with_our_layers(small("Mixtral", vocab_size=60))
    refused(r"weight: expected shape \(64, 32\), got \(60, 32\)", smaller)
    same_bits(other.state_dict(), before)


def test_tied_weights_and_a_number(tmp_path):
    model = small("Olmoe", tie_word_embeddings=True).eval()
    model.register_parameter("number", torch.nn.Parameter(torch.tensor(3.0)))
    model.save_pretrained(tmp_path / "hf")
    checkpoint_from_hf(tmp_path / "hf", tmp_path / "ours")
    assert "lm_head.weight" not in tensors(tmp_path / "ours")
    other = with_our_layers(model)
    other.tie_weights()
    load_checkpoint(other, tmp_path / "ours")
    assert other.number == 3
    ids = torch.randint(1, 64, (2, 16))
    torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
