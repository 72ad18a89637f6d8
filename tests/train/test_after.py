"""What is done with trained models: generate, export, compare; and plan."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
import torch

from sonicmoe.bench.results import read
from sonicmoe.cli import main
from sonicmoe.train import export, generate, plan
from sonicmoe.train.config import ModelConfig
from sonicmoe.train.hardware import gpu, recognise
from sonicmoe.train.model import Decoder


def test_generate_continues_the_prompt(trained, capsys):
    arguments = ["generate", str(trained[0]), "--prompt", "The old sailor", "--tokens", "60",
                 "--device", "cpu"]  # fmt: skip
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert first.startswith("The old sailor")
    assert len(first) > 60
    main(arguments)
    assert capsys.readouterr().out == first  # the same seed
    main([*arguments, "--seed", "1"])
    assert capsys.readouterr().out != first
    for flag, value in (
        ("top-p", "0"), ("top-p", "nan"), ("top-p", "1.5"), ("temperature", "nan"),
        ("temperature", "inf"), ("temperature", "-1"), ("tokens", "0"), ("seed", str(2**80)),
    ):  # fmt: skip
        assert main([*arguments, f"--{flag}", value]) == 2
        assert f"generate: {flag.replace('-', '_')}: expected" in capsys.readouterr().err


def test_generation_goes_on_past_the_context():
    model = Decoder(ModelConfig(num_layers=1, context=16)).eval()
    ids = generate.continue_ids(model, [1, 2, 3], 40, temperature=0, top_p=1.0, seed=0)
    assert len(ids) == 43


@pytest.mark.parametrize("prompt", [3, 16, 20])
def test_generation_reads_no_more_than_the_context(prompt):
    model, seen = Decoder(ModelConfig(num_layers=1, context=16)).eval(), []

    def note(module, args, kwargs):
        (past,) = kwargs["cache"]
        seen.append(args[0].shape[1] + (0 if past is None else past[0].shape[2]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    generate.continue_ids(model, [1] * prompt, 40, temperature=0, top_p=1.0, seed=0)
    assert len(seen) == 40 and seen[0] == min(prompt, 16)
    assert max(seen) == 16 and min(seen[20:]) == 8


def test_top_p_keeps_the_token_that_crosses_it():
    logits, random = torch.tensor([0.2, 0.5, 0.3]).log(), torch.Generator().manual_seed(0)
    for top_p, expected in ((0.4, {1}), (0.6, {1, 2}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2})):
        drawn = {generate._draw(logits, 1.0, top_p, random) for _ in range(60)}
        assert drawn == expected, top_p


@pytest.mark.parametrize("router", ["softmax_over_topk", "topk_over_softmax"])
def test_exported_models_give_the_same_logits(trained, tmp_path, router):
    transformers = pytest.importorskip("transformers")
    run_folder, _ = trained
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("checkpoints", "tokenizer.json"):
        (folder / name).symlink_to(run_folder / name)
    record = json.loads((run_folder / "run.json").read_text())
    record["config"]["model"]["router"] = router
    (folder / "run.json").write_text(json.dumps(record))

    assert main(["export", str(folder), str(tmp_path / "hf")]) == 0
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ours = generate.load_model(folder, torch.device("cpu"))
    ids = torch.randint(0, ours.config.vocab_size, (3, 32), generator=torch.manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(ids).logits, ours(ids), atol=2e-5, rtol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.decode(tokenizer("The river divides").input_ids) == "The river divides"


def test_export_does_not_write_over_anything(trained, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="empty folder"):
        export.export(trained[0], tmp_path)


def test_compare_makes_a_picture_and_a_table(tiny, text_folder, cache, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    shape = {k: v for k, v in tiny.to_dict()["model"].items() if k != "router"}
    settings = {**shape, "steps": 8, "batch": 4, "validation_fraction": 0.2, "log_every": 1,
                "validate_every": 4, "validation_sequences": 8, "tensorboard": "no"}  # fmt: skip
    pairs = [x for k, v in settings.items() for x in ("--set", f"{k}={v}")]
    status = main(["compare", "--device", "cpu", "--data", str(text_folder), "--cache", str(cache),
                   "--runs", str(tmp_path), "--routers", "softmax_over_topk,topk_over_softmax",
                   *pairs])  # fmt: skip
    assert status == 0
    folder = tmp_path / "compare-demo"
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((folder / "compare.json").read_text())
    assert list(results) == ["softmax_over_topk", "topk_over_softmax"]
    out = capsys.readouterr().out
    assert "validation loss" in out
    assert "topk_over_softmax" in (folder / "compare.md").read_text()


def test_compare_refuses_unknown_backends(tmp_path, capsys):
    arguments = ["compare", "--device", "cpu", "--runs", str(tmp_path)]
    assert main([*arguments, "--backends", "abacus"]) == 2
    assert "grouped_mm" in capsys.readouterr().err
    assert main([*arguments, "--seeds", "1,1"]) == 2
    assert "--seeds" in capsys.readouterr().err


# --- plan -----------------------------------------------------------------------------------------
def test_plan_prints_its_assumptions_and_the_paper(capsys):
    assert main(["plan"]) == 0
    out = capsys.readouterr().out
    for word in ("Assumptions:", "213B tokens per day", "64 H100s", "memory per GPU",
                 "FSDP", "of peak", "data sheet", "not measured", "what if", "calibrated factor",
                 "no transfer is hidden", "blocks are recomputed"):  # fmt: skip
        assert word in out
    assert main(["plan", "--set", "precision=fp8"]) == 0
    assert "times are those of bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--set num_experts=40000", "num_experts: expected at most 32767 experts"),
        ("--set num_experts=100 --expert-parallel 8", "a divisor of num_experts = 100, got 8"),
        ("--gpu a100 --set precision=fp8", "precision: expected None on a GPU other than Hopper"),
        ("--gpu b200 --set precision=fp8", "precision: expected None on a GPU other than Hopper"),
        ("--gpu a100 --set memory=fp8", "memory: expected 'keep' or 'recompute' on a GPU without"),
        ("--set precision=fp8 --set hidden_size=1544", "hidden_size: expected a multiple of 16"),
        ("--shard 0", "shard: expected at least 1"),
        ("--set expert_parallel=3", "expert_parallel: expected a divisor of shard"),
        ("--moe-efficiency nan", "--moe-efficiency: expected between 0 and 1"),
    ],
)
def test_plan_refuses_what_the_layer_refuses(arguments, complaint, capsys):
    assert main(["plan", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err and not captured.out


RESULTS = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200"


def _measured(subject: str) -> dict[str, float]:
    """Seconds forward and backward by shape, of the whole layer with its router on one H200.

    The mean of the last two runs: they differ by up to 8%. Of layers as the trainer has them.
    """
    found: dict[str, list[float]] = {}
    for r in read(RESULTS):
        told = (r.get("candidate"), r.get("router"), r.get("routing"))
        trained = r.get("activation") == "swiglu" and not r.get("bias")
        if told == (subject, "in", "uniform") and trained and "fwd_bwd_ms" in r:
            found.setdefault(r["shape"], []).append(r["fwd_bwd_ms"] / 1e3)
    return {shape: mean(times[-2:]) for shape, times in found.items()}


def test_the_layer_formula_is_near_what_was_measured():
    measured = _measured("sonicmoe")
    assert len(measured) == 9
    for shape, seconds in measured.items():
        assert _planned(plan.moe_seconds, shape) == pytest.approx(seconds, rel=0.02), shape


def _planned(seconds: Callable[..., float], shape: str) -> float:
    tokens, hidden, intermediate, experts, k = map(int, shape.split(","))
    model = ModelConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=experts,
        experts_per_token=k,
    )
    return seconds(model, tokens, gpu("H200"), plan.Efficiency())


def test_plain_gemms_reach_what_was_measured():
    shares = []
    for shape, seconds in _measured("dense").items():
        tokens, hidden, intermediate, _, k = map(int, shape.split(","))
        shares.append(18 * tokens * k * hidden * intermediate / seconds / gpu("H200").half)
    assert plan.Efficiency().dense == pytest.approx(mean(shares), abs=0.01)


def test_a_checkpointed_layer_takes_what_was_measured():
    ways = [r for r in read(RESULTS) if r.get("candidate") == "modes"]
    extra = [r["checkpointed_fwd_bwd_ms"] / r["plain_fwd_bwd_ms"] - 1 for r in ways]
    planned = [
        _planned(plan.moe_recomputed_seconds, r["shape"]) / _planned(plan.moe_seconds, r["shape"])
        for r in ways
    ]
    assert mean(extra) == pytest.approx(mean(planned), abs=0.01)
    assert extra == pytest.approx(planned, abs=0.03)


def test_every_assumption_moves_the_prediction_the_right_way():
    found = plan.papers_run(plan.Efficiency())
    usual = found.pop("as assumed")
    assert found.pop("attention reaches 40% of peak") > usual
    assert all(tokens < usual for tokens in found.values())
    assert found["no transfer is hidden"] < plan.PAPER[0] < usual


def test_recomputing_z_takes_what_was_measured():
    found = [r for r in read(RESULTS) if r.get("kind") == "memory policies"]
    found = [r for r in found if r.get("precision") is None]
    extra = {r["shape"]: r["relative"] - 1 for r in found if r["memory"] == "recompute"}
    assert len(extra) == 5
    for shape, share in extra.items():
        again = _planned(plan.up_seconds, shape) / _planned(plan.moe_seconds, shape)
        assert again == pytest.approx(share, abs=0.05), shape


def test_plan_reacts_as_it_should():
    from sonicmoe.train.presets import preset

    config = preset("7B").override({"precision": "autocast"})
    eff = plan.Efficiency()

    def tokens(gpus, shard, expert_parallel=1, device="H100", **changes):
        layout = plan.Layout(gpus, shard, expert_parallel, 1)
        return plan.predict(config.override(changes), gpu(device), layout, eff)

    assert tokens(64, 64).memory.state < tokens(64, 8).memory.state
    assert tokens(64, 64, device="A100").tokens_per_day < tokens(64, 64).tokens_per_day
    assert tokens(128, 64).tokens_per_day > 1.5 * tokens(64, 64).tokens_per_day
    assert tokens(64, 64, memory="recompute").tokens_per_day < tokens(64, 64).tokens_per_day
    assert tokens(64, 64, memory="recompute").memory.kept < tokens(64, 64).memory.kept
    assert tokens(64, 64, 8).transfers["expert all-to-all"] > 0
    assert tokens(64, 64).transfers["expert all-to-all"] == 0
    with pytest.raises(ValueError, match="divisor"):
        plan.Layout(64, 7, 1, 1)


def test_gpus_are_recognised_by_the_name_the_driver_gives():
    assert recognise("NVIDIA H200").name == "H200"
    assert recognise("NVIDIA GB200").name == "GB200"
    assert recognise("NVIDIA GeForce RTX 4090") is None
