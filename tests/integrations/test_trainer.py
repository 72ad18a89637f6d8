"""`WatchCallback`: the load of experts in the log of transformers' `Trainer`."""

import sys

import pytest
import torch
import transformers
from hf_models import small

from sonicmoe.integrations.trainer import WatchCallback
from sonicmoe.watch import JsonLines, summary


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.randint(1, 64, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Reporter(transformers.TrainerCallback):
    """Sees what is logged, after the callback that comes before it."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **about):
        self.logs.append(dict(logs))


def train(folder, *callbacks, resume=False, save_strategy="no"):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, logging_steps=2, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, report_to="none", use_cpu=True, save_strategy=save_strategy,
        save_steps=3, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        small("Mixtral"), arguments, train_dataset=Tokens(), callbacks=list(callbacks)
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    return trainer


def test_the_load_is_in_the_log(tmp_path):
    """As often as the trainer logs, K rows for each token of two batches and two steps."""
    seen, reporter = [], Reporter()
    callback = WatchCallback(lambda step, loads: seen.append((step, loads)))
    trainer = train(tmp_path, callback, reporter)
    assert [step for step, _ in seen] == [2, 4]
    for _, loads in seen:
        assert [name for name in loads if name.endswith("mlp.experts")] == list(loads)
        assert {int(load.rows.sum()) for load in loads.values()} == {2 * 2 * 2 * 10 * 2}
    assert callback.last is seen[-1][1]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry, shown, (_, loads) in zip(logged, reporter.logs, seen, strict=False):
        want = summary(loads)
        assert want == {key: entry[key] for key in want} == {key: shown[key] for key in want}
    assert sum("load/dead" in entry for entry in trainer.state.log_history) == 2
    trainer.model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert not any(load.rows.any() for load in callback._watch.read().values())  # no hooks are left


def test_every_step_and_a_file(tmp_path):
    calls = []

    def all_reduce(rows):
        calls.append(len(rows))
        return rows

    callback = WatchCallback(JsonLines(tmp_path / "load.jsonl"), every=1, all_reduce=all_reduce)
    train(tmp_path / "run", callback, save_strategy="steps")
    assert len((tmp_path / "load.jsonl").read_text().splitlines()) == 4 * 2
    assert calls == [2 * 4] * 4
    seen = []
    callback = WatchCallback(lambda step, loads: seen.append(step), every=2)
    train(tmp_path / "run", callback, resume=True)
    assert seen == [4]  # of the whole run: it is resumed after step 3
    with pytest.raises(ValueError, match="every: expected"):
        WatchCallback(every=0)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "sonicmoe.integrations.trainer")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers.*pip install 'sonicmoe\[hf\]'"):
        import sonicmoe.integrations.trainer  # noqa: F401
