"""A first run on text of one's own: what it needs, what it says, what it leaves and logs."""

import sys
import types

import pytest

from sonicmoe.cli import main
from sonicmoe_trainer import corpus, run, runlog


def _words(size: int, gap: str) -> str:
    """About `size` characters: sentences, each with its number."""
    return "".join(f"Sentence {i} of the notes has words.{gap}" for i in range(size // 36))


@pytest.mark.parametrize("gap", ["\n\n", "\n", " "], ids=["paragraphs", "lines", "one line"])
@pytest.mark.parametrize("size", [12_000, 86_000])
def test_a_short_file_of_ones_own_is_enough(size, gap, tiny, tmp_path):
    """For the demo: a training and a validation share, in every one of several texts."""
    demo = tiny.override(
        {"vocab_size": 300, "batch": 8, "context": 128, "validation_fraction": 0.05}
    )
    for i in range(3):
        path = tmp_path / f"notes-{i}.txt"
        path.write_text(f"Number {i}. {_words(size, gap)}")
        found = corpus.prepare(
            demo.override({"data": [str(path)]}), tmp_path / "cache", lambda _: None
        )
        held = found.found["validation"]["tokens"]
        assert 0.01 < held / (held + found.found["train"]["tokens"]) < 0.4


def test_a_few_documents_are_shared_out(tiny, tmp_path):
    """Chance holds out none of three; one document cannot be shared out."""
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"Text {i}. {_words(20_000, ' ')}")
    few = tiny.override({"data": [str(tmp_path)], "validation_fraction": 1e-6})
    found = corpus.prepare(few, tmp_path / "cache", lambda _: None).found
    assert (found["train"]["documents"], found["validation"]["documents"]) == (2, 1)
    for i in range(1, 3):
        (tmp_path / f"{i}.txt").unlink()
    with pytest.raises(corpus.TooLittleText, match="or the file itself, which is then split"):
        corpus.prepare(few, tmp_path / "cache", lambda _: None)


def test_a_run_says_what_it_did_and_what_it_left(command, tmp_path, capsys):
    """But for the picture, which `command` leaves out."""
    arguments = command(steps=2, warmup_steps=1)
    assert main([*arguments, "--lr", "0.004"]) == 0
    said = capsys.readouterr().out
    folder = tmp_path / "runs" / "demo"
    assert "Finished: all 2 steps are done.\n" in said
    assert f"Kept in {folder}: log.jsonl, summary.md, checkpoints.\n" in said
    assert run.load_config(folder).learning_rate == 0.004
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]

    summary = (folder / "summary.json").read_text()
    assert main(["train", "--resume", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"The run in {folder} has all its 2 steps. To go on: --steps N.\n")
    assert "Continuing" not in said and (folder / "summary.json").read_text() == summary


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package: what it was given."""
    given: dict = {"log": []}

    class Run:
        def log(self, values, step):
            given["log"].append((step, values))

        def finish(self):
            given["finished"] = True

    def init(**settings):
        given["settings"] = settings
        return Run()

    module = types.ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return given


def test_wandb_gets_what_the_log_has(command, tmp_path, wandb, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert main(command(steps=2, warmup_steps=1)) == 0
    assert wandb == {"log": []}  # nobody asked
    capsys.readouterr()
    assert main(command(steps=2, warmup_steps=1, wandb="true")) == 0
    folder = tmp_path / "runs" / "demo-2"
    settings = wandb["settings"]
    assert (settings["project"], settings["name"], settings["dir"]) == (
        "sonicmoe", "demo-2", str(folder))  # fmt: skip
    assert settings["config"] == run.load_config(folder).to_dict() and wandb["finished"]
    records = runlog.read(folder)
    assert [step for step, _ in wandb["log"]] == [record["step"] for record in records] == [1, 2, 2]
    for record, (_, values) in zip(records, wandb["log"], strict=True):
        for name, value in values.items():
            assert record[name.removeprefix(f"{record['kind']}/")] == value
    assert records[0]["gradient_norm"] > 0 and "train/gradient_norm" in wandb["log"][0][1]
    assert f"gradient norm {records[0]['gradient_norm']:.2f}" in capsys.readouterr().out


def test_wandb_that_is_missing_is_said_before_any_work(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(command(wandb="true")) == 2
    assert "wandb=true needs wandb. Install it: pip install 'wandb'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
