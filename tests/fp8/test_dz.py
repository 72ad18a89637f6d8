"""The dZ GEMM in FP8 on a GPU, byte by byte against plain PyTorch."""

import math
from itertools import product

import pytest
import torch
from helpers import ACTIVATIONS, GATED, poisoned

from sonicmoe import ActivationType
from sonicmoe.launch import fp8_dz
from sonicmoe.layer.run import permute
from sonicmoe.reference import fp8 as reference
from sonicmoe.reference.routing import tile_table
from sonicmoe.tensors import NO_LORA, DzResults, DzScales, Lora, Permutation, Weight

pytestmark = pytest.mark.gpu
CUDA, TILE = "cuda", 128
E4M3 = torch.float8_e4m3fn
ALL = DzResults(dz=True, dz_t=True, a=True, dscores=True)
COUNTS = (0, 1, 127, 128, 0, 129, 1000)  # 1385 rows: 277 tokens in five experts each
TAIL = 75  # sorted rows of no expert


def make(
    hidden, inner, activation, gathered, counts=COUNTS, per_token=5, z_dtype=torch.bfloat16,
    rank=0, with_bias=False,
):  # fmt: skip
    """The arguments of `dz_gemm` before the activation.

    dO and W2 are small integers, V and A2 small multiples of 1/4, so that the tensor cores sum
    without rounding; the factors keep every result below 448, where the conversions of PyTorch and
    of the kernel part.
    """
    torch.manual_seed(0)
    experts, used = len(counts), sum(counts)
    ids = torch.arange(experts).repeat_interleave(torch.tensor(counts))
    if gathered:
        rows, tokens = used, used // per_token
        ids = ids[torch.randperm(rows)].view(tokens, per_token).int()
        p = permute(ids.to(CUDA), experts, backend="triton")
        scores = torch.randn(tokens, per_token, device=CUDA)
    else:
        rows = tokens = used + TAIL
        start = torch.tensor([0, *counts]).cumsum(0).int()
        table = tile_table(start, rows, TILE).int()
        p = Permutation.of_sorted_rows(start.to(CUDA), table.to(CUDA), TILE)
        scores = torch.randn(rows, device=CUDA)

    def integers(*shape):
        return torch.randint(-2, 3, shape, device=CUDA).float().to(E4M3)

    z_columns = 2 * inner if activation.is_gated else inner
    z = torch.randn(rows, z_columns, device=CUDA).clamp(-4, 4)
    zmax = 448 * 2.0 ** torch.randint(-2, 2, (math.ceil(inner / 128), rows), device=CUDA)
    if z_dtype == E4M3:
        z /= 4  # the scales of zmax multiply it by up to 2
    factors = torch.exp2(torch.randint(-2, 2, (5, rows), device=CUDA).float())
    columns = torch.exp2(torch.randint(-2, 1, (experts, inner), device=CUDA).float())
    blocks = torch.exp2(
        torch.randint(-2, 1, (experts, math.ceil(inner / 128)), device=CUDA).float()
    )
    factors[0] /= 4 * math.sqrt(hidden)
    factors[0] = torch.exp2(factors[0].log2().round())
    factors[1] = torch.rand(rows, device=CUDA) - 0.5  # scores
    weights = integers(experts, inner, hidden)
    scales = DzScales(factors, columns, blocks, factors[0], None, None)
    dout, b2 = torch.randn(tokens, hidden, device=CUDA).bfloat16(), None
    if with_bias:
        b2 = torch.randn(experts, hidden, device=CUDA).bfloat16()
    lora = NO_LORA
    if rank:
        sizes = ((rows, rank), (experts, inner, rank))
        lora = Lora(*(torch.randint(-2, 3, size, device=CUDA).bfloat16() / 4 for size in sizes))
        lora.lora_u[used:] = math.nan
    given = (integers(tokens, hidden), scales, z.to(z_dtype), zmax, Weight(None, weights))
    return *given, (dout, b2), scores, lora, p


def steps(t: torch.Tensor) -> torch.Tensor:
    """The place of each e4m3 among all of them, by size."""
    byte = t.view(torch.uint8).int()
    return torch.where(byte < 128, byte, 128 - byte)


def check_bytes(got, want, name):
    assert torch.equal(got.isnan(), want.isnan()), name
    apart = (steps(got) - steps(want)).abs()
    assert (apart <= 1).all(), name
    assert (apart > 0).sum() <= 0.005 * apart.numel(), name


def columns_of_tiles(p: Permutation, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of the columns of dZᵀ that belong to tiles, and of those with a row."""
    tiles, used = torch.zeros(2, padded // TILE, TILE, dtype=torch.bool)
    row = reference.row_of_column()
    first = (reference.first_padded(p.expert_start) // TILE).tolist()
    for tile, rows in zip(first, p.expert_start.diff().tolist(), strict=True):
        for i in range(math.ceil(rows / TILE)):
            tiles[tile + i] = True
            used[tile + i] = row < rows - i * TILE
    return tiles.flatten().to(CUDA), used.flatten().to(CUDA)


def check(given, activation, gate_up, needs=ALL):
    p = given[-1]
    want = reference.dz_gemm(*given, activation, gate_up, needs)
    with poisoned():
        got = fp8_dz.dz_gemm(*given, activation, gate_up, needs)
    assert [t is None for t in got] == [t is None for t in want]
    end = int(p.expert_start[-1])
    if needs.dz:
        check_bytes(got[0][:end], want[0][:end], "dZ")
    for name, mine, other in (("dZᵀ", got[1], want[1]), ("A'ᵀ", got[2], want[2])):
        if mine is None:
            continue
        assert mine.shape == other.shape
        tiles, used = columns_of_tiles(p, mine.shape[1])
        check_bytes(mine[:, used], other[:, used], name)
        assert (mine.view(torch.uint8)[:, tiles & ~used] == 0).all(), f"{name} past an expert's end"
        assert mine[:, ~tiles].isnan().all(), f"{name} between tiles was written"
    if needs.dscores:
        typical = want[3].square().nanmean().sqrt()
        torch.testing.assert_close(
            got[3], want[3], rtol=1e-3, atol=1e-4 * float(typical), equal_nan=True
        )
    return got


@pytest.mark.parametrize("z_dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("sizes", [(272, 144), (1536, 256), (528, 592)], ids=str)
@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_sizes(sizes, gathered, gate_up, z_dtype):
    activation = ActivationType.SWIGLU
    check(make(*sizes, activation, gathered, z_dtype=z_dtype), activation, gate_up)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.value)
@pytest.mark.parametrize("z_dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_activations(activation, gate_up, z_dtype):
    if activation in GATED or gate_up == "interleaved":
        check(make(272, 144, activation, True, z_dtype=z_dtype), activation, gate_up)


@pytest.mark.parametrize("rank", [8, 40, 72])
@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize(
    ("activation", "gate_up", "z_dtype"),
    [
        (ActivationType.SWIGLU, "interleaved", torch.bfloat16),
        (ActivationType.SWIGLU_CLAMPED, "concatenated", E4M3),
        (ActivationType.RELU, "interleaved", torch.bfloat16),
    ],
)
def test_adapters_and_biases(activation, gate_up, z_dtype, gathered, rank):
    """One step of 32 columns of V and A2, or more; b2 joins dscores alone."""
    options = {"z_dtype": z_dtype, "with_bias": True}
    check(make(528, 592, activation, gathered, rank=rank, **options), activation, gate_up)


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize("needs", list(product([True, False], repeat=4)), ids=str)
def test_only_what_is_needed(needs, gathered):
    dz, _, _, dscores = needs
    activation = ActivationType.SWIGLU
    given = make(272, 144, activation, gathered)
    needed = DzResults(*needs)
    got = check(given, activation, "interleaved", needed)
    every = fp8_dz.dz_gemm(*given, activation, "interleaved", ALL)
    end = int(given[-1].expert_start[-1])
    if dz:
        assert torch.equal(got[0][:end].view(torch.uint8), every[0][:end].view(torch.uint8))
    if dscores:
        assert torch.equal(got[3], every[3])


@pytest.mark.parametrize(
    "counts", [(0,) * 4, (1,) * 300, (0, 4000, 0), (640,) * 40], ids=lambda c: f"{len(c)}x{max(c)}"
)
@pytest.mark.parametrize("activation", [ActivationType.SWIGLU, ActivationType.RELU])
def test_other_routings(counts, activation):
    """No rows, tiles of one row, one expert, several tiles per program."""
    check(make(272, 592, activation, False, counts), activation, "interleaved")


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_nan_stays_in_its_row(gathered, gate_up):
    """Each expert's first row is NaN: the last tile of the expert before it must not see it."""
    activation = ActivationType.SWIGLU
    given = make(272, 144, activation, gathered)
    _, scales, z, *_, p = given
    factors = scales.row_factors
    row = p.expert_start[:-1].long()[torch.tensor(COUNTS, device=CUDA) > 0]
    z[row] = math.nan
    factors[:, row] = math.nan
    if not gathered:
        for t in (given[0].view(torch.uint8), z, factors.T):
            t[sum(COUNTS) :] = 0x7F if t.dtype == torch.uint8 else math.nan
    dz8, *_ = check(given, activation, gate_up)
    assert dz8[row].isnan().all()
