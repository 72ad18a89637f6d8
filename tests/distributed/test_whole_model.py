"""Weights and biases beside the experts: nothing drifts apart between ranks in silence."""

import pytest
import whole_model as ranks


@pytest.mark.parametrize("names", [["before", "moe"], ["after"]], ids=["with the layer", "alone"])
def test_a_model_that_would_drift_between_expert_ranks_is_refused(four, names):
    messages = four.run(ranks.model_that_would_drift, (2, 2), names)
    for message, (group, others) in zip(
        messages, [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])],
        strict=True,
    ):  # fmt: skip
        expected = f"optimizer: expected parameters over all ranks that share experts, {group}"
        assert message.startswith(expected) and f"over ranks {others}" in message, message


def test_a_model_that_is_not_sharded_beside_the_experts_is_refused(two):
    for rank, message in enumerate(two.run(ranks.model_that_would_drift, (1, 2), ["before"])):
        assert f"share experts, [0, 1], got one of shape (16, 16) over ranks [{rank}]" in message


def test_a_model_that_would_drift_from_a_later_step_on_is_refused(two):
    for first, later in two.run(ranks.model_that_would_drift_later):
        assert first == "no error"
        assert "got one of shape (16, 16)" in later


def test_what_does_not_drift_is_not_refused(two, four):
    """The layer alone sums over the ranks itself; a model may have the same tokens on each."""
    assert set(four.run(ranks.model_that_would_drift, (2, 2), ["moe"])) == {"no error"}
    assert set(two.run(ranks.model_on_the_same_tokens)) == {"no error"}


def test_experts_that_would_drift_between_their_copies_are_refused(four):
    for rank, message in enumerate(four.run(ranks.experts_that_would_drift)):
        assert f"got a MoE over ranks {[[0, 1], [2, 3]][rank // 2]} only" in message


def test_sums_beside_means_are_refused(four):
    for message in four.run(ranks.sums_beside_means):
        assert "got sums over the ranks that share experts" in message


def test_a_model_over_all_ranks(four):
    four.run(ranks.model_over_all_ranks)


@pytest.mark.parametrize("kind", ["FSDP2", "expert parallelism"])
def test_biases_of_ranks_need_a_sum(two, kind):
    for message in two.run(ranks.biases_of_ranks, kind):
        assert message.startswith("all_reduce: expected a function, since the layer is sharded")
