"""Adapters on frozen experts against the layer with W + scale·B·A written out."""

import pytest
import torch
from adapters import LAYOUTS, TENSORS, adapter, check_layout, check_lora, written_out
from devices import on, values_on
from helpers import ACTIVATIONS, Case, make_inputs, poisoned, same_bits
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import sonicmoe
from sonicmoe import ActivationType, LowRank, experts
from sonicmoe.launch import grouped_gemm
from sonicmoe.tensors import DzResults, Lora, Permutation, Weight
from sonicmoe.tuning import Target, tile_m

CASES = [
    Case("24,16,8,4,2", torch.float64),
    Case("24,16,8,4,2", torch.float64, bias=True, gate_up="concatenated", transposed=True),
    Case("24,16,8,4,2", torch.float64, bias=True, routing="dropped"),
    Case("24,16,8,4,2", torch.float64, ActivationType.SWIGLU_CLAMPED, routing="one_expert"),
    Case("24,16,8,4,2", torch.float64, ActivationType.RELU_SQ, routing="all_dropped"),
    Case("0,16,8,4,2", torch.float64),
]


@pytest.mark.tries("LoRA", "every gradient against W + scale·B·A")
@pytest.mark.parametrize("rank", [8, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_layer_written_out(case, rank):
    given = make_inputs(case)
    given.scores = given.scores.double()
    lora1, lora2 = adapter(given.w1, rank, 0.5), adapter(given.w2, rank, 2.0)
    arguments = given.arguments()
    leaves = [
        given.x.requires_grad_(), given.scores.requires_grad_(),
        lora1.a, lora1.b, lora2.a, lora2.b,
    ]  # fmt: skip
    with poisoned():
        got = experts(**arguments, lora1=lora1, lora2=lora2, **case.options)
        got_grads = torch.autograd.grad(got, leaves, given.dout)
    arguments |= {"w1": written_out(given.w1, lora1), "w2": written_out(given.w2, lora2)}
    want = sonicmoe.experts(**arguments, **case.options)
    torch.testing.assert_close(got, want)
    for a, b in zip(got_grads, torch.autograd.grad(want, leaves, given.dout), strict=True):
        torch.testing.assert_close(a, b)


TINY = "33,24,8,3,2"
OF_ACTIVATIONS = [
    Case(TINY, torch.bfloat16, activation, not transposed, gate_up, transposed, "dropped")
    for i, activation in enumerate(ACTIVATIONS)
    for transposed in [i % 2 == 1]
    for gate_up in ["concatenated" if transposed and activation.is_gated else "interleaved"]
]


@values_on(
    "case, rank",
    interpreter=[
        *((case, 16) for case in OF_ACTIVATIONS),
        *(  # less than a block, one that is no power of two, more than a block
            (Case("40,24,16,3,2", dtype, bias=True), rank)
            for rank, dtype in ((3, torch.float16), (24, torch.float32), (40, torch.float16))
        ),
        (Case("0,16,8,3,2", bias=True, routing="uniform"), 8),
        (Case("6,16,8,3,2", bias=True, routing="all_dropped"), 8),
        (Case("13,40,16,5,2", bias=True, routing="empty_experts"), 8),
        *(  # H and N past the widest tile, neither a multiple of it
            (Case("24,264,136,4,2", bias=True, gate_up=gate_up), 16)
            for gate_up in ("interleaved", "concatenated")
        ),
    ],
    cuda=[
        (Case("600,264,136,40,2", bias=True, routing="dropped"), 16),
        (Case("600,264,136,40,2", bias=True, gate_up="concatenated", routing="dropped"), 16),
        (Case("3000,512,384,5,2", transposed=True), 8),
        (Case("3000,512,384,5,2", gate_up="concatenated", transposed=True), 72),
        (Case("777,1536,256,6,3", bias=True, routing="one_expert"), 64),
        (Case("777,1536,256,6,3", torch.float16, activation=ActivationType.GEGLU), 3),
        (Case("777,136,1096,6,3", activation=ActivationType.RELU_SQ, bias=True), 16),
        (Case("777,136,1096,6,3", activation=ActivationType.SWIGLU_CLAMPED, bias=True), 128),
        (Case("0,264,136,4,2"), 16),
    ],
)
def test_every_gradient_is_within_the_budget(case, rank, device):
    """Ranks below, at and above the blocks in which they are multiplied."""
    check_lora(case, rank, device, "triton")


@values_on(
    "shape, routing, target",
    interpreter=[(TINY, "dropped", Target(arch, 4)) for arch in (80, 86)],
    cuda=[("600,264,136,40,2", "zipf", Target(arch, 132)) for arch in (80, 100)],
)
def test_configurations_of_other_devices(shape, routing, target, device, monkeypatch):
    """Plain Triton's kernels, on tiles that a Hopper GPU has memory for as well."""
    monkeypatch.setattr(grouped_gemm, "target_of", lambda t: target)
    case = Case(shape, bias=True, gate_up="concatenated", routing=routing)
    check_lora(case, 16, device, "triton")


@on("cuda")
def test_bitwise_the_same_every_time():
    first, second = (
        check_lora(Case("600,264,136,40,2", gate_up="concatenated"), 16, "cuda") for _ in range(2)
    )
    same_bits(first, second)


@pytest.mark.parametrize(
    ("arch", "case", "rank"),
    [
        (90, Case("32,1536,256,2,2", gate_up="concatenated"), 16),
        (90, Case("32,1536,256,2,2", activation=ActivationType.GEGLU, bias=True), 64),
        (90, Case("32,264,136,2,2", activation=ActivationType.SWIGLU_CLAMPED, bias=True,
                  transposed=True), 32),
        (90, Case("32,264,136,2,2", gate_up="concatenated", transposed=True), 72),
        (90, Case("32,264,136,2,2", torch.float16, activation=ActivationType.GELU, bias=True), 8),
        (90, Case("32,264,72,2,2", torch.float32, bias=True), 16),
        (80, Case("32,1536,256,2,2", bias=True), 16),
        (100, Case("32,1536,256,2,2", bias=True, activation=ActivationType.SWIGLU_CLAMPED), 16),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_compile_without_spills(arch, case, rank):
    pytest.importorskip("triton", reason="kernels need Triton, which is for Linux")
    from machine_code import compiling, report

    from sonicmoe.launch import grouped_gemm

    given, rows = make_inputs(case), 64
    n, i = given.w1.shape[1], given.w2.shape[2]
    act, gate_up = case.activation, case.gate_up
    x, w1, w2 = given.x, Weight(given.w1), Weight(given.w2)

    def new(*shape):
        return torch.zeros(shape, dtype=case.dtype)

    u, maps = new(rows, rank), torch.zeros(rows, dtype=torch.int32)
    start, tiles = maps[:3], torch.zeros(4, 4, dtype=torch.int32)
    p = Permutation(maps, maps, maps, None, None, start, tiles, tile_m(case.dtype.itemsize))
    down, up, across = (new(2, k, rank) for k in (x.shape[1], n, i))
    with compiling(arch) as compiled:
        z, a, _ = grouped_gemm.up(x, w1, given.b1, Lora(u, up), p, act, gate_up, x.dtype)
        grouped_gemm.down(a, w2, given.b2, None, Lora(u, down), p)
        grouped_gemm.down(z, w1.mT, None, None, Lora(u, down), p, kernel="dx")
        of_w2 = (w2, given.b2, given.scores, Lora(u, across))
        grouped_gemm.dz(x, z, None, *of_w2, p, act, gate_up, DzResults(True, False, True, True))
    gemms, narrow = 0, case.dtype.itemsize == 2
    for kernel in compiled:
        found, name = report(kernel), kernel.metadata.name
        assert found["spills"] == 0, f"{name} spills: {found}"
        if name.endswith(("up_kernel", "gemm_kernel", "dz_kernel")):
            gemms += 1
            assert ("hopper" in name and found["wgmma"] > 0) == (arch == 90 and narrow), found
    assert gemms == 4


def test_a_frozen_input_pays_for_no_gradient():
    case = Case("12,64,32,8,2", torch.float32)
    given, p = make_inputs(case), case.problem
    lora1, lora2 = adapter(given.w1, 8, 0.5), adapter(given.w2, 8, 2.0)

    def flops(x):
        with FlopCounterMode(display=False) as counter:
            out = experts(**given.arguments() | {"x": x}, lora1=lora1, lora2=lora2)
            torch.autograd.grad(out, [lora1.a, lora1.b, lora2.a, lora2.b], given.dout)
        return counter.get_total_flops()

    x = given.x.detach()
    assert flops(x.clone().requires_grad_()) - flops(x) == 2 * p.R * p.H * (p.N + 8)


def test_a_checkpoint_computes_no_output_again():
    case = Case("12,64,32,8,2", torch.float32)
    given, p = make_inputs(case), case.problem
    lora1, lora2 = adapter(given.w1, 8, 0.5), adapter(given.w2, 8, 2.0)

    def run(x):
        return experts(**given.arguments() | {"x": x}, lora1=lora1, lora2=lora2)

    x, grads, flops = given.x.requires_grad_(), [], []
    for forward in (run, lambda x: checkpoint(run, x, use_reentrant=False)):
        with FlopCounterMode(display=False) as counter:
            out = forward(x)
            grads.append(torch.autograd.grad(out, [x, *lora1[:2], *lora2[:2]], given.dout))
        flops.append(counter.get_total_flops())
    same_bits(dict(enumerate(grads[0])), dict(enumerate(grads[1])))
    up, low_ranks = 2 * p.R * p.H * p.N, 2 * p.R * 8 * (p.H + p.N + p.I)
    assert flops[1] - flops[0] == up + low_ranks


def test_no_weight_is_kept_or_formed():
    """Beside the frozen weights themselves nothing of their size is kept."""
    case = Case("4,64,32,8,2", torch.float32)
    given, saved = make_inputs(case), []
    loras = adapter(given.w1, 8, 1.0), adapter(given.w2, 8, 1.0)

    def keep(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        experts(**given.arguments(), lora1=loras[0], lora2=loras[1])
    frozen = {given.w1.data_ptr(), given.w2.data_ptr()}
    others = [t for t in saved if t.data_ptr() not in frozen]
    assert max(t.numel() for t in others) < given.w2.numel()


def test_weights_must_be_frozen():
    given = make_inputs(CASES[0])
    given.w1.requires_grad_()
    lora1, lora2 = adapter(given.w1.detach(), 8, 1.0), adapter(given.w2, 8, 1.0)
    with pytest.raises(ValueError, match="w1: expected a frozen tensor"):
        experts(**given.arguments(), lora1=lora1, lora2=lora2)


def test_factors_must_fit():
    given = make_inputs(CASES[0])
    lora1, lora2 = adapter(given.w1, 8, 1.0), adapter(given.w2, 8, 1.0)
    with pytest.raises(ValueError, match="a of lora1: expected shape"):
        experts(**given.arguments(), lora1=lora2, lora2=lora1)


@values_on(
    "tensors, layout",
    cpu=[((tensor,), layout) for tensor in TENSORS for layout in LAYOUTS],
    interpreter=[(TENSORS, layout) for layout in ("strided", "expanded", "first dimension last")],
)
def test_tensors_in_any_layout(tensors, layout, backend):
    check_layout(tensors, layout, backend)


@pytest.mark.parametrize("without", ["lora1", "lora2", "both"])
def test_none_is_no_adapter(without):
    given = make_inputs(CASES[1])
    given.scores = given.scores.double()
    loras = {"lora1": adapter(given.w1, 8, 0.5), "lora2": adapter(given.w2, 8, 2.0)}
    loras |= dict.fromkeys(loras, None) if without == "both" else {without: None}
    leaves = [given.x.requires_grad_(), *(t for lora in loras.values() if lora for t in lora[:2])]
    got = experts(**given.arguments(), **loras, **CASES[1].options)
    weights = {
        w: getattr(given, w) if lora is None else written_out(getattr(given, w), lora)
        for w, lora in zip(("w1", "w2"), loras.values(), strict=True)
    }
    want = sonicmoe.experts(**given.arguments() | weights, **CASES[1].options)
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(out, leaves, given.dout) for out in (got, want))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


WRONG_ADAPTERS = {
    "no a": (lambda a, b: (None, b), "a of lora1: expected a tensor, got NoneType"),
    "no b": (lambda a, b: (a, None), "b of lora1: expected a tensor, got NoneType"),
    "rank 0": (lambda a, b: (a[:0], b[:, :0]), "a of lora1: expected a positive multiple"),
    "rows that E does not divide": (
        lambda a, b: (a[:-1], b[:, :-1]), "a of lora1: expected a positive multiple of E"),
    "a by expert": (lambda a, b: (a.view(4, 8, -1), b), "a of lora1: expected 2 dimensions"),
    "b by expert": (lambda a, b: (a, b.view(4, 8, -1)), "b of lora1: expected 2 dimensions"),
    "another rank of b": (lambda a, b: (a, b[:, :16]), "b of lora1: expected shape"),
    "transposed b": (lambda a, b: (a, b.T), "b of lora1: expected shape"),
    "integers": (lambda a, b: (a.long(), b), "a of lora1: expected bfloat16, float16"),
    "another device": (lambda a, b: (a, b.to("meta")), "b of lora1: expected the device"),
    "scale": (lambda a, b: (a, b, "2"), "scale of lora1: expected a number, got str"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG_ADAPTERS)
def test_adapters_are_checked(mistake):
    given = make_inputs(CASES[0])
    wrong, message = WRONG_ADAPTERS[mistake]
    a, b, _ = adapter(given.w1, 8, 1.0)
    lora1, lora2 = LowRank(*wrong(a.detach(), b.detach())), adapter(given.w2, 8, 1.0)
    with pytest.raises(ValueError, match=f"^{message}"):
        experts(**given.arguments(), lora1=lora1, lora2=lora2)


def test_a_pair_is_no_adapter():
    given = make_inputs(CASES[0])
    lora1, lora2 = adapter(given.w1, 8, 1.0), adapter(given.w2, 8, 1.0)
    with pytest.raises(ValueError, match="lora1: expected a LowRank or None, got tuple"):
        experts(**given.arguments(), lora1=tuple(lora1), lora2=lora2)
