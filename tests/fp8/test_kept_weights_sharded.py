"""Kept FP8 weights under FSDP, and after collectives."""

import pytest
import torch
import torch.distributed as dist
from kept_weights import layer, tokens
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fsdp2_quantizes_in_every_call(process_group, quantized):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    moe = layer()
    block = nn.Sequential(nn.Identity(), moe)  # the layer itself has no mark
    fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(block.parameters(), 1.0)
    found = []
    for i in range(3):
        found.append(block(tokens())[0])
        (found[-1] + block(tokens())[0]).sum().backward()
        assert len(quantized) == 4 * (i + 1)
        optimizer.step()
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    del quantized[:]
    beside = layer()
    for _ in range(2):
        beside(tokens())
    assert len(quantized) == 2  # not sharded, so kept


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_quantizes_in_every_call(process_group, quantized, use_orig_params):
    block = FullyShardedDataParallel(
        nn.Sequential(layer()), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    for grad in (True, False, True):
        del quantized[:]
        with torch.set_grad_enabled(grad):
            block(tokens())
        assert len(quantized) == 2


@pytest.mark.parametrize("collective", ["broadcast", "all_reduce"])
def test_collectives_need_a_refresh(process_group, collective):
    """If they bump the version counter one day, the documents may say so."""
    w = layer().c_fc.weight
    before = w._version
    with torch.no_grad():
        dist.broadcast(w, 0) if collective == "broadcast" else dist.all_reduce(w)
    assert w._version == before
