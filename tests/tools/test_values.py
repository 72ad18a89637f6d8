"""Values like those of trained models: what each distribution claims holds at any size."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch

from sonicmoe.tools import trained_weights
from sonicmoe.tools.trained_weights import Expert
from sonicmoe.tools.values import TRAINED, VALUES, Tensors, shaped

ROOT = Path(__file__).parents[2]
SIZES = [(4, 32, 16, 1, 1, True), (64, 72, 40, 3, 2, True), (9, 64, 136, 5, 3, False)]


def gaussian(t, h, i, e, k, gated, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(shape, generator=generator) * scale

    n = 2 * i if gated else i
    w1, w2 = normal(e, n, h, scale=h**-0.5), normal(e, h, i, scale=i**-0.5)
    return Tensors(normal(t, h), w1, w2, normal(t, h), normal(t, k).softmax(-1)), generator


@pytest.fixture(params=SIZES, ids=str)
def drawn(request):
    """name -> Gaussian inputs and what the distribution makes of them."""

    def draw(name):
        tensors, generator = gaussian(*request.param)
        before = [t.clone() for t in tensors]
        found = shaped(name, tensors, generator)
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
        return tensors, found

    return draw


def factors(before, after):
    return torch.where(before == after, 1.0, after / before)


@pytest.mark.parametrize("name", VALUES)
def test_shapes_stay_and_values_are_finite(drawn, name):
    before, after = drawn(name)
    for old, new in zip(before, after, strict=True):
        assert new.shape == old.shape and new.dtype == torch.float32 and new.isfinite().all()
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert same == (name == "gaussian")


def test_every_name_but_gaussian_is_trained():
    assert set(VALUES) - set(TRAINED) == {"gaussian"} and "trained" in TRAINED
    with pytest.raises(ValueError, match="values: expected one of gaussian, rows_10"):
        shaped("normal", *gaussian(*SIZES[0]))


@pytest.mark.parametrize("name", ["rows_10", "rows_30", "rows_100", "w1_rows_30", "w2_rows_30"])
def test_one_row_of_every_expert(drawn, name):
    before, after = drawn(name)
    factor = float(name.split("_")[-1])
    for which in ("w1", "w2"):
        found = factors(getattr(before, which), getattr(after, which))
        large = 0 if name.startswith("w") and not name.startswith(which) else 1
        assert torch.allclose(found, found[:, :, :1].expand_as(found))
        assert ((found[:, :, 0] > 1).sum(1) == large).all()
        assert torch.allclose(found.amax((1, 2)), torch.tensor(factor if large else 1.0))
    assert torch.equal(before.x, after.x) and torch.equal(before.dout, after.dout)


def test_experts_have_outliers_of_their_own():
    before, generator = gaussian(4, 64, 32, 16, 2, True)
    after = shaped("rows_30", before, generator)
    assert len(set(after.w1.norm(dim=2).argmax(1).tolist())) > 8


@pytest.mark.parametrize("factor", [10, 30, 100])
def test_one_channel(drawn, factor):
    before, after = drawn(f"channels_{factor}")
    x, w1, dout = (
        factors(getattr(before, name), getattr(after, name)).flatten(0, -2)
        for name in ("x", "w1", "dout")
    )
    for found in (x, w1, dout):
        assert torch.allclose(found, found[:1].expand_as(found))
        assert (found[0] > 1).sum() == 1 and math.isclose(found.max(), factor, rel_tol=1e-5)
    assert x[0].argmax() == w1[0].argmax()


def test_one_weight(drawn):
    before, after = drawn("weights_300")
    for old, new in ((before.w1, after.w1), (before.w2, after.w2)):
        assert ((old != new).sum((1, 2)) == 1).all()
        typical = old.square().mean().sqrt()
        assert torch.allclose(new.abs().amax((1, 2)), 300 * typical)


def test_tokens_differ_by_twenty_binades(drawn):
    before, after = drawn("tokens_2e20")
    power = (after.dout / before.dout).log2()
    assert (power == power[:, :1]).all() and (power == power.round()).all()
    assert power.max() - power.min() == 20


def test_rows_and_columns_are_log_normal():
    before, generator = gaussian(512, 256, 192, 3, 2, True)
    after = shaped("log_normal", before, generator)

    def spread(t, dim):
        return t.norm(dim=dim).log().std().item()

    for t in (after.x, *after.w1, *after.w2):
        assert 0.55 < spread(t, 0) < 0.9 and 0.55 < spread(t, 1) < 0.9
    assert 0.9 < spread(after.dout, 1) < 1.1


@pytest.mark.parametrize(("name", "sign"), [("tiny", -1), ("huge", 1)])
def test_far_from_one(drawn, name, sign):
    before, after = drawn(name)
    for old, new in zip(before[:4], after[:4], strict=True):
        assert sign * (new.norm() / old.norm()).log2() >= 6


def test_some_rows_are_zero(drawn):
    _, after = drawn("zero_rows")
    for t in (after.x, *after.w1, *after.w2, after.dout):
        zeros = (t == 0).all(-1).sum()
        assert 1 <= zeros <= max(1, len(t) // 8)
    assert (after.scores == 0).any() and not (after.scores == 0).all()


# --- trained weights ------------------------------------------------------------------------------
def quantiles(t, dim):
    norms = t.norm(dim=dim).flatten()
    norms = norms / norms.square().mean().sqrt()
    return norms.quantile(torch.tensor([0.1, 0.5, 0.9, 1.0]))


@pytest.mark.parametrize("sizes", [(8, 64, 48, 1), (8, 500, 300, 2), (8, 200, 300, 3)], ids=str)
def test_trained_weights_keep_their_norms(sizes, monkeypatch):
    """Rows and columns of the crop, thinned out or repeated, have the same spread of norms."""
    torch.manual_seed(0)
    t, h, i, e = sizes
    row, column = torch.linspace(3, -1, 128).exp2(), torch.linspace(2, -1, 96).exp2()
    w1 = torch.randn(256, 96) * row.repeat_interleave(2)[:, None] * column
    w2 = torch.randn(96, 128) * column[:, None] * row
    crop = Expert(0, 0, column, w1.bfloat16(), w2.bfloat16())
    monkeypatch.setattr(trained_weights, "read", lambda: (crop,))
    before, generator = gaussian(t, h, i, e, 1, True)
    after = shaped("trained", before, generator)
    for new, old, kept in ((after.w1, before.w1, w1), (after.w2, before.w2, w2)):
        assert torch.allclose(new.square().mean(), old.square().mean(), rtol=1e-3)
        for expert in new:
            for dim in (0, 1):
                assert torch.allclose(quantiles(expert, dim), quantiles(kept, dim), rtol=0.25)
    assert torch.linalg.matrix_rank(after.w1[0]) == min(after.w1[0].shape)
    assert torch.linalg.matrix_rank(after.w2[0]) == min(after.w2[0].shape)


def test_the_file_of_the_package():
    assert trained_weights.FILE.stat().st_size <= 300_000
    experts = trained_weights.read()
    assert len({expert.layer for expert in experts}) == len(experts) >= 2
    for expert in experts:
        assert expert.w1.shape == (2 * expert.w2.shape[1], len(expert.x))
        assert all(t.isfinite().all() and (t != 0).any() for t in expert[2:])
    source = json.loads(trained_weights.FILE.read_bytes().split(b"\n", 1)[0])["source"]
    assert source["train"].startswith("sonicmoe train ") and source["step"] >= 300


@pytest.fixture(scope="module")
def script():
    """The globals of the program that crops a run."""
    return runpy.run_path(str(ROOT / "benchmarks/trained_weights.py"))


def test_the_crop_has_the_largest_rows_and_columns(tmp_path, script):
    """And what is written is read again."""
    torch.manual_seed(0)
    weights = {}
    for layer in range(4):
        w1, w2 = torch.randn(3, 128, 80), torch.randn(3, 80, 64)
        w2[1, 7] *= 20
        w1[1, 64 + 5] *= 10  # the up row of neuron 5
        w2[1, :, 6] *= 15
        w1[1, :, 9] *= 8
        names = ("moe_norm", "moe.c_fc", "moe.c_proj")
        for name, t in zip(names, (torch.arange(80.0), w1, w2), strict=True):
            weights[f"blocks.{layer}.{name}.weight"] = t
    found = script["crop"](weights, layers=4, experts=3, neurons=24, channels=40)
    assert [(e.layer, e.expert) for e in found] == [(0, 1), (2, 1), (3, 1)]
    path = tmp_path / "crop.bin"
    script["write"](path, found, {"train": "here"})
    assert json.loads(path.read_bytes().split(b"\n", 1)[0])["source"] == {"train": "here"}
    for crop, again in zip(found, trained_weights.read(path), strict=True):
        assert crop.w1.shape == (48, 40) and crop.w2.shape == (40, 24)
        assert all(torch.equal(a.bfloat16(), b) for a, b in zip(crop[2:], again[2:], strict=True))
        up = weights[f"blocks.{crop.layer}.moe.c_fc.weight"][1, 69]
        whole = weights[f"blocks.{crop.layer}.moe.c_proj.weight"][1]
        channels = crop.x.long()  # the norm's weights are the channels' numbers
        assert channels[0] == 9 and len(set(channels.tolist())) == 40
        row = int(crop.w1.norm(dim=1).argmax())
        assert row % 2 == 1 and torch.equal(crop.w1[row], up[channels])
        assert crop.w2.norm(dim=1).argmax() == 0
        assert set(crop.w2[0].tolist()) <= set(whole[7].tolist())
        assert 6 in {int((whole[7] == value).nonzero()[0]) for value in crop.w2[0]}
