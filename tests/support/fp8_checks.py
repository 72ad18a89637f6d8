"""The FP8 quantizers in poisoned memory against `reference.fp8` on the CPU, bit by bit."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from helpers import run_poisoned

from sonicmoe.enums import ActivationType
from sonicmoe.launch import fp8_scales, grouped_gemm, quantize
from sonicmoe.layer.run import permute
from sonicmoe.reference import fp8, routing
from sonicmoe.reference import grouped_gemm as reference_gemm
from sonicmoe.reference.fp8_scales import dz_scales
from sonicmoe.tensors import Kept, Permutation, Weight

E4M3 = torch.float8_e4m3fn
# Of `check_scales`: what may hold NaN or infinity.
SCALES_ARGUMENTS = ["scores", "do_scale", "do_norm", "zmax", "zmax_columns", "a_scale", "x_scale"]
SCALES_ARGUMENTS += ["w_scale", "w_norm"]
FIELDS = ("w8", "w8_t", "w_scale", "w_norm")
COUNTS = (0, 1, 127, 128, 129, 0)  # rows of each expert, around one tile
KINDS = (  # activation and order of gate and up: what the layouts of Z differ in
    (ActivationType.SWIGLU, "interleaved"),
    (ActivationType.GEGLU, "concatenated"),
    (ActivationType.RELU_SQ, "interleaved"),
)


def same(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    """The same bits, and NaN of any bits where NaN is wanted."""
    got, as_int = got.cpu(), torch.uint8 if want.dtype == E4M3 else torch.int32
    assert got.dtype == want.dtype and got.shape == want.shape, name
    assert got.is_contiguous(), name
    number = ~want.isnan()
    assert torch.equal(~got.isnan(), number), f"{name}: NaN"
    different = (got.view(as_int) != want.view(as_int)) & number
    assert not different.any(), f"{name}: {int(different.sum())} differ"


def check_rows(x: torch.Tensor) -> None:
    want = fp8.quantize_rows(x.cpu(), True)
    got = run_poisoned(
        lambda: dict(zip(("q", "scale", "norm"), quantize.quantize_rows(x, True), strict=True)),
        x.device.type,
    )
    same(got["q"], want[0], "q")
    same(got["scale"], want[1], "scale")
    near(got["norm"], want[2], "norm")


def check_weight(w: torch.Tensor) -> None:
    want = fp8.quantize_weight(w.cpu(), True, True)
    want = dict(zip(FIELDS, want, strict=True))
    for transposed, norms in ((True, True), (True, False), (False, False)):

        def quantized(*options):
            found = zip(FIELDS, quantize.quantize_weight(w, *options), strict=True)
            return {name: t for name, t in found if t is not None}

        got = run_poisoned(partial(quantized, transposed, norms), w.device.type)
        left_out = {"w8_t": not transposed, "w_norm": not norms}
        assert list(got) == [name for name in want if not left_out.get(name)]
        for name in got:
            (near if name == "w_norm" else same)(got[name], want[name], name)
        given = [got.get(name) for name in want]
        poisoned = (None if t is None else torch.empty_like(t).fill_(torch.nan) for t in given)
        buffers = [*poisoned]
        w8, w8_t, w_scale, w_norm = buffers
        quantize.quantize_weight_into(w8, w8_t, w_scale, w_norm, w)
        for name, t, buffer in zip(want, given, buffers, strict=True):
            if t is not None and buffer is not None:
                same(buffer, t.cpu(), f"{name}, given")
    for name, transposed in (("w8", False), ("w8_t", True)):

        def again(transposed: bool) -> dict[str, torch.Tensor]:
            return {"q": quantize.quantize_again(w.mT if transposed else w, got["w_scale"])}

        found = run_poisoned(partial(again, transposed), w.device.type)["q"]
        same(found, want[name], f"{name}, again")


def near(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    """Equal but for the order of operations in fp32."""
    assert got.is_contiguous(), name
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=0, equal_nan=True, msg=name)


def check_scales_of_weights(sizes: Sequence[tuple[int, int]], dtype, device: str) -> None:
    """Two weights, each changed in one expert: all of it and a column, which every sample finds,
    and a value, which one sample finds."""
    weights = [torch.randn(3, *size, device=device).to(dtype) for size in sizes]
    weights[0][2, 0, 0] = torch.nan
    quantized = [fp8.quantize_weight(w, False, False) for w in weights]
    wants = [scale.cpu() for _, _, scale, _ in quantized]

    samples = torch.tensor([quantize.samples_of(*size) for size in sizes])[:, None]
    generation = torch.full((1,), 7, dtype=torch.int32, device=device)
    flags = torch.zeros(2, dtype=torch.int32, pin_memory=device != "cpu")
    address = torch.tensor([flags.data_ptr()], device=device)

    def checked(sample: int) -> dict[int, torch.Tensor]:
        (w1, w2), ((q1, _, scale1, _), (q2, _, scale2, _)) = weights, quantized
        flags.zero_()

        def step() -> dict[int, torch.Tensor]:
            now = (sample % samples).expand(2, 3).to(device, torch.int32).contiguous()
            found = quantize.checked_scales(
                w1, q1, scale1, w2, q2, scale2, now, generation, address
            )
            after = ((sample + 1) % samples).expand(2, 3).to(torch.int32).contiguous()
            same(now, after, "sample")
            return dict(enumerate(found))

        return run_poisoned(step, device)

    def check(sample: int = 0, raised: Sequence[int] = (0, 0)) -> None:
        for i, got in checked(sample).items():
            same(got, wants[i], f"scale {i}")
        assert flags.tolist() == list(raised)

    for sample in (0, 1, 12345):
        check(sample)
    for which, expert in ((0, 0), (1, 2)):
        w, scale = weights[which], wants[which]
        part = w[expert]
        before = part.clone()
        for place in ((), (slice(None), part.shape[1] // 3)):
            part[place] += 1
            wants[which] = torch.where(torch.arange(3) == expert, torch.nan, scale)
            check(expert, [7 * (i == which) for i in range(2)])
            part.copy_(before)
        part[3, 5] += 1
        found = [checked(i)[which][expert].isnan() for i in range(quantize.samples_of(*part.shape))]
        assert sum(found) == 1
        part.copy_(before)
        wants[which] = scale
        check()
    weights[0][2, 0, 0] = 0  # finite again, though it stays NaN
    check(5, (7, 0))


def all_bf16() -> torch.Tensor:
    """All bf16 values of at most 448, in rows that begin with 448: their scale is 1."""
    positive = torch.arange(0x43E0 + 1, dtype=torch.int16).view(torch.bfloat16)
    every = torch.cat([positive, -positive])
    columns = torch.nn.functional.pad(every, (0, -len(every) % 4095)).view(-1, 4095)
    return torch.nn.functional.pad(columns, (1, 0), value=448.0)


def around_ties() -> torch.Tensor:
    """(1, N, 4) fp32: the e4m3 values, the midpoints, and the fp32 values next to both."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()  # up to 448
    values = torch.cat([values, (values[1:] + values[:-1]) / 2])
    values = torch.cat([values, -values, torch.zeros(2)])  # a multiple of four
    inward = values.nextafter(torch.zeros(()))
    outward = values.nextafter(2 * values).clamp(-448, 448)
    return torch.stack([values, inward, outward, values], -1)[None]


def make_permutation(counts, is_gathered: bool, dropped: int) -> Permutation:
    """Experts with these rows, of tokens with five slots, and `dropped` rows of no expert."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = torch.cat([ids, torch.full((dropped,), -1)])
    if not is_gathered:
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        return Permutation.of_sorted_rows(*routing.tiles(starts, len(ids), 128), 128)
    p = permute(ids[torch.randperm(len(ids))].view(-1, 5), len(counts), backend="torch")
    assert p.row_token is not None and p.row_slot is not None
    for rows in (p.row_token, p.row_slot):
        rows[sum(counts) :] = 2**30
    return p


def check_scales(
    counts,
    activation: ActivationType = ActivationType.SWIGLU,
    *,
    gate_up: str = "interleaved",
    is_gathered: bool = True,
    with_scores: bool = True,
    columns: bool = True,
    inner: int = 272,
    dropped: int = 15,
    bad: str | None = None,
    at_the_end: bool = False,
    device: str = "cpu",
) -> None:
    """`dz_scales` of random magnitudes; `bad` is an argument with NaN and infinity in it, or with
    NaN at its end."""
    rows, experts, blocks = sum(counts) + dropped, len(counts), -(-inner // 128)
    tokens = rows // 5 if is_gathered else rows

    def powers(*shape, low=-20, high=20):
        return torch.randint(low, high, shape).float().exp2() * (1 + torch.rand(shape))

    def scales(*shape, low=-20, high=20):
        return torch.randint(low, high, shape).float().exp2()

    given: dict[str, Any] = {
        "scores": torch.randn(tokens, rows // max(tokens, 1)) if with_scores else None,
        "do_scale": scales(tokens, low=-70, high=30),
        "do_norm": powers(tokens, low=-60, high=30),
        "zmax": powers(blocks, rows),
        "zmax_columns": powers(experts, inner),
        "a_scale": scales(blocks, rows),
        "x_scale": scales(tokens, low=-30, high=30),
        "w_scale": scales(experts),
        "w_norm": powers(experts, inner),
    }
    for name in ("zmax", "a_scale"):
        given[name][:, sum(counts) :] = torch.nan
    if bad is not None:
        flat = given[bad].view(-1)
        if at_the_end:
            flat[-1] = torch.nan
        else:
            flat[torch.randperm(len(flat))[:3]] = torch.tensor([torch.nan, -torch.nan, torch.inf])
    p = make_permutation(counts, is_gathered, dropped)

    def arguments(device):
        there = {name: None if t is None else t.to(device) for name, t in given.items()}
        maps = [None if t is None else t.to(device) for t in p[:-1]]
        z = torch.empty(rows, 2 * inner if activation.is_gated else inner, device=device)
        kept = Kept(z, *(there.pop(name) for name in ("zmax", *Kept._fields[2:])))
        w = Weight(None, w_scale=there.pop("w_scale"), w_norm=there.pop("w_norm"))
        on_device = Permutation._make([*maps, p.tile_m])
        return *there.values(), kept, w, on_device, activation, gate_up, columns

    want = dz_scales(*arguments("cpu"))
    there = arguments(device)

    def scaled():
        found = fp8_scales.dz_scales(*there)._asdict()
        return {name: t for name, t in found.items() if t is not None}

    got = run_poisoned(scaled, device)
    expected = {name: t for name, t in want._asdict().items() if t is not None}
    assert list(got) == list(expected)
    used = sum(counts)
    factors = zip(got.pop("row_factors"), expected.pop("row_factors"), strict=True)
    for i, (mine, theirs) in enumerate(factors):
        (near if i == 2 else same)(mine[:used], theirs[:used], f"row factor {i}")
    near(got.pop("dz_scale")[:used], expected.pop("dz_scale")[:used], "dz_scale")
    for name in got if rows else ("dz_t_scale", "a_t_scale"):
        near(got[name], expected[name], name)
    bad_ones = [t for t in want if t is not None and t.isnan().any()]
    assert bad is None or bad_ones, "nothing was bad"


def check_dequantized(rows: int, columns: int, device: str = "cpu", blocks: bool = False) -> None:
    q = (32 * torch.randn(rows, columns)).clamp(-448, 448).to(E4M3)
    scale = torch.randint(-70, 30, (-(-columns // 128), rows) if blocks else (rows,)).float().exp2()
    scale.view(-1)[:1] = torch.nan
    per_column = scale.T.repeat_interleave(128, 1)[:, :columns] if blocks else scale[:, None]
    got = run_poisoned(
        lambda: {"rows": quantize.dequantize_rows(q.to(device), scale.to(device))}, device
    )["rows"].cpu()
    assert got.dtype == torch.bfloat16 and got.is_contiguous()
    torch.testing.assert_close(
        got.double(), q.double() * per_column, rtol=0, atol=0, equal_nan=True
    )


def check_bias_gradient(device: str = "cpu") -> None:
    """Of rows in e4m3 with a scale each; what lies past those of experts may be anything."""
    p, used, columns = make_permutation(COUNTS, is_gathered=True, dropped=15), sum(COUNTS), 144
    q = (32 * torch.randn(used + 15, columns)).clamp(-448, 448).to(E4M3)
    scale = torch.randint(-9, 3, (used + 15,)).float().exp2()
    q.view(torch.uint8)[used:], scale[used:] = 0x7F, torch.nan
    want = reference_gemm.bias_gradient(q, scale, p, False, torch.float32)
    maps = [None if t is None else t.to(device) for t in p[:-1]]
    there = (q.to(device), scale.to(device), Permutation._make([*maps, p.tile_m]))
    got = run_poisoned(
        lambda: {"db1": grouped_gemm.bias_gradient(*there, False, torch.float32)}, device
    )["db1"]
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-3)


def check_scored_activation(
    activation: ActivationType, gate_up: str, is_gathered: bool,
    z_dtype: torch.dtype = torch.bfloat16, with_scores: bool = True, device: str = "cpu",
) -> None:  # fmt: skip
    """A' of the rows of experts; what lies past them may be anything."""
    p, used, inner = make_permutation(COUNTS, is_gathered, dropped=15), sum(COUNTS), 144
    z = torch.randn(used + 15, 2 * inner if activation.is_gated else inner)
    z = z.to(z_dtype)
    z.view(torch.uint8 if z_dtype == E4M3 else torch.int16)[used:] = -1  # NaN
    zmax = torch.rand(2, used + 15) * 2.0 ** torch.randint(-9, 9, (2, used + 15))
    zmax[:, used:] = torch.nan
    scores = torch.randn(used + 15) if with_scores else None
    want = fp8.scored_activation(z, zmax, scores, p, activation, gate_up)[:used]
    maps = [None if t is None else t.to(device) for t in p[:-1]]
    there: list[Any] = [z.to(device), zmax.to(device)]
    there += [None if scores is None else scores.to(device)]
    there += [Permutation._make([*maps, p.tile_m]), activation, gate_up]
    got = run_poisoned(lambda: {"a": quantize.scored_activation(*there)}, device)["a"].cpu()
    torch.testing.assert_close(got[:used], want, rtol=2**-7, atol=1e-6)
