"""A whole GPT on two meshes: equal to one process, saved and loaded, or refused with our words."""

import parallelize_model as ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp

LAYOUTS = {
    "pairs share, fp64": ((2, 2), torch.float64, 8, {}),
    "a rank without experts": ((2, 2), torch.float64, 2, {}),
    "all share": ((1, 4), torch.float32, 8, {}),
    "none share": ((4, 1), torch.float32, 8, {"reshard_after_forward": False}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_mean_over_all_ranks(four, layout):
    four.run(ranks.gradients_are_those_of_the_mean, *LAYOUTS[layout])


@pytest.mark.tries("expert parallelism", "a whole model, its checkpoint in other layouts")
def test_four_ranks_train_as_one_process_and_their_checkpoint_loads(four, two, tmp_path):
    folder = str(tmp_path / "checkpoint")
    for losses in four.run(ranks.train_as_one_process, 20, folder):
        assert len(losses) == 20 and losses[-1][0] < 0.8 * losses[0][0]
        for want, found in losses:
            assert found == pytest.approx(want, rel=1e-5)

    two.run(ranks.load, (1, 2), folder)
    weights, _ = torch.load(f"{folder}/whole.pt")
    one = {"model": ranks.model(seed=1, experts=6).state_dict()}
    dcp.load(one, checkpoint_id=folder, no_dist=True)
    assert one["model"].keys() == weights.keys()
    for name, t in weights.items():
        assert torch.equal(one["model"][name], t), name


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
def test_layers_that_share_weights_train_as_one_process(four, shape):
    four.run(ranks.layers_that_share_train_as_one_process, shape)


def test_optimizers_take_parameters_of_two_meshes(four):
    four.run(ranks.optimizers_step_as_one_by_one)


def test_norms_are_those_of_one_process(four):
    four.run(ranks.norms_of_every_type)


def test_blocks_and_policy(four):
    four.run(ranks.blocks_and_policy)


EXPECTED = {
    "DDP": "module: expected a model that is the same on every rank",
    "DDP of layers": "body.blocks.1.moe with other experts on each. Call sonicmoe.distributed.par",
    "fully_shard": "one that is only parallelized. Call sonicmoe.distributed.parallelize_model",
    "torch's clip_grad_norm_": "2 meshes. Call sonicmoe.distributed.clip_grad_norm_ instead.",
    "twice": "got a DTensor as body.embed.weight. Call parallelize_model once",
    "no layer": "contains a sonicmoe.MoE, got Linear without one",
    "one dimension": "one of them named 'expert', got ('expert',). For n ranks",
    "other names": "got 2 without names",
    "no mesh": "got ProcessGroup",
    "blocks": "blocks: expected modules inside of the model, got Block",
    "hook": "moe.router.weight: expected a parameter without hooks",
    "hook of a layer": "weight: expected a parameter without hooks",
    "main_grad": "moe.c_fc.weight: expected a parameter without main_grad",
    "main_grad afterwards": "weight: expected a parameter without main_grad",
    "shared with a dense block": "got one as body.blocks.1.norm.weight and body.blocks.2.norm.",
    "float64": "got torch.float64. Set reduce_dtype=torch.float32.",
    "not finite": "got a norm of nan",
}


def test_what_cannot_work_is_refused(four):
    for messages in four.run(ranks.refusals):
        assert messages.keys() == EXPECTED.keys()
        for name, words in EXPECTED.items():
            assert words in messages[name], (name, messages[name])


def test_ddp_may_leave_a_layer_alone(two):
    two.run(ranks.copy_of_a_layer_in_ddp)
