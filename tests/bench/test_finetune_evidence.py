"""Fine-tuning a model with outliers, at toy size: every stage, and what is kept of it."""

import json
import statistics
import sys
from typing import Any

import pytest
import torch
import training_evidence
from research import document, finetune, layer_errors, training, training_report
from test_training_evidence import TOY, cells, origin, write_text

from sonicmoe.enums import ActivationType
from sonicmoe.reference.activation import activate
from sonicmoe.train import checkpoint
from sonicmoe.train.compare import train_each
from sonicmoe.train.run import load_config

FACTOR = 20.0
# A package whose experts are off by 100% in every result.
OTHER_SOURCE = """
def experts(x, ids, scores, w1, w2, **options):
    return 0 * x + 0 * w1.sum() + 0 * w2.sum()
"""


def write_code(folder):
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.py").write_text(f"def power_{i}(x):\n    return x ** {i} + {i * 7}\n" * 20)
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a base model, its cache and other text."""
    folder = tmp_path_factory.mktemp("base")
    config = training.BASE.override({
        **TOY, "data": str(write_text(folder / "text")), "steps": 6, "keep": 1,
    })  # fmt: skip
    list(train_each({"base": config}, folder, folder / "cache", pictures=False))
    return folder / "base", folder / "cache", write_code(folder / "code")


# --- the whole part -------------------------------------------------------------------------------
def test_the_whole_part(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    text, code = write_text(tmp_path / "text"), write_code(tmp_path / "code")
    other = tmp_path / "other" / "sonicmoe"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text(OTHER_SOURCE)
    settings = {**TOY, "data": text, "learning_rate": 1e-3}
    del settings["precision"]  # autocast
    arguments = [x for k, v in settings.items() for x in ("--set", f"{k}={v}")]
    for name, value in {
        "parts": "finetune", "finetune-data": code, "base-steps": 8, "recover-steps": 4,
        "tune-steps": 4, "outlier-factor": FACTOR, "seeds": "0,1", "precisions": "autocast,fp8",
        "errors-of": f"before={other.parent}", "output": tmp_path / "output", "commit": "abc",
        "runs": tmp_path / "runs", "cache": tmp_path / "cache",
    }.items():  # fmt: skip
        arguments += [f"--{name}", str(value)]
    monkeypatch.setattr(sys, "argv", ["training_evidence.py", "--no-compile", *arguments])
    assert training_evidence.main() == 0

    kept = json.loads((tmp_path / "output" / "evidence.json").read_text())
    base, recovered, *rest = kept["records"]
    assert [r["run"] for r in (base, recovered)] == ["base", "recovered"]
    assert all(ratio < 5 for ratio in base["outliers"].values())
    for stage in ("planted", "outliers"):  # they outlive the recovery
        assert all(ratio > 0.7 * FACTOR for ratio in recovered[stage].values())
    assert recovered["config"]["data"] == base["config"]["data"] != rest[-1]["config"]["data"]

    errors = {r["run"]: r["together"] for r in rest if r["experiment"] == finetune.ERRORS}
    assert list(errors) == [
        f"{label}, {variant}"
        for label in ("this commit", "before")
        for variant in ("autocast", "fp8")
    ]
    for found in errors["this commit, autocast"].values():
        assert found["norm"] < 0.01
    for found in errors["this commit, fp8"].values():
        assert 0.02 < found["norm"] < 0.5 and found["median"] < found["p90"]
    for found in errors["before, fp8"].values():  # another package was imported
        assert found == pytest.approx({"norm": 1.0, "median": 1.0, "p90": 1.0})

    tuned = [r for r in rest if r["experiment"] == finetune.TUNED]
    assert [r["run"] for r in tuned] == [
        f"{variant}, seed {seed}" for seed in range(2) for variant in ("autocast", "fp8")
    ]
    assert {r["config"]["init_from"] for r in tuned} == {str(tmp_path / "runs/finetune/recovered")}
    assert len({r["validation_loss"] for r in tuned}) == 4
    assert not (tmp_path / "runs/finetune/captured.pt").exists()

    report = (tmp_path / "output" / "evidence.md").read_text()
    for words in ("× 20", "| before", "against autocast", "fine-tuning.png"):
        assert words in report
    assert (tmp_path / "output" / "fine-tuning.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"variants": ["fp9"]}, "precision: expected"),
        ({"sources": {"old": "nowhere"}}, "--errors-of: expected .* old=nowhere"),
        ({"data": ("no/such/text",)}, "data: expected"),
    ],
)
def test_what_cannot_work_is_named_before_any_run(tmp_path, changes, complaint):
    base = training.BASE.override({**TOY, "data": str(write_text(tmp_path / "text"))})
    given = {"variants": ["fp32"], "seeds": "0", "sources": {}, "data": base.data, **changes}
    plan = finetune.Plan(given.pop("data"))
    sources = {label: tmp_path / s for label, s in given.pop("sources").items()}
    with pytest.raises(ValueError, match=complaint.replace("nowhere", ".*nowhere")):
        finetune.finetune(
            base, training.Place(tmp_path, tmp_path), plan, sources=sources, **given
        )  # fmt: skip
    assert not (tmp_path / "finetune").exists()


def test_a_base_that_fails_ends_the_part(tmp_path):
    config = training.BASE.override({**TOY, "data": str(write_text(tmp_path / "text"))})
    config = config.override({"learning_rate": 1e30})
    place = training.Place(tmp_path / "runs", tmp_path / "cache")
    plan = finetune.Plan(config.data, 8, 4, 4)
    (record,) = finetune.finetune(config, place, plan, variants=["fp32"], seeds="0")
    assert record["failed"].startswith("FloatingPointError")


# --- outliers -------------------------------------------------------------------------------------
def layer_output(weights, x):
    w1, w2 = weights["blocks.0.moe.c_fc.weight"][0], weights["blocks.0.moe.c_proj.weight"][0]
    return activate(x @ w1.T, ActivationType.SWIGLU, "concatenated") @ w2.T


def test_outliers_change_one_channel_of_the_experts_output(base, tmp_path):
    folder = base[0]
    ratios = finetune.plant(folder, tmp_path / "planted", FACTOR)
    before, after = (
        checkpoint.load_latest(f / "checkpoints")["model"] for f in (folder, tmp_path / "planted")
    )
    assert load_config(tmp_path / "planted") == load_config(folder)
    x = torch.randn(64, before["embed.weight"].shape[1])
    ratio = layer_output(after, x).norm(dim=0) / layer_output(before, x).norm(dim=0)
    (channel,) = (ratio > 1.01).nonzero().flatten().tolist()
    assert ratio[channel] == pytest.approx(FACTOR, rel=1e-3)
    assert ratio.sort().values[-2] == pytest.approx(1.0, rel=1e-3)
    for name in ("blocks.0.moe_norm.weight", "blocks.0.attention_norm.weight", "norm.weight"):
        changed = after[name] / before[name]
        assert changed[channel] == pytest.approx(1 / FACTOR)
        assert changed.sum() == pytest.approx(len(changed) - 1 + 1 / FACTOR)
    assert all(r > 0.7 * FACTOR for r in ratios.values())
    assert finetune.outliers(after) == ratios
    repeated = finetune.plant(folder, tmp_path / "again", FACTOR)
    assert repeated == ratios


def test_the_size_of_outliers():
    w1, w2 = torch.ones(2, 8, 4), torch.ones(2, 4, 4)
    w1[:, 3] *= 7
    w2[:, 2] *= 3
    weights = {"blocks.0.moe.c_fc.weight": w1, "blocks.0.moe.c_proj.weight": w2}
    assert finetune.outliers(weights) == {"w1": 7.0, "w2": 3.0}


# --- errors ---------------------------------------------------------------------------------------
def test_what_is_captured_gives_the_gradients_of_the_model(base, monkeypatch):
    folder, cache, code = base
    made = []

    def decoder(*given):
        made.append(Decoder(*given))
        return made[0]

    Decoder = finetune.Decoder
    monkeypatch.setattr(finetune, "Decoder", decoder)
    changes = {"init_from": str(folder), "data": str(code)}
    config = load_config(folder).override(changes)
    (layer,) = finetune.capture(config, cache)
    assert {t.dtype for name, t in layer.items() if name != "ids"} == {torch.bfloat16}
    want = layer_errors.exact({k: t if k == "ids" else t.double() for k, t in layer.items()})
    moe = made[0].blocks[0].moe
    for name, weight in (("dw1", moe.c_fc.weight), ("dw2", moe.c_proj.weight)):
        error = (want[name] - weight.grad).norm() / weight.grad.norm()
        assert error < 0.02, name


def test_errors_are_those_of_tokens_rows_and_columns():
    want = torch.ones(2, 4, 3)
    want[1] = 0  # an expert that no token chose
    got = want.clone()
    got[0, 1, 2] = 3
    rows, columns = (layer_errors.line_errors(got, want, dim) for dim in (-1, -2))
    torch.testing.assert_close(rows, torch.tensor([0, 2 / 3**0.5, 0, 0], dtype=torch.double))
    torch.testing.assert_close(columns, torch.tensor([0, 0, 1], dtype=torch.double))
    assert layer_errors.SUMMED == {"output": -1, "dx": -1, "dw1": -1, "dw2": -2}


def test_a_source_that_fails_is_named(tmp_path):
    (tmp_path / "sonicmoe").mkdir()
    (tmp_path / "sonicmoe" / "__init__.py").write_text("raise RuntimeError('too old')")
    (record,) = finetune.measure("old", tmp_path, [], ["fp8"], tmp_path / "captured.pt")
    assert record["failed"] == "RuntimeError: too old"
    assert (record["experiment"], record["run"]) == (finetune.ERRORS, "old")


def test_errors_that_cannot_be_measured_are_named(monkeypatch):
    def errors(layers, variant, device):
        if variant == "fp8":
            raise RuntimeError("no kernel")
        return {"variant": variant, "together": {}}

    monkeypatch.setattr(layer_errors, "errors", errors)
    failed, found = finetune.measure_here([], ["fp8", "autocast"], "cpu")
    assert failed["failed"] == "fp8: RuntimeError: no kernel"
    assert found["finished"] and found["variant"] == "autocast"


@pytest.mark.parametrize(
    "variant, known",
    [("autocast", "autocast"), ("bf16", "autocast"), ("fp8", "fp8"),
     ("fp8+memory=fp8", "fp8+memory=fp8"), ("fp8+learning_rate=1", "fp8")],
)  # fmt: skip
def test_variants_of_the_experts(variant, known):
    assert finetune._variant_of_experts(variant) == known


# --- tables ---------------------------------------------------------------------------------------
def records(errors: float = 0.07):
    sizes = {"w1": 18.25, "w2": 19.5}
    made: list[dict[str, Any]] = [
        {"experiment": finetune.BASE, "run": "base", "outliers": {"w1": 1.5, "w2": 4.75}},
        {"experiment": finetune.BASE, "run": "recovered", "outliers": sizes, "planted": sizes,
         "factor": 20.0},
    ]  # fmt: skip
    together = {
        name: {"norm": errors, "median": 0.05, "p90": 0.09}
        for name in ("output", "dx", "dw1", "dw2")
    }
    made += [
        {"experiment": finetune.ERRORS, "run": "a", "source": source, "variant": "fp8",
         "together": together}
        for source in ("this commit", "c5da0d4")
    ]  # fmt: skip
    made += [
        {"experiment": finetune.TUNED, "run": f"{name}, seed {seed}", "config": {"seed": seed},
         "parameters": 109_000_000, "validation": [(i, loss + 0.1 * i) for i in range(5)]}
        for seed in range(3)
        for name, loss in (("autocast", 4.0), ("fp8", 4.0 + 0.01 * seed))
    ]  # fmt: skip
    shared = {"steps": 9, "validation_loss": 5.0, "finished": True}
    return [{**shared, **r} for r in made]


def test_differences_are_of_the_mean_of_the_last_validations():
    tuned = [r for r in records() if r["experiment"] == finetune.TUNED]
    first, second = cells(training_report.finetune_table(tuned))
    changes = [0.01 * seed / 4.3 for seed in range(3)]
    error = statistics.stdev(changes) / 3**0.5
    assert first[:3] == ["9", "autocast", "4.3000"]
    assert second[1:7] == ["fp8", "4.3100", f"{statistics.fmean(changes):+.2%}", f"{error:.2%}",
                           f"{max(changes):+.2%}", "yes"]  # fmt: skip


def test_the_document_shows_fine_tuning(tmp_path):
    training.keep(records(), tmp_path, origin(1))
    evidence = json.loads((tmp_path / "evidence.json").read_text())
    host = {"candidate": "host", "case": "host", "host_fwd_ms": 1.0, "host_fwd_bwd_ms": 2.0}
    measured = [{**origin(2), "dtype": "bfloat16", **host}]
    text = document.document(measured, [evidence])
    section = text.split("### Fine-tuning in FP8\n")[1].split("\n#")[0]
    assert [row[0] for row in cells(section)[:3]] == [
        "base", "a row of W1 and of W2 × 20", "recovered",
    ]  # fmt: skip
    assert cells(section)[2] == ["recovered", "9", "5.0000", "18.2", "19.5"]
    errors = text.split("### FP8 on weights with outliers\n")[1].split("\n#")[0]
    assert cells(errors)[1] == ["c5da0d4", "fp8", *["7.0% / 5.0% / 9.0%"] * 4]
    assert "109M parameters" in section and "`command 1`" in text
    without = document.document(measured, [evidence | {"records": []}])
    assert "Fine-tuning" not in without and "outliers" not in without


def test_a_new_command_replaces_all_of_an_experiment(tmp_path):
    training.keep(records(), tmp_path, origin(1))
    training.keep(records(errors=0.5)[:3], tmp_path, origin(2))
    kept = json.loads((tmp_path / "evidence.json").read_text())["records"]
    assert sum(r["experiment"] == finetune.ERRORS for r in kept) == 1
    assert sum(r["experiment"] == finetune.TUNED for r in kept) == 6
