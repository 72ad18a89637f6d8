"""`sonicmoe.report`: what it says is what runs."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="kernels need Triton, which is for Linux")

import absent_gpu

from sonicmoe import ActivationType, KernelBackendMoE, LowRank, MemoryPolicy, MoE, report
from sonicmoe.launch import launcher
from sonicmoe.layer.dry_run import dry_run
from sonicmoe.layer.meta import BATCHES
from sonicmoe.layer.options import Options
from sonicmoe.routing import TopK

SHAPE = (4, 2, 64, 32)  # E, K, H, I
ROUTER = {"topk_kernel", "topk_backward_kernel"}


@pytest.fixture
def gpu(monkeypatch):
    return absent_gpu.present(monkeypatch)


CASES = {
    "bf16": {},
    "fp32": {"dtype": torch.float32},
    "biases": {"add_bias": True},
    "fp8": {"precision": "fp8"},
    "fp8, dW in bf16": {"precision": "fp8_bf16_dw"},
    "recompute, slices": {"memory": MemoryPolicy("recompute", 2)},
    "ungated": {"activation_function": ActivationType.RELU_SQ},
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_those_of_a_call(gpu, case, frozen):
    """A step with data launches what the report says, in that order, in both passes."""
    moe = MoE(*SHAPE, aux_loss_coef=0.0, **{"dtype": torch.bfloat16, **CASES[case]})
    if frozen:
        moe.c_fc.requires_grad_(False)
        moe.c_proj.requires_grad_(False)
    (layer,) = report(moe).layers
    assert gpu == []  # nothing ran
    x = torch.zeros(BATCHES[-1], 64, dtype=moe.c_fc.weight.dtype, requires_grad=True)
    out, _ = moe(x, KernelBackendMoE.sonicmoe)
    forward = [name for name in gpu if name not in ROUTER]
    gpu.clear()
    out.sum().backward()
    backward = [name for name in gpu if name not in ROUTER]
    assert list(layer.forward) == forward and list(layer.backward) == backward
    assert layer.backend == "triton" and layer.fast
    assert layer.kernels == ("portable" if case == "fp32" else "hopper")
    assert any(name.endswith("wgrad_kernel") for name in backward) != frozen


def test_no_backward_pass_in_inference(gpu):
    moe = MoE(*SHAPE, dtype=torch.bfloat16)
    with torch.no_grad():
        (layer,) = report(moe).layers
        assert "backward  none: nothing requires a gradient" in str(report(moe))
    assert layer.forward and layer.backward == ()
    assert launcher.thread_state.dry_run is None


def test_modes_of_the_caller_neither_see_it_nor_change_it(gpu):
    moe = MoE(*SHAPE, dtype=torch.bfloat16)
    (want,) = report(moe).layers
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        (found,) = report(moe).layers
    assert found.forward == want.forward and found.backward == ()
    assert counter.get_total_flops() == 0


def test_older_gpus_take_portable_kernels(monkeypatch):
    absent_gpu.present(monkeypatch, absent_gpu.A100)
    (layer,) = report(MoE(*SHAPE, dtype=torch.bfloat16)).layers
    assert layer.kernels == "portable" and "up_kernel" in layer.forward


def test_main_grad_and_adapters(gpu):
    moe = MoE(*SHAPE, dtype=torch.bfloat16)
    moe.c_fc.weight.main_grad = torch.zeros_like(moe.c_fc.weight, dtype=torch.float32)
    ran = dry_run(moe._weights(), 2, moe._options())
    assert len(report(moe).layers[0].backward) == len(ran.backward)
    moe.requires_grad_(False)
    a = torch.zeros(8 * 4, 64, dtype=torch.bfloat16, requires_grad=True)
    b = torch.zeros(64, 8 * 4, dtype=torch.bfloat16, requires_grad=True)
    ran = dry_run(moe._weights(), 2, Options(lora1=LowRank(a, b)))
    names = [kernel.__name__ for kernel in ran.forward]
    assert names.count("hopper_up_kernel") == 2  # X A1ᵀ, and up


# --- without a GPU --------------------------------------------------------------------------------
def test_what_runs_on_a_cpu():
    router = TopK(4, 2)
    moe = MoE(*SHAPE, router=router, memory=MemoryPolicy("e4m3", 4))
    found = report(nn.Sequential(moe, nn.Linear(64, 64), copy.deepcopy(moe)))
    assert [layer.name for layer in found.layers] == ["0", "2"] and not found.fast
    layer = found["2"]
    assert (layer.runs, layer.backend, layer.kernels) == ("sonicmoe", "torch", "pytorch")
    assert (layer.experts, layer.hidden_size, layer.intermediate_size) == (4, 64, 32)
    assert (layer.dtype, layer.device, layer.router) == (torch.float32, "cpu", "TopK (TopK)")
    text = str(found)
    assert "2 MoE layers: sonicmoe runs 2, 0 with GPU kernels\n{0, 2}\n" in text
    assert "memory e4m3 in 4 slices" in text and "since the weights are on cpu" in text
    assert text.count("backend") == 1  # layers that are alike are printed once


def test_autocast_decides_the_dtype():
    moe = MoE(*SHAPE, precision="fp8", cache_fp8_weights=True)
    (layer,) = report(moe).layers
    assert "x: expected bfloat16 with precision='fp8'" in layer.problem and layer.backend is None
    with pytest.raises(ValueError, match="x: expected bfloat16 with precision='fp8'"):
        moe(torch.randn(8, 64))
    assert "raises" in str(report(moe)) and "sonicmoe runs 0" in str(report(moe))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (layer,) = report(moe).layers
    assert layer.problem is None and layer.dtype == torch.bfloat16 and layer.cache_fp8_weights


def test_what_cannot_run():
    (layer,) = report(MoE(*SHAPE, device="meta")).layers
    assert "the meta device has none" in layer.problem
    for wrong in (nn.Linear(2, 2), "model"):
        with pytest.raises(ValueError, match="model: expected a model with MoE layers"):
            report(wrong)


def test_memory_and_gradients_are_untouched():
    moe = MoE(*SHAPE)
    before = [p.clone() for p in moe.parameters()]
    report(moe)
    assert all(p.grad is None for p in moe.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, moe.parameters(), strict=True))


@pytest.fixture
def two_ranks():
    """The first of two ranks, whose exchanges do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_under_fsdp_and_expert_parallelism(two_ranks):
    """FSDP2's dtype, whole weights although shards are held; of expert parallelism a rank's own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from sonicmoe.distributed import parallelize

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Sequential(MoE(*SHAPE, precision="fp8")), MoE(*SHAPE))
    fully_shard(model[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    parallelize(model[1], mesh)
    whole, spread = report(model).layers
    assert (whole.name, whole.dtype, whole.experts) == ("0.0", torch.bfloat16, 4)
    assert whole.problem is None and whole.expert_ranks == 1
    assert (spread.module, spread.experts, spread.expert_ranks) == ("ExpertParallelMoE", 2, 2)
    assert "2 experts, H 64, I 32, on this rank of 2" in str(report(model))
