"""`sonicmoe.watch`: the rows of each expert, counted while a model trains."""

import copy
import io
import json
import math
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sonicmoe
from sonicmoe import MoE
from sonicmoe.routing import ROUTERS, TopK
from sonicmoe.watch import JsonLines, Load, TensorBoard, Wandb, summary


class Plain(MoE):
    def forward(self, x):
        return super().forward(x)[0]


def two_layers(**options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Plain(8, 2, 16, 8, **options) for _ in range(2)))


def chosen(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    return moe.router(x).topk(moe.top_k).indices.flatten().bincount(minlength=moe.num_experts)


def test_rows_of_each_layer_over_several_passes():
    model, want = two_layers(), torch.zeros(2, 8, dtype=torch.int64)
    watch = sonicmoe.watch(model)
    for tokens in (40, 7, 0):
        x = torch.randn(tokens, 16)
        want[0] += chosen(model[0], x)
        want[1] += chosen(model[1], copy.deepcopy(model[0])(x))
        model(x).sum().backward()
    loads = watch.read()
    assert list(loads) == ["0", "1"]
    assert torch.equal(torch.stack([load.rows for load in loads.values()]), want)
    assert all(not load.rows.any() for load in watch.read().values())  # a new interval
    watch.close()
    model(torch.randn(40, 16))
    assert all(not load.rows.any() for load in watch.read().values())


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router(router):
    moe = MoE(8, 2, 16, 8, router=router)
    seen = []
    moe.routing.register_forward_hook(lambda module, args, routing: seen.append(routing.counts()))
    watch = sonicmoe.watch(moe)
    moe(torch.randn(300, 16))
    (load,) = watch.read().values()
    assert torch.equal(load.rows, seen[0].long()) and load.rows.sum() > 0


def test_numbers():
    load = Load(torch.tensor([6, 0, 3, 3]))
    assert load.violation == 1.0 and load.dead == [1]
    assert load.entropy == pytest.approx(1.5 * math.log(2) / math.log(4))
    even = Load(torch.full((8,), 5))
    assert (even.violation, even.dead, even.entropy) == (0.0, [], pytest.approx(1.0))
    one = Load(torch.tensor([9, 0, 0]))
    assert (one.violation, one.dead, one.entropy) == (2.0, [1, 2], 0.0)
    nothing = Load(torch.zeros(4, dtype=torch.int64))
    assert (nothing.violation, nothing.dead, nothing.entropy) == (0.0, [0, 1, 2, 3], 1.0)


def test_layers_that_share_a_router_count_their_own_rows():
    model, x = two_layers(router=TopK(8, 2)), torch.randn(40, 16)
    model.append(model[0])  # and one layer that runs twice
    want = [chosen(model[0], x), chosen(model[1], model[0](x))]
    want[0] += chosen(model[0], model[1](model[0](x)))
    watch = sonicmoe.watch(model)
    model(x)
    assert [load.rows.tolist() for load in watch.read().values()] == [w.tolist() for w in want]


@pytest.mark.parametrize("kind", ["MoE", "Qwen3Moe"])
def test_a_watched_model_can_be_copied_and_saved(tmp_path, kind):
    """The copies compute the same and are not watched; the model itself still is."""
    model = Plain(8, 2, 16, 8) if kind == "MoE" else hugging_face(kind)
    x = torch.randn(10, 16) if kind == "MoE" else torch.randint(1, 64, (1, 10))
    watch = sonicmoe.watch(model, JsonLines(tmp_path / "load.jsonl"), every=1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    want = model(x)
    rows = [load.rows for load in watch.step().values()]
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        got = other(x)
        pairs = [(got, want)] if kind == "MoE" else [(got.logits, want.logits)]
        assert all(torch.equal(a, b) for a, b in pairs)
    assert not any(load.rows.any() for load in watch.read().values())
    model(x)
    assert all(torch.equal(a, b.rows) for a, b in zip(rows, watch.read().values(), strict=True))
    watch.close()


def test_a_checkpoint_counts_once():
    moe, x = MoE(8, 2, 16, 8), torch.randn(40, 16, requires_grad=True)
    watch = sonicmoe.watch(moe)
    out, aux_loss = checkpoint(moe, x, use_reentrant=False)
    (out.square().sum() + aux_loss).backward()
    (load,) = watch.read().values()
    assert load.rows.sum() == 80


def test_the_layer_computes_the_same():
    plain, x = two_layers(), torch.randn(40, 16)
    watched = copy.deepcopy(plain)
    sonicmoe.watch(watched)
    for model in (plain, watched):
        model(x).square().sum().backward()
    pairs = zip(plain.parameters(), watched.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_compiled():
    moe, x = MoE(8, 2, 16, 8), torch.randn(40, 16)
    watch = sonicmoe.watch(moe)
    moe(x)  # the counters exist before the graph does
    compiled = torch.compile(moe, backend="eager", fullgraph=True)
    compiled(x)
    compiled(x)
    (load,) = watch.read().values()
    assert torch.equal(load.rows, 3 * chosen(moe, x))


@pytest.mark.parametrize("compiled", [False, True])
def test_inference_mode_before_and_after_training(compiled):
    layer, x = MoE(4, 2, 16, 8), torch.randn(10, 16)
    watch = sonicmoe.watch(layer)
    model = torch.compile(layer, backend="eager") if compiled else layer
    for _ in range(2):
        with torch.inference_mode():
            model(x)
        model(x)[0].sum().backward()
        assert int(watch.read()["MoE"].rows.sum()) == 2 * 2 * 10


def test_nothing_waits_for_the_device_in_the_step():
    """On the meta device every read of a value is an error."""
    with torch.device("meta"):
        moe, logits = MoE(8, 2, 16, 8), torch.randn(40, 8)
    watch = sonicmoe.watch(moe, every=2)
    moe.routing(logits)
    moe.routing(logits)
    assert watch.step() is None
    (rows,) = watch._rows.values()
    assert rows.is_meta and rows.shape == (8,)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu_in_the_step():
    moe, x = MoE(8, 2, 64, 32).cuda().bfloat16(), torch.randn(256, 64).cuda().bfloat16()
    watch = sonicmoe.watch(moe)
    moe(x)[0].sum().backward()  # compiles
    watch.read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            moe(x)[0].sum().backward()
            watch.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (load,) = watch.read().values()
    assert torch.equal(load.rows, 3 * chosen(moe, x).cpu())


# --- transformers ---------------------------------------------------------------------------------
def hugging_face(name: str):
    transformers = pytest.importorskip("transformers", reason="comes with the extra 'test'")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16}
    sizes |= {"moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 16}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "sonicmoe_experts"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Olmoe", "GptOss"])
def test_transformers(name, implementation):
    from sonicmoe.integrations.transformers import register

    register()
    model = hugging_face(name)
    model.set_experts_implementation(implementation)
    watch = sonicmoe.watch(model)
    ids = torch.randint(64, (2, 16))
    logits = model(input_ids=ids, output_router_logits=True).router_logits
    loads = watch.read()
    assert len(loads) == len(logits) == 2
    for load, layer in zip(loads.values(), logits, strict=True):
        k = model.config.num_experts_per_tok
        want = layer.topk(k).indices.flatten().bincount(minlength=layer.shape[1])
        assert torch.equal(load.rows, want)
    assert all("layers." in layer for layer in loads)


FFN = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
ATTENTION = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}
OTHERS: dict[str, dict[str, Any]] = {
    "Llama4Text": {"num_local_experts": 4, "interleave_moe_layer_step": 1, "pad_token_id": 0},
    "Dbrx": {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 32},
    "JetMoe": {"num_local_experts": 4, "num_key_value_heads": 1, "kv_channels": 16},
    "LongcatFlash": {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "num_layers": 2},
}
OTHERS["Llama4Text"] |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size_mlp": 16}
OTHERS["Dbrx"] |= {"ffn_config": FFN, "attn_config": ATTENTION}
SAYS = {  # the rows of each expert, in what the router returns
    "Llama4Router": lambda output: (output[0] > 0).sum(0).tolist(),
    "JetMoeTopKGating": lambda output: output[3],
}


@pytest.mark.parametrize("name", OTHERS)
def test_transformers_without_the_experts_interface(name):
    """Each layer counts K rows a token, and what Llama-4's and JetMoE's routers say they chose."""
    transformers = pytest.importorskip("transformers", reason="comes with the extra 'test'")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "num_experts_per_tok": 2}
    sizes = (sizes if name != "Dbrx" else {}) | {"vocab_size": 64} | OTHERS[name]
    config = getattr(transformers, f"{name}Config")(**sizes)
    model, said = transformers.AutoModelForCausalLM.from_config(config), {}

    def note(path, module, args, output):
        said[path] = SAYS[type(module).__name__](output)

    for path, module in model.named_modules():
        if type(module).__name__ in SAYS:
            module.register_forward_hook(partial(note, path))
    watch = sonicmoe.watch(model)
    model(input_ids=torch.randint(1, 64, (2, 16)))
    loads = watch.read()
    assert {int(load.rows.sum()) for load in loads.values()} == {2 * 2 * 16}
    assert all(loads[path].rows.tolist() == rows for path, rows in said.items())
    assert bool(said) == (name in ("Llama4Text", "JetMoe"))


def test_gradient_checkpointing_of_transformers():
    model = hugging_face("Qwen3Moe").train()
    model.gradient_checkpointing_enable()
    watch = sonicmoe.watch(model)
    ids = torch.randint(64, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    assert [int(load.rows.sum()) for load in watch.read().values()] == [64, 64]


# --- steps and writers ----------------------------------------------------------------------------
def test_json_lines_every_few_steps(tmp_path):
    model, path = two_layers(), tmp_path / "load.jsonl"
    with sonicmoe.watch(model, JsonLines(path), every=2) as watch:
        read = []
        for _ in range(5):
            model(torch.randn(10, 16))
            read.append(watch.step())
    assert [bool(loads) for loads in read] == [False, True, False, True, False]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["layer"]) for r in records] == [(2, "0"), (2, "1"), (4, "0"), (4, "1")]
    assert all(sum(r["rows"]) == 2 * 10 * 2 for r in records)
    assert set(records[0]) == {"step", "layer", "rows", "violation", "dead", "entropy"}


def test_writers_are_found_where_one_looks():
    """`sonicmoe.watch` is a function, and also the name of the module."""
    assert sonicmoe.watch.JsonLines is JsonLines and sonicmoe.watch.Wandb is Wandb
    assert sonicmoe.watch.TensorBoard is TensorBoard


def test_json_lines_makes_the_folder(tmp_path):
    JsonLines(tmp_path / "new" / "folder" / "load.jsonl").close()
    assert (tmp_path / "new" / "folder" / "load.jsonl").exists()


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="comes with the extra 'train'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    moe = MoE(8, 2, 16, 8)
    with sonicmoe.watch(moe, TensorBoard(tmp_path), every=1) as watch:
        moe(torch.randn(10, 16))
        (load,) = watch.step().values()
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Scalars("load/MoE/violation")
    assert event.step == 1 and event.value == pytest.approx(load.violation)
    assert events.Tags()["histograms"] == ["load/MoE/rows"]


def test_wandb():
    """Over an axis of its own: a step that W&B has passed would be dropped."""
    logged, axes = [], {}

    class Run:
        def log(self, values):
            logged.append(values)

        def define_metric(self, names, step_metric):
            axes[names] = step_metric

    moe = MoE(8, 2, 16, 8)
    with sonicmoe.watch(moe, Wandb(Run()), every=1) as watch:
        for _ in range(2):
            moe(torch.randn(10, 16))
            watch.step()
    assert [values["load/step"] for values in logged] == [1, 2] and axes == {"load/*": "load/step"}
    names = {"load/MoE/violation", "load/MoE/dead", "load/MoE/entropy"}
    assert all(set(values) == {"load/step", *names} for values in logged)


def test_summary_of_all_layers():
    loads = {"a": Load(torch.tensor([6, 0, 3, 3])), "b": Load(torch.full((4,), 5))}
    entropy = 1.5 * math.log(2) / math.log(4)
    want = {"load/max_violation": 1.0, "load/dead": 1.0, "load/min_entropy": entropy}
    assert summary(loads) == pytest.approx(want)


def test_layers_that_peft_wraps_count_once():
    peft = pytest.importorskip("peft", reason="comes with the extra 'test'")
    config = peft.LoraConfig(r=4, target_parameters=["experts.gate_up_proj"])
    model = peft.get_peft_model(hugging_face("Mixtral"), config)
    watch = sonicmoe.watch(model)
    model(input_ids=torch.randint(1, 64, (1, 10)))
    assert [int(load.rows.sum()) for load in watch.read().values()] == [20, 20]


def test_missing_packages_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match="pip install 'wandb'"):
        Wandb()
    with pytest.raises(ImportError, match="pip install 'tensorboard'"):
        TensorBoard(tmp_path)


def test_all_reduce_sees_every_layer_at_once():
    model, calls = two_layers(), []

    def twice(rows):
        calls.append(rows.shape)
        return 2 * rows

    watch = sonicmoe.watch(model, all_reduce=twice)
    model(torch.randn(10, 16))
    assert [int(load.rows.sum()) for load in watch.read().values()] == [40, 40]
    assert calls == [(16,)]


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="model: expected a model with"):
        sonicmoe.watch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="every: expected an integer of at least 1"):
        sonicmoe.watch(MoE(4, 2, 16, 8), every=0)
    with pytest.raises(ValueError, match="model: expected a model with"):
        sonicmoe.watch("model")
    with pytest.raises(ValueError, match="writers: expected functions of a step"):
        sonicmoe.watch(MoE(4, 2, 16, 8), "load.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="path: expected a folder"):
        JsonLines(tmp_path / "file" / "load.jsonl")
