"""FSDP2, DTensor and distributed checkpoints on two processes."""

import pytest
import sharded as ranks
import torch
import torch.distributed.checkpoint as dcp
from helpers import Case

from sonicmoe import MoE


@pytest.mark.tries("FSDP2", "fp32 shards, bf16 in the layer, a rank without tokens")
@pytest.mark.parametrize("tokens", [[9, 6], [9, 0]], ids=str)
def test_fully_sharded_in_bf16(two, tokens):
    two.run(ranks.fully_sharded_in_bf16, tokens)


@pytest.mark.tries("DTensor", "sharded experts, an optimizer step")
def test_dtensor_weights(two):
    two.run(ranks.dtensor_weights, Case("12,16,8,4,2", torch.float32, bias=True))


@pytest.mark.tries("distributed checkpoints", "of FSDP2, in expert parallelism and one process")
def test_checkpoint_of_shards_loads_anywhere(two, tmp_path):
    folder = str(tmp_path / "checkpoint")
    two.run(ranks.save, folder)
    two.run(ranks.load_with_experts_spread, folder)

    want = ranks.layer()
    ranks._train(want)
    moe = MoE(4, 2, 16, 8, add_bias=True)
    found = {"model": moe.state_dict()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    for name, t in want.state_dict().items():
        torch.testing.assert_close(found["model"][name], t)
