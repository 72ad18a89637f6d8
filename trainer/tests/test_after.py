"""What is done with trained models: generate, export, compare."""

import json

import pytest
import torch

from sonicmoe.cli import main
from sonicmoe_trainer import export, generate
from sonicmoe_trainer.config import ModelConfig
from sonicmoe_trainer.model import Decoder


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
