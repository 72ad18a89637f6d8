"""The FP8 weight gradient against the exact sums of the same FP8 numbers."""

import itertools

import pytest
import torch
from helpers import poisoned

from sonicmoe.launch import fp8_wgrad
from sonicmoe.layer.run import permute
from sonicmoe.reference import fp8 as reference
from sonicmoe.tensors import Permutation

pytestmark = pytest.mark.gpu
E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
NAN = 0x7F  # in e4m3
UNEVEN = (0, 1, 127, 128, 129, 1000, 0)
OVERFULL = (300, 1, 9000, 0, 129)  # the third starts within a tile and has eight spans of 1024 rows


class Problem:
    """Rows of experts that have `counts` of them, and 77 rows of no expert, which hold NaN."""

    def __init__(self, counts, m, n, gathered=True, seed=0):
        random = torch.Generator("cuda").manual_seed(seed)
        experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        ids = torch.cat([experts, torch.full((77,), -1)]).int().cuda()
        ids = ids[torch.randperm(len(ids), generator=random, device="cuda")]
        self.p = permute(ids[:, None], len(counts), backend="triton")
        self.starts = [0, *itertools.accumulate(counts)]
        self.m, self.n, self.counts = m, n, counts

        def normal(columns):
            return torch.randn(len(ids), columns, device="cuda", generator=random).to(E4M3)

        self.tokens8, self.other = normal(m), normal(n)
        self.tokens8.view(torch.uint8)[ids < 0] = NAN
        self.other.view(torch.uint8)[self.starts[-1] :] = NAN
        shape = (len(counts), n)
        self.scale = 2.0 ** torch.randint(-9, 9, shape, device="cuda", generator=random)
        if not gathered:
            row_token = self.p.row_token[: self.starts[-1]].long()
            unused = self.tokens8[ids < 0]
            self.tokens8 = torch.cat([
                self.tokens8.view(torch.uint8)[row_token], unused.view(torch.uint8)
            ]).view(E4M3)  # fmt: skip
            self.p = Permutation.of_sorted_rows(self.p.expert_start, self.p.tiles, self.p.tile_m)

    def rows(self, e):
        return slice(self.starts[e], self.starts[e + 1])

    def rows8(self, e):
        rows = self.rows(e)
        token = rows if self.p.row_token is None else self.p.row_token[rows].long()
        return self.tokens8.view(torch.uint8)[token].view(E4M3)

    def exact(self, e):
        return self.rows8(e).double().mT @ self.other[self.rows(e)].double() * self.scale[e]

    def run(self, dtype=BF16, transposed=False, onto=None):
        """The gradient, computed twice: the second time from the launch cache."""
        shape = (len(self.counts), self.m, self.n)
        other_t = reference._transposed(self.other, self.p)
        results = []
        for _ in range(2):
            dw = torch.full(shape, torch.nan, dtype=dtype, device="cuda") if onto is None else onto
            dw = dw.mT.contiguous().mT if transposed else dw.clone()
            with poisoned():
                fp8_wgrad.weight_gradient(
                    self.tokens8, other_t, self.scale, dw, self.p, onto is not None
                )
            results.append(dw)
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
        return results[0]

    def check(self, dw, onto=None):
        """bf16 rounds by 0.17% on average; the accumulator of FP8 wgmma has 14 bits."""
        for e, rows in enumerate(self.counts):
            exact, got = self.exact(e), dw[e].double()
            if onto is not None:
                got = got - onto[e].double()
            summed = min(rows, 2048)  # in one accumulator: longer experts have spans
            limit = 1e-4 + 2e-6 * summed + (3e-3 if dw.dtype == BF16 else 0)
            assert (got - exact).norm() <= limit * exact.norm(), (e, rows)


@pytest.mark.parametrize("counts", [UNEVEN, OVERFULL], ids=["uneven", "overfull"])
@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize("transposed", [False, True], ids=["mn", "nm"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("m", "n"), [(272, 144), (512, 256)])
def test_exact_sums(counts, gathered, transposed, dtype, m, n):
    problem = Problem(counts, m, n, gathered)
    problem.check(problem.run(dtype, transposed))


@pytest.mark.parametrize("counts", [UNEVEN, OVERFULL], ids=["uneven", "overfull"])
@pytest.mark.parametrize("transposed", [False, True], ids=["mn", "nm"])
def test_added_to_a_buffer(counts, transposed):
    problem = Problem(counts, 272, 144)
    onto = torch.randn(len(counts), 272, 144, device="cuda")
    onto *= problem.scale[:, None]  # of the order of the sums, so that little is rounded
    dw = problem.run(FP32, transposed, onto)
    problem.check(dw, onto)
    empty = torch.tensor(counts) == 0
    assert empty.any() and torch.equal(dw[empty], onto[empty])


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize("transposed", [False, True], ids=["mn", "nm"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_each_row_meets_its_own(gathered, transposed, dtype):
    """Rows that are one-hot: row i of an expert's gradient is its i-th row of the other operand."""
    problem = Problem((130, 0, 272, 1, 255, 128), 272, 144, gathered)
    for e in range(len(problem.counts)):
        rows = problem.rows(e)
        token = rows if not gathered else problem.p.row_token[rows].long()
        one_hot = torch.eye(272, device="cuda")[: problem.counts[e]].to(E4M3)
        problem.tokens8.view(torch.uint8)[token] = one_hot.view(torch.uint8)
    dw = problem.run(dtype, transposed)
    for e, count in enumerate(problem.counts):
        want = problem.other[problem.rows(e)].float() * problem.scale[e]
        assert torch.equal(dw[e, :count].float(), want)
        assert (dw[e, count:] == 0).all()


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "sorted"])
def test_nan_stays_in_its_expert(gathered):
    problem = Problem((130, 0, 257, 1, 100), 272, 144, gathered)
    for e in (2, 3):
        rows = problem.rows(e)
        token = rows if not gathered else problem.p.row_token[rows].long()
        problem.tokens8.view(torch.uint8)[token] = NAN
    nan = problem.run().isnan()
    assert nan[2].all() and nan[3].all() and not nan[[0, 1, 4]].any()


@pytest.mark.parametrize("transposed", [False, True], ids=["mn", "nm"])
def test_several_tiles_for_each_program(transposed):
    problem = Problem([97 + 8 * e for e in range(24)], 1536, 512)
    problem.check(problem.run(BF16, transposed))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("transposed", [False, True], ids=["mn", "nm"])
def test_experts_with_tiles_for_all_programs(transposed, dtype):
    """Then there are no spans: another kernel."""
    problem = Problem((300, 0, 129, 1000), 4096, 2064)
    problem.check(problem.run(dtype, transposed))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_no_rows(dtype):
    problem = Problem((0, 0, 0), 272, 144)
    assert (problem.run(dtype) == 0).all()


def test_reference():
    """The reference, which reads the transposed operand, computes the same."""
    problem = Problem(UNEVEN, 272, 144)
    other_t = reference._transposed(problem.other, problem.p)
    problem.check(reference.sum_of_products(problem.tokens8, other_t, problem.scale, problem.p))
