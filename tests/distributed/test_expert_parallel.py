"""Expert parallelism: two and four processes compute what one process does."""

import expert_parallel as ranks
import pytest
import torch
from helpers import Case

from sonicmoe import ActivationType, MemoryPolicy
from sonicmoe.distributed.agreement import _encode
from sonicmoe.routing import ROUTERS

# Uneven on purpose; a rank without tokens, and one that has all of them.
TWO = [[7, 5], [0, 12], [12, 0], [0, 0]]
FOUR = [[5, 1, 0, 6], [0, 0, 12, 0], [3, 3, 3, 3]]
SHARED = {"router_bias": True, "shared_intermediate_size": 24, "shared_gate": True}
ROUTINGS = ["uniform", "one_expert", "empty_experts", "dropped", "duplicates", "all_dropped"]


def test_ranks_tell_constants_apart():
    clamps = [ActivationType.clamped_swiglu(limit) for limit in (7.0, 10.0)]
    capped = [ActivationType.soft_capped_swiglu(*caps) for caps in ((4, 25), (25, 4))]
    settings = (*clamps, *capped, *ActivationType, "x", None)
    assert len({_encode(setting) for setting in settings}) == len(settings) == 16


def case(tokens, routing="uniform", **options) -> Case:
    return Case(f"{sum(tokens)},16,8,8,3", torch.float64, routing=routing, **options)


@pytest.mark.tries("expert parallelism", "uneven and empty ranks, absent experts")
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


def test_layer_with_a_router_that_has_a_parameter(two, four):
    """Also beside FSDP2: its gradient is summed over the ranks, as that of `router.weight`."""
    two.run(ranks.layer_equals_one_process, [7, 5], {"router": ranks.Tempered(8, 3)})
    options = {"router": ranks.Tempered(8, 3)}
    four.run(ranks.layer_with_fsdp_on_the_other_dimension, [3, 4, 5, 2], options)


def test_layer_with_other_options(two):
    options = {"fp32_router_logits": True, "z_loss_coef": 0.1, "gate_up": "concatenated"}
    two.run(ranks.layer_equals_one_process, [7, 0], options)


@pytest.mark.parametrize("memory", ["recompute", MemoryPolicy("e4m3", slices=2)], ids=str)
def test_layer_with_a_memory_policy(two, memory):
    two.run(ranks.layer_equals_one_process, [7, 4], {"memory": memory})


@pytest.mark.tries("expert parallelism", "router bias, shared expert")
@pytest.mark.parametrize("fp32", [False, True], ids=["", "fp32_router_logits"])
@pytest.mark.parametrize("tokens", TWO[:2], ids=str)
def test_layer_with_router_bias_and_shared_expert(two, tokens, fp32):
    two.run(ranks.layer_equals_one_process, tokens, {**SHARED, "fp32_router_logits": fp32})


def test_layer_on_four_ranks(four):
    four.run(ranks.layer_equals_one_process, [5, 1, 0, 6], {})


@pytest.mark.tries("expert parallelism", "FSDP2 on another mesh dimension")
@pytest.mark.parametrize("options", [{}, SHARED], ids=["plain", "shared"])
@pytest.mark.parametrize("tokens", [[3, 4, 5, 2], [0, 6, 0, 1]], ids=str)
def test_layer_with_fsdp_on_the_other_dimension(four, tokens, options):
    four.run(ranks.layer_with_fsdp_on_the_other_dimension, tokens, options)


@pytest.mark.parametrize("sharded", [False, True])
def test_kept_fp8_weights(two, sharded):
    two.run(ranks.kept_fp8_weights, sharded)


def test_kept_fp8_weights_that_are_stale(two):
    two.run(ranks.kept_fp8_weights_that_are_stale)


def test_layer_in_fp8(two):
    two.run(ranks.fp8_layer, [7, 5])


def test_checkpointed_layer(two):
    two.run(ranks.checkpointed_layer, [7, 0])


def test_frozen_layer(two):
    two.run(ranks.frozen_layer, [7, 0])


def test_layer_on_a_process_group(two):
    two.run(ranks.group_instead_of_a_mesh, [7, 5])


def test_bad_arguments(two):
    two.run(ranks.bad_arguments)


@pytest.mark.parametrize("setting", ranks.DIFFERENT)
def test_ranks_that_differ_raise_the_same_error(two, setting):
    first, second = two.run(ranks.ranks_that_differ, setting)
    assert first == second
    assert first.startswith(f"{setting}: expected the same on every rank, got ")
    assert ranks.DIFFERENT[setting][1] in first


def test_precisions_that_differ(two):
    first, second = two.run(ranks.precisions_that_differ)
    assert first == second and "got None on rank 0, fp8 on rank 1" in first


def test_dispatches_that_differ(two):
    first, second = two.run(ranks.dispatches_that_differ)
    assert first == second and first.startswith("hidden_size: expected the same on every rank")


@pytest.mark.parametrize("argument", ranks.WRONG)
def test_a_wrong_argument_on_one_rank_raises_on_all(two, argument):
    first, second = two.run(ranks.wrong_on_one_rank, argument)
    assert "got an error on rank 1. See the message of that rank." in first
    assert second.startswith(f"{argument.split()[0]}: expected ")


@pytest.mark.parametrize("per_rank", [0, 2.0])
def test_a_wrong_dispatch_on_one_rank_raises_on_all(two, per_rank):
    first, second = two.run(ranks.dispatch_wrong_on_one_rank, per_rank)
    assert "an error on rank 1" in first
    assert second.startswith("experts_per_rank: expected an integer of at least 1")


@pytest.mark.parametrize(
    ("shape", "dtype"), [((6, 24), torch.float32), ((2, 4, 8), torch.float32),
                         ((6, 16), torch.float64)], ids=str,
)  # fmt: skip
def test_a_wrong_input_of_the_layer_on_one_rank_raises_on_all(two, shape, dtype):
    first, second = two.run(ranks.layer_wrong_on_one_rank, shape, dtype)
    assert "an error on rank 1" in first
    assert ("hidden_states: expected" if shape[-1] != 16 else "dtype") in second


def test_comparing_settings_costs_no_collective(two):
    two.run(ranks.headers_cost_no_collective)


def test_a_router_that_is_not_plain_is_refused_on_every_rank(two):
    for message in two.run(ranks.router_with_a_hook):
        assert message.startswith("router: expected nn.Linear without hooks"), message


def test_a_global_hook_sees_the_router(two):
    two.run(ranks.global_hook_on_the_router, [7, 5])
