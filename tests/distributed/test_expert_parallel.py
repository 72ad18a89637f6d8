"""Expert parallelism: two and four processes compute what one process does."""

import expert_parallel as ranks
import pytest
import torch
from helpers import Case

from sonicmoe import ActivationType
from sonicmoe.routing import ROUTERS

# Uneven on purpose; a rank without tokens, and one that has all of them.
TWO = [[7, 5], [0, 12], [12, 0], [0, 0]]
FOUR = [[5, 1, 0, 6], [0, 0, 12, 0], [3, 3, 3, 3]]
ROUTINGS = ["uniform", "one_expert", "empty_experts", "dropped", "duplicates", "all_dropped"]


def case(tokens, routing="uniform", **options) -> Case:
    return Case(f"{sum(tokens)},16,8,8,3", torch.float64, routing=routing, **options)


@pytest.mark.tries("expert parallelism", "two processes, uneven and empty ranks, absent experts")
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", TWO, ids=str)
def test_two_ranks(two, tokens, routing):
    two.run(ranks.experts_equal_one_process, case(tokens, routing, bias=True), tokens)


@pytest.mark.tries("expert parallelism", "four processes")
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", FOUR, ids=str)
def test_four_ranks(four, tokens, routing):
    four.run(ranks.experts_equal_one_process, case(tokens, routing), tokens)


def test_options_reach_the_experts(two):
    options = {"activation": ActivationType.GEGLU, "gate_up": "concatenated", "transposed": True}
    two.run(ranks.experts_equal_one_process, case([7, 5], bias=True, **options), [7, 5])


@pytest.mark.parametrize("routing", ["zipf", "dropped", "duplicates", "one_expert", "all_dropped"])
def test_a_token_goes_to_a_rank_once(two, routing):
    two.run(ranks.a_token_goes_to_a_rank_once, case([20], routing))


def test_neither_side_keeps_y(two):
    two.run(ranks.nothing_of_size_h_is_kept_but_the_rows, case([20]))


@pytest.mark.tries("expert parallelism", "`MoE` with every router")
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("tokens", TWO[:2], ids=str)
def test_layer(two, tokens, router):
    two.run(ranks.layer_equals_one_process, tokens, {"router": router})


def test_layer_with_other_options(two):
    options = {"fp32_router_logits": True, "z_loss_coef": 0.1, "gate_up": "concatenated"}
    two.run(ranks.layer_equals_one_process, [7, 0], options)


def test_layer_on_four_ranks(four):
    four.run(ranks.layer_equals_one_process, [5, 1, 0, 6], {})


@pytest.mark.tries("expert parallelism", "FSDP2 on the other dimension of a mesh")
@pytest.mark.parametrize("tokens", [[3, 4, 5, 2], [0, 6, 0, 1]], ids=str)
def test_layer_with_fsdp_on_the_other_dimension(four, tokens):
    four.run(ranks.layer_with_fsdp_on_the_other_dimension, tokens)


def test_checkpointed_layer(two):
    two.run(ranks.checkpointed_layer, [7, 0])


def test_frozen_layer(two):
    two.run(ranks.frozen_layer, [7, 0])


def test_bad_arguments(two):
    two.run(ranks.bad_arguments)
