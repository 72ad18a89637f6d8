"""`grouped_experts`: rows that arrive sorted by expert, with a tail that holds anything."""

import pytest
import torch
from devices import on, values_on
from helpers import DTYPES, Case, compare, make_inputs, plain, poisoned, run, same_bits

import sonicmoe

NAN = float("nan")
CASE = Case("60,16,8,4,1", torch.float32, bias=True)


def _grouped(sizes, with_scores=True, **options):
    """As a function of the arguments of `experts`, so that `run` can differentiate it."""

    def layer(x, ids, scores, **weights):
        scores = scores.squeeze(1) if with_scores else None
        return sonicmoe.grouped_experts(x, sizes, scores=scores, **weights, **options)

    return layer


def _sorted_inputs(counts, case=CASE, device="cpu"):
    """Inputs whose ids say what the counts say: row r belongs to the expert of its place."""
    given = make_inputs(case, device)
    given.ids.fill_(-1)
    where = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    given.ids[: len(where), 0] = where.to(given.ids)
    return given


def _tails(shape, *counts, dtypes=(torch.bfloat16,)):
    """The shape with room for a tail, the experts of `counts`, biases."""
    return [
        (Case(shape.format(len(each)), dtype, bias=True), each)
        for each in counts for dtype in dtypes
    ]  # fmt: skip


@values_on(
    "case, counts",
    cpu=_tails(
        "240,16,8,{},1",
        [80, 0, 120, 40],  # all rows in use, less than a tile of them and more
        [33, 0, 157, 0],  # a tail, empty experts, the last one empty
        [0, 0, 0, 0],  # nothing arrived
        [0, 240, 0, 0],  # one expert takes all
        dtypes=DTYPES,
    ),
    interpreter=_tails("20,24,16,{},1", [3, 0, 9], [0, 0, 0], [0, 20, 0]),
    cuda=_tails(
        "600,264,136,{},1",
        [130, 0, 7, 256, 0],
        [0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1],
        [0, 500, 0, 0, 0],
        [4] * 149,  # every program computes several tiles
    ),
)
@pytest.mark.parametrize("with_scores", [False, True])
def test_every_gradient_with_a_tail_of_nan(case, counts, with_scores, device, backend):
    given, used = _sorted_inputs(counts, case, device), sum(counts)
    if not with_scores:
        given.scores = torch.ones_like(given.scores)
    rough, exact = run(plain(case), given), run(plain(case), given.double())
    for t in (given.x, given.scores, given.dout):
        t[used:] = NAN
    if not with_scores:
        given.differentiable = ("x", "w1", "w2", "b1", "b2")
    sizes = torch.tensor(counts, device=device)
    with poisoned():
        got = run(_grouped(sizes, with_scores, backend=backend), given)
    compare(got, rough, exact, case.dtype)
    for name in {"out", "dx", "dscores"} & got.keys():
        assert (got[name][used:] == 0).all(), f"{name} of the tail"
    for e, count in enumerate(counts):
        if count == 0:
            assert all((got[name][e] == 0).all() for name in ("dw1", "dw2", "db1", "db2"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_say_what_counts_say(dtype):
    given = _sorted_inputs([5, 0, 17, 8])
    want = run(_grouped(torch.tensor([5, 0, 17, 8], dtype=dtype)), given)
    offsets = torch.tensor([0, 5, 5, 22, 30], dtype=dtype)
    same_bits(want, run(_grouped(None, offsets=offsets), given))


@on("cpu", "interpreter")
def test_rows_before_the_first_offset_are_a_tail_too(backend):
    given = _sorted_inputs([5, 0, 17, 8])
    want = run(_grouped(torch.tensor([5, 0, 17, 8]), backend=backend), given)
    for t in (given.x, given.scores, given.dout):  # the same rows, four places further on
        t.copy_(t.roll(4, 0))
        t[:4] = NAN
        t[34:] = NAN
    with poisoned():
        got = run(_grouped(None, offsets=torch.tensor([4, 9, 9, 26, 34]), backend=backend), given)
    for name in want:
        if name in ("out", "dx", "dscores"):
            assert (got[name][:4] == 0).all() and (got[name][34:] == 0).all(), name
            assert torch.equal(got[name][4:34], want[name][:30]), name
        else:
            assert torch.equal(got[name], want[name]), name


def test_rows_of_experts_apart_are_the_rows_together():
    """What an expert makes of its rows does not depend on which rows the others have."""
    given = _sorted_inputs([20, 10, 30, 0])
    whole = run(_grouped(torch.tensor([20, 10, 30, 0])), given)
    alone = run(_grouped(torch.tensor([20, 0, 0, 0])), given)
    torch.testing.assert_close(alone["out"][:20], whole["out"][:20])
    torch.testing.assert_close(alone["dw1"][0], whole["dw1"][0])


def test_no_rows_at_all():
    case = Case("0,16,8,4,1", torch.float32, bias=True)
    got = run(_grouped(torch.zeros(4, dtype=torch.int64)), make_inputs(case))
    assert got["out"].shape == got["dx"].shape == (0, 16)
    assert all((got[name] == 0).all() for name in ("dw1", "dw2", "db1", "db2"))


@pytest.mark.parametrize(
    "sizes",
    [
        {"counts": [30, 0, 30, 1]},
        {"counts": [2**31 - 1, 2**31 - 1, 2, 1]},
        {"counts": [-1, 10, 0, 0]},
        {"offsets": [0, 5, 4, 10, 20]},
        {"offsets": [-1, 5, 6, 10, 20]},
        {"offsets": [0, 5, 6, 10, 61]},
        {"counts": [5, 6, 5, 5], "offsets": [0, 5, 10, 20]},  # the second reaches into the third
        {"counts": [5, 5, 5, 5], "offsets": [0, 10, 20, 56]},
        {"counts": [5, 5, 5, 5], "offsets": [20, 0, 30, 40]},
    ],
    ids=str,
)
def test_counts_and_offsets_that_do_not_fit_are_refused(sizes):
    given = make_inputs(CASE)
    weights = (given.w1, given.w2)
    tensors = {name: torch.tensor(value) for name, value in sizes.items()}
    with pytest.raises(ValueError, match="offsets: expected"):
        sonicmoe.grouped_experts(given.x, tensors.pop("counts", None), *weights, **tensors)


@values_on(
    "case, sizes",
    interpreter=[
        (Case("300,16,8,2,1", torch.float32), {"offsets": offsets})
        for offsets in ([0, 128, 301], [0, 10, 9], [-1, 5, 9])
    ],
    cuda=[
        (Case("1000,64,64,4,1"), {"counts": counts})
        for counts in ([700, 0, 301, 0], [-1, 5, 5, 5], [2**40, 0, 0, 0])
    ],
)
def test_kernels_poison_the_output_where_they_do_not_fit(case, sizes, device):
    """Without waiting for the device nobody can say so."""
    given = make_inputs(case, device)
    x, w1 = given.x.requires_grad_(), given.w1.requires_grad_()
    sizes = {"counts": None} | {n: torch.tensor(t, device=device) for n, t in sizes.items()}
    with poisoned():
        out = sonicmoe.grouped_experts(x, w1=w1, w2=given.w2, **sizes, backend="triton")
        dx, dw1 = torch.autograd.grad(out, (x, w1), given.dout)
    assert out.isnan().all() and dx.isnan().all() and (dw1 == 0).all()


@pytest.mark.parametrize("with_scores", [False, True])
def test_gaps_between_experts(with_scores):
    """Starts and counts, as symmetric memory delivers them; the gaps hold NaN."""
    counts, offsets = [5, 0, 17, 8], [4, 12, 12, 40]
    given = make_inputs(CASE)
    given.ids.fill_(-1)
    for e, (start, count) in enumerate(zip(offsets, counts, strict=True)):
        given.ids[start : start + count] = e
    if not with_scores:
        given.scores = torch.ones_like(given.scores)
        given.differentiable = ("x", "w1", "w2", "b1", "b2")
    rough, exact = run(plain(CASE), given), run(plain(CASE), given.double())
    gaps = given.ids[:, 0] < 0
    for t in (given.x, given.scores, given.dout):
        t[gaps] = NAN
    if not with_scores:
        given.scores[gaps] = 1
    layer = _grouped(torch.tensor(counts), with_scores, offsets=torch.tensor(offsets))
    got = run(layer, given)
    compare(got, rough, exact, torch.float32)
    assert (got["out"][gaps] == 0).all() and (got["dx"][gaps] == 0).all()
