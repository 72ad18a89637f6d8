import json
import math

import pytest
import torch

from sonicmoe.cli import main
from sonicmoe_trainer import optim, run, runlog
from sonicmoe_trainer.config import ModelConfig
from sonicmoe_trainer.model import Decoder


def test_the_loss_falls_and_everything_is_written(trained, tiny):
    folder, numbers = trained
    assert numbers["first_loss"] == pytest.approx(math.log(tiny.model.vocab_size), abs=0.5)
    assert numbers["last_loss"] < numbers["first_loss"] - 1.5
    assert numbers["validation_loss"] < numbers["first_loss"] - 1.5
    assert numbers["tokens"] == tiny.steps * tiny.batch * tiny.model.context
    assert numbers["kept_bytes"] > 0
    for name in ("log.jsonl", "summary.json", "summary.md", "run.json", "tokenizer.json"):
        assert (folder / name).is_file()
    records = runlog.read(folder)
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, tiny.steps + 1))
    assert [r["step"] for r in records if r["kind"] == "validation"] == [10, 20, 30]
    assert 0.9 < records[0]["balance"] < 4


def test_the_picture_is_drawn(trained):
    assert (trained[0] / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_accumulation_gives_the_same_gradient_steps(tiny, cache, tmp_path):
    changes = {"steps": 4, "warmup_steps": 1, "validate_every": 4, "aux_loss_coef": 0}
    losses = []
    for micro_batch in (1, 4):
        config = tiny.override({**changes, "micro_batch": micro_batch})
        folder = tmp_path / str(micro_batch)
        run.train(config, folder, cache)
        losses.append([r["loss"] for r in runlog.read(folder)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("change", [{"precision": "autocast"}, {"precision": "bf16"},
                                    {"precision": "fp8"}, {"precision": "bf16_fp8"},
                                    {"precision": "fp8", "recompute": True},
                                    {"recompute": True}, {"loss_chunk": 16},
                                    {"memory": "e4m3"}, {"memory": "recompute"},
                                    {"backend": "grouped_mm"}, {"backend": "torch"}])  # fmt: skip
def test_every_way_of_computing_a_step_trains(tiny, cache, tmp_path, change):
    numbers = run.train(
        tiny.override({"steps": 6, "validate_every": 6, **change}), tmp_path / "run", cache
    )
    assert numbers["last_loss"] < numbers["first_loss"]


@pytest.mark.parametrize("setting", ["precision=fp8", "memory=recompute", "z_loss_coef=0.1",
                                     "router=sigmoid"])  # fmt: skip
def test_peers_ignore_no_setting(tiny, cache, tmp_path, setting):
    key, _, value = setting.partition("=")
    config = tiny.override({key: value, "backend": "grouped_mm"})
    with pytest.raises(ValueError, match=f"^backend: expected .* with {setting}, got grouped_mm"):
        run.train(config, tmp_path / "run", cache)


def test_the_memory_that_our_layer_saves_is_not_claimed_for_peers(tiny, cache, tmp_path):
    config = tiny.override({"steps": 1, "backend": "grouped_mm"})
    assert run.train(config, tmp_path / "run", cache)["kept_bytes"] is None
    assert "kept for backward" not in (tmp_path / "run" / "summary.md").read_text()


def test_recomputation_and_chunks_change_no_number(tiny, cache, tmp_path):
    """But that of the bytes that the layers keep at once: one layer's."""
    losses, kept = [], []
    for i, change in enumerate(({}, {"recompute": True, "loss_chunk": 16})):
        folder = tmp_path / str(i)
        config = tiny.override({"steps": 4, "validate_every": 4, **change})
        kept.append(run.train(config, folder, cache)["kept_bytes"])
        losses.append([r["loss"] for r in runlog.read(folder)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert kept[0] == tiny.model.num_layers * kept[1]


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_recomputed(tiny, runs, recompute):
    """All but the output of the MoE layer, and only where it was asked for."""
    model = Decoder(tiny.model, recompute=recompute).train()
    ids = torch.randint(tiny.model.vocab_size, (1, tiny.model.context))
    sum(model(ids, ids)).backward()
    layers = tiny.model.num_layers
    assert (runs["up"], runs["down"]) == ((1 + recompute) * layers, layers)


def test_token_rounding_takes_its_subroutine_from_the_name(tiny):
    for name, subroutine in (("token_rounding", "nr-f"), ("token_rounding:down", "down")):
        model = Decoder(tiny.override({"router": name, "rounding_tile": 16}).model)
        routing = model.blocks[0].moe.routing
        assert (routing.subroutine, routing.tile) == (subroutine, 16)
    with pytest.raises(ValueError, match="nr-f"):
        Decoder(tiny.override({"router": "token_rounding:sideways"}).model)


def test_no_checkpoint_is_written_where_none_is_kept(tiny, cache, tmp_path):
    change = {"steps": 2, "keep": 0, "checkpoint_every": 1, "router": "token_rounding:down"}
    run.train(tiny.override(change), tmp_path / "run", cache, picture=False)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "loss.png").exists()


def test_what_takes_long_at_the_start_is_said(tiny, cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)  # a minute, and not ours
    run.train(tiny.override({"steps": 2, "compile": True}), tmp_path / "run", cache)
    out = capsys.readouterr().out
    assert out.index("torch.compile") < out.index("First step done") < out.index("step 1/2")


def test_the_cache_of_keys_continues_a_text_as_the_whole_would():
    torch.manual_seed(0)
    model = Decoder(ModelConfig(num_layers=2, num_kv_heads=2)).eval()
    ids = torch.randint(0, 2048, (2, 12))
    with torch.no_grad():
        whole = model(ids)
        cache = [None, None]
        pieces = [model(part, cache=cache) for part in ids.split([6, 3, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_schedule(tiny):
    config = tiny.override({"steps": 100, "warmup_steps": 10, "learning_rate": 1.0})
    rates = [optim.learning_rate(config, s) for s in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(config.final_learning_rate_ratio, abs=1e-2)


def test_the_command_checks_its_goal(text_folder, cache, tmp_path, capsys):
    def train(goal: float) -> int:
        settings = {"steps": 4, "vocab_size": 320, "context": 32, "hidden_size": 32, "batch": 4,
                    "micro_batch": 4, "target_loss": goal, "tensorboard": "no",
                    "validation_fraction": 0.2}  # fmt: skip
        pairs = [x for k, v in settings.items() for x in ("--set", f"{k}={v}")]
        return main(["train", "--device", "cpu", "--data", str(text_folder), "--cache", str(cache),
                     "--runs", str(tmp_path), *pairs])  # fmt: skip

    assert train(50.0) == 0
    assert "Goal reached" in capsys.readouterr().out
    assert train(0.01) == 1
    assert "Goal missed" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo", "demo-2"]
    assert json.loads((tmp_path / "demo-2" / "summary.json").read_text())["target_loss"] == 0.01


def test_mistakes_end_in_a_sentence(capsys, tmp_path):
    assert main(["train", "--set", "nonsense=1", "--runs", str(tmp_path)]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "earlier run" in capsys.readouterr().err
