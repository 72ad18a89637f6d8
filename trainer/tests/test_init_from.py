"""A run that starts with the weights and the tokenizer of another one."""

import shutil

import pytest
import torch

from sonicmoe.cli import main
from sonicmoe_trainer import checkpoint, corpus, run, runlog


@pytest.fixture(scope="session")
def other_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    for i in range(40):
        lines = (f"def power_{i}_{j}(x):\n    return x ** {i * j}\n" for j in range(20))
        (folder / f"{i}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture
def tuned(trained, tiny, other_text, cache, tmp_path):
    """`tuned(steps=2, …)`: the folder of a run on other text, from `trained`."""

    def fine_tune(**changes):
        changes = {"init_from": str(trained[0]), "data": str(other_text), **changes}
        folder = tmp_path / "tuned"
        run.train(tiny.override(changes), folder, cache, picture=False)
        return folder

    return fine_tune


def state_of(folder):
    return checkpoint.load_latest(folder / "checkpoints")


def test_weights_are_taken_and_the_optimizer_is_new(trained, tuned):
    before = state_of(trained[0])
    after = state_of(tuned(steps=2, warmup_steps=1, learning_rate=1e-9, seed=5))
    assert after["step"] == 2
    for name, weight in before["model"].items():
        torch.testing.assert_close(after["model"][name], weight, rtol=0, atol=1e-8)
    assert {float(s["step"]) for s in after["optimizer"]["state"].values()} == {2.0}


def test_the_same_text_has_the_loss_that_the_run_ended_with(trained, tiny, tuned):
    folder = tuned(steps=1, warmup_steps=0, learning_rate=1e-9, data=",".join(tiny.data))
    (found,) = (r["loss"] for r in runlog.read(folder) if r["kind"] == "validation")
    assert found == pytest.approx(trained[1]["validation_loss"], rel=1e-5)


def test_other_text_is_encoded_with_the_tokenizer_of_the_run(trained, tiny, cache, tuned):
    theirs = (trained[0] / "tokenizer.json").read_bytes()
    folder = tuned(steps=2, warmup_steps=1)
    assert (folder / "tokenizer.json").read_bytes() == theirs
    config = run.load_config(folder)
    alone = corpus.prepare(config.override({"init_from": ""}), cache)
    assert alone.tokenizer_path.read_bytes() != theirs
    assert alone.key != corpus.prepare(config, cache).key


def test_a_stopped_run_continues_without_the_one_it_came_from(
    trained, tuned, tmp_path, stop_after
):  # fmt: skip
    base = shutil.copytree(trained[0], tmp_path / "base")
    with stop_after(2):
        folder = tuned(steps=4, warmup_steps=1, init_from=str(base))
    shutil.rmtree(base)
    fresh = tmp_path / "cache"  # the text is encoded once more
    assert main(["train", "--resume", str(folder), "--cache", str(fresh)]) == 0
    curve = [(r["step"], r["loss"]) for r in runlog.read(folder) if r["kind"] == "train"]
    shutil.rmtree(folder)
    whole = tuned(steps=4, warmup_steps=1)
    again = [(r["step"], r["loss"]) for r in runlog.read(whole) if r["kind"] == "train"]
    assert curve == again


def test_the_command_takes_the_settings_of_the_run(trained, other_text, cache, tmp_path, capsys):
    arguments = ["train", "--init-from", str(trained[0]), "--data", str(other_text), "--steps", "2"]
    arguments += ["--cache", str(cache), "--runs", str(tmp_path), "--name", "tuned"]
    assert main(arguments) == 0
    given, found = run.load_config(trained[0]), run.load_config(tmp_path / "tuned")
    assert found.model == given.model
    assert (found.learning_rate, found.steps) == (given.learning_rate, 2)
    capsys.readouterr()
    assert main([*arguments, "--preset", "demo"]) == 2
    assert "no value with init_from" in capsys.readouterr().err
    assert main(["train", "--resume", str(trained[0]), "--init-from", str(trained[0])]) == 2
    assert "init_from" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["hidden_size", "num_experts", "vocab_size"])
def test_other_sizes_are_refused_before_any_work(trained, tuned, tmp_path, size):
    larger = 2 * getattr(run.load_config(trained[0]).model, size)
    with pytest.raises(ValueError, match=f"{size}: expected .* as in"):
        tuned(**{size: larger})
    assert not (tmp_path / "tuned").exists()


def test_other_weights_are_refused(trained, tuned, tmp_path):
    copy = shutil.copytree(trained[0], tmp_path / "copy")
    state = dict(state_of(copy))
    state["model"] = {k: v for k, v in state["model"].items() if k != "norm.weight"}
    checkpoint.save(copy / "checkpoints", state["step"], state, keep=1)
    with pytest.raises(ValueError, match=r"init_from: expected .* same weights.*norm\.weight"):
        tuned(init_from=str(copy))


@pytest.mark.parametrize("missing", ["checkpoints", "tokenizer.json"])
def test_a_run_without_weights_or_tokenizer_is_refused(trained, tuned, tmp_path, missing):
    copy = shutil.copytree(trained[0], tmp_path / "copy")
    shutil.rmtree(copy / missing) if missing == "checkpoints" else (copy / missing).unlink()
    with pytest.raises(ValueError, match="init_from: expected a run with a checkpoint"):
        tuned(init_from=str(copy))
    with pytest.raises(ValueError, match="run: expected the folder of an earlier run"):
        tuned(init_from=str(tmp_path))
