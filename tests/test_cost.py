"""The cost model: numbers worked out by hand for one shape, and what follows from the formulas."""

import ast
from pathlib import Path

import pytest
from research import results

from sonicmoe.layer.memory import MemoryPolicy
from sonicmoe.shapes import Problem
from sonicmoe.tools import cost
from sonicmoe.tools.cases import ROUTERS

HAND = Problem(T=6, H=16, I=8, E=4, K=2)  # R = 12, N = 16
PLAIN = Problem(T=6, H=16, I=8, E=4, K=2, gated=False)
RESULTS = Path(__file__).parents[1] / "benchmarks/results/nvidia-h200"


def test_flops_by_hand():
    assert cost.forward_flops(HAND) == 6 * 12 * 16 * 8 == 9216
    assert cost.backward_flops(HAND) == 12 * 12 * 16 * 8 == 18432
    assert cost.forward_flops(PLAIN) == 4 * 12 * 16 * 8
    assert cost.backward_flops(PLAIN) == 8 * 12 * 16 * 8


def test_kept_bytes_by_hand():
    # ceil(12 / 8) + 4 = 6 tiles at most, a header, four int32 each
    assert cost.kept_bytes(HAND, itemsize=2, tile_m=8) == {
        "z": 12 * 16 * 2,
        "scores": 48,
        "ids": 48,
        "row_token": 48,
        "row_slot": 48,
        "slot_row": 48,
        "expert_start": 20,
        "tiles": 112,
    }
    assert cost.caller_bytes(HAND) == 6 * 16 * 2


@pytest.mark.parametrize("shape", ["24576,1536,256,128,8", "1000,64,24,7,3"])
def test_the_readme_adds_up_to_it(shape):
    p = Problem.parse(shape)
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    lines = readme.split("columns:\n\n")[1].split("\n\n")[0].splitlines()
    terms = [line.split("  ")[2].replace("·", "*").replace("⌈R/M⌉", "-(-R//M)") for line in lines]
    sizes = {"R": p.R, "N": p.N, "E": p.E, "M": 128}
    assert len(terms) == 3
    assert sum(eval(term, sizes) for term in terms) == sum(cost.kept_bytes(p).values())


def test_kept_bytes_of_each_router():
    total = {router: sum(cost.kept_bytes(HAND, router=router).values()) for router in ROUTERS}
    assert total["topk_over_softmax"] - total["softmax_over_topk"] == 6 * 4 * 2  # the logits
    assert total["topk_over_softmax_normalized"] == total["softmax_over_topk"]
    assert total["sigmoid"] - total["softmax_over_topk"] == HAND.R * 4
    assert "ids" not in cost.kept_bytes(HAND, router=None)


def test_kept_bytes_do_not_grow_with_granularity():
    fine, medium, coarse = (
        sum(cost.kept_bytes(Problem(24576, 1536, i, e, k)).values())
        for i, e, k in ((256, 128, 8), (512, 64, 4), (1024, 32, 2))
    )
    assert fine < 200 * 2**20
    assert max(fine, medium, coarse) / min(fine, medium, coarse) < 1.02


def test_peak_is_made_of_lifetimes():
    p = Problem(T=24576, H=1536, I=256, E=128, K=8)
    kept, peak = sum(cost.kept_bytes(p).values()), cost.peak_bytes(p)
    assert peak.forward == kept + 2 * (p.T * p.E + p.R * p.I + p.R * p.H + p.T * p.H)
    routing = kept - 2 * p.R * p.N
    held = 2 * p.T * p.H + 2 * p.R * p.N + 4 * p.R + 2 * p.E * p.H * p.I
    assert peak.backward == held + routing - 4 * p.R + 2 * (p.T * p.H + p.R * p.H)


def test_padding():
    assert cost.padding_share([128, 256], 128) == 0
    assert cost.padding_share([1, 0, 127], 128) == pytest.approx(0.5)
    assert cost.padding_share([], 128) == cost.padding_share([0, 0], 128) == 0


@pytest.mark.parametrize("p", [HAND, PLAIN])
def test_stages_hold_all_the_flops(p):
    forward = sum(stage.flops for stage in cost.forward_stages(p, router=False))
    backward = sum(stage.flops for stage in cost.backward_stages(p, router=False))
    assert (forward, backward) == (cost.forward_flops(p), cost.backward_flops(p))
    router = sum(s.flops for s in cost.forward_stages(p)) - forward
    assert router == 2 * p.T * p.H * p.E


def test_bytes_read_and_written_by_hand():
    x, y, w1, w2, z, a = 192, 384, 2048, 1024, 384, 192  # two bytes an element
    scores = index = logits = 48
    router_w = 128
    stages = cost.forward_stages(HAND) + cost.backward_stages(HAND)
    assert {s.name: (s.read, s.written) for s in stages} == {
        "router": (x + router_w, logits),
        "top-k": (logits, scores + index),
        "permutation": (index, 3 * index),
        "up": (x + w1, z + a),
        "down": (a + w2, y),
        "combine": (y + scores + index, x),
        "dZ": (x + w2 + z + scores, z + a + scores),
        "dW2": (x + a, w2),
        "dX rows": (z + w1, y),
        "dW1": (z + x, w1),
        "dX combine": (y + index, x),
        "top-k backward": (2 * scores + index, logits),
        "router dX": (logits + router_w + x, x),
        "router dW": (logits + x, router_w),
    }
    assert all(s.traffic == s.read + s.written for s in stages)


@pytest.mark.parametrize("precision, dw_in_fp8", [("fp8", True), ("fp8_bf16_dw", False)])
def test_bytes_of_fp8_by_hand(precision, dw_in_fp8):
    x, y, w1, w2, z, a = 96, 384, 1024, 512, 192, 96  # one byte an element, y in bf16
    scores, memory = 48, MemoryPolicy("recompute")
    stages = cost.forward_stages(HAND, precision=precision)
    stages += cost.backward_stages(HAND, precision=precision, memory=memory)
    found = {s.name: (s.read, s.written, s.fp8) for s in stages}
    for plain in cost.forward_stages(HAND) + cost.backward_stages(HAND, memory=memory):
        read, written, fp8 = found.pop(plain.name)
        expected = {
            "up": (x + w1, 2 * z + a, True),
            "down": (a + w2, y, True),
            "up again": (x + w1, 2 * z + a, True),
            "dZ": (x + w2 + 2 * z + scores, (2 * z + a if dw_in_fp8 else z + 2 * a) + scores, True),
            "dW2": ((x + a) if dw_in_fp8 else 2 * (x + a), 2 * w2, dw_in_fp8),
            "dX rows": (z + w1, y, True),
            "dW1": ((z + x) if dw_in_fp8 else 2 * (z + x), 2 * w1, dw_in_fp8),
        }.get(plain.name, (plain.read, plain.written, False))
        assert (read, written, fp8) == expected, plain.name
    assert not found
    up = next(s for s in cost.forward_stages(HAND, precision=precision, memory=MemoryPolicy("e4m3"))
              if s.name == "up")  # fmt: skip
    assert up.written == z + a


def test_bytes_of_slices_by_hand():
    """Each slice of Y and of dX reads A or dZ, and the combines their scores and indices, again."""
    p, sliced = Problem(T=6, H=256, I=8, E=4, K=2), MemoryPolicy(slices=4)
    again = {"down": 192, "combine": 48 + 48, "dX rows": 384, "dX combine": 48}
    for stages in (cost.forward_stages, cost.backward_stages):
        for whole, found in zip(stages(p), stages(p, memory=sliced), strict=True):
            assert found.read == whole.read + 3 * again.get(whole.name, 0), whole.name
            assert found.written == whole.written


def stage(flops=0, read=0, written=0, fp8=False) -> cost.Stage:
    return cost.Stage("s", flops, read, written, fp8)


def test_roofline_takes_the_longer_of_work_and_traffic():
    gpu = cost.Gpu("test", half=100.0, single=10.0, bandwidth=10.0, source="by hand")
    assert gpu.seconds(stage(1000, 20, 30)) == 10
    assert gpu.bound(stage(1000, 20, 30)) == "compute"
    assert gpu.seconds(stage(1000, 200, 300)) == 50
    assert gpu.bound(stage(1000, 200, 300)) == "memory"
    assert gpu.seconds(stage(1000, 20, 30), itemsize=4) == 100


def test_roofline_knows_what_a_board_may_draw():
    power = cost.Power(watts=10.0, flop=0.5, byte_read=0.5, byte_written=2.0)
    gpu = cost.Gpu("test", half=100.0, single=10.0, bandwidth=10.0, source="by hand", power=power)
    assert gpu.seconds(stage(1000, 20, 30)) == (500 + 10 + 60) / 10
    assert gpu.bound(stage(1000, 20, 30)) == "power"
    assert gpu.bound(stage(0, 99, 0)) == "memory"
    assert gpu.seconds(stage(1000, 20, 30), itemsize=4) == 100, "measured in two bytes alone"


def test_roofline_of_fp8():
    power = cost.Power(watts=10.0, flop=0.5, byte_read=0.5, byte_written=2.0)
    rates = {"half": 100.0, "single": 10.0, "bandwidth": 10.0, "source": "by hand", "power": power}
    gpu = cost.Gpu("test", **rates, fp8=200.0)
    assert gpu.limits(stage(1000, 2, 3, fp8=True)) == {"compute": 5, "memory": 0.5}
    with pytest.raises(ValueError, match=r"gpu: expected one with FP8 \(h100, .*got A100\. Choose"):
        cost.GPUS["a100"].seconds(stage(fp8=True))


def test_energy_of_the_h200_is_what_was_measured():
    """Of dense GEMMs, whose bytes are known: every operand is read or written once."""
    power = cost.GPUS["h200-measured"].power
    errors = []
    for record in (r for r in results.read(RESULTS) if "dense_gemms" in r):
        p = Problem.parse(record["shape"])
        rows, w1, w2, z, a = (
            2 * n for n in (p.R * p.H, p.E * p.N * p.H, p.E * p.H * p.I, p.R * p.N, p.R * p.I)
        )
        read_and_written = {
            "up": (rows + w1, z), "down": (a + w2, rows), "dz": (rows + w2, a),
            "dw2": (a + rows, w2), "dx": (z + w1, rows), "dw1": (rows + z, w1),
        }  # fmt: skip
        for gemm in record["dense_gemms"]:
            moved = read_and_written[gemm["name"]]
            joules = power.joules(stage(gemm["flops"], *moved))
            errors.append(1e3 * joules / (gemm["watts"] * gemm["ms"]) - 1)
    assert len(errors) == 54  # six of four shapes, and of five
    assert max(map(abs, errors)) < 0.055
    assert sum(map(abs, errors)) / len(errors) < 0.015


def test_gpu_by_the_name_of_the_driver():
    assert cost.find_gpu("NVIDIA H200").name == "H200"
    assert cost.find_gpu("h100") is cost.GPUS["h100"]
    assert cost.find_gpu("h200-measured").half < cost.find_gpu("h200").half
    with pytest.raises(ValueError, match=r"gpu: expected one of .*h200.* got 'abacus'"):
        cost.find_gpu("abacus")


def test_the_cost_model_needs_no_torch():
    tree = ast.parse(Path(cost.__file__).read_text())
    names = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    ]
    assert not any(name and name.startswith("torch") for name in names)
