"""Expert parallelism and FSDP2 over NCCL. One GPU is one rank: what travels comes back to it."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import Case, make_inputs, ours, run, same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sonicmoe import MoE
from sonicmoe.distributed import clip_grad_norm_, experts, parallelize, parallelize_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("nccl") / "store"), 1)
    dist.init_process_group(
        "nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("routing", ["zipf", "dropped", "empty_experts", "all_dropped"])
def test_experts(routing):
    case = Case("3000,512,256,16,4", bias=True, routing=routing)
    given = make_inputs(case, "cuda")
    want = run(ours(case, "triton"), given)
    same_bits(want, run(partial(experts, group=dist.group.WORLD, **case.options), given))


def _gradients(moe, x):
    x = x.detach().requires_grad_()
    out, aux = moe(x)
    (out.float().square().mean() + aux).backward()
    found = {name: p.grad for name, p in moe.named_parameters()}
    found = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}
    return {"out": out.detach(), "dx": x.grad, **{n: g.bfloat16() for n, g in found.items()}}


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_layer_under_fsdp(expert_parallel):
    """fp32 parameters, gathered in bf16: the bits of a layer in bf16."""
    one = MoE(16, 4, 512, 256, add_bias=True).to("cuda", torch.bfloat16)
    many = copy.deepcopy(one).float()
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("data", "expert"))
    if expert_parallel:
        parallelize(many, mesh["expert"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(many, mesh=mesh["data"], mp_policy=policy)
    x = torch.randn(3000, 512, device="cuda", dtype=torch.bfloat16)
    same_bits(_gradients(one, x), _gradients(many, x))


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)
        self.moe = MoE(16, 4, 512, 256, device="cuda")

    def forward(self, x):
        out, aux = self.moe(self.before(x))
        return self.after(out).square().mean() + aux


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["foreach", "fused"])
def test_whole_model(options):
    """On two meshes, each of one rank: clipped and stepped as the model alone."""
    one = _Model().to("cuda")
    many = copy.deepcopy(one)
    parallelize_model(many, init_device_mesh("cuda", (1, 1), mesh_dim_names=("data", "expert")))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, **options) for m in (one, many)]
    for _ in range(3):
        x = torch.randn(3000, 512, device="cuda")
        for model, optimizer in zip((one, many), optimizers, strict=True):
            model(x).backward()
            clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p, rtol=1e-3, atol=1e-5)
