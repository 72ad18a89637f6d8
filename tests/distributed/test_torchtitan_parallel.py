"""torchtitan's expert parallelism and FSDP2 with our experts inside, on two processes."""

import pytest

pytest.importorskip("torchtitan", reason="comes with the extra 'titan'")

import titan
import titan_parallel as ranks

# With its default backend, spmd_types, torchtitan exchanges lists, which gloo wants to be even.
EXCHANGES = [
    ("partial_dtensor", "any"),
    ("partial_dtensor", "one-rank-idle"),
    ("spmd_types", "even"),
]


@pytest.mark.tries("torchtitan", "its expert parallelism")
@pytest.mark.parametrize(("backend", "routing"), EXCHANGES)
@pytest.mark.parametrize("override", titan.OVERRIDES)
def test_experts_spread(two, override, backend, routing):
    two.run(ranks.experts_spread, override, backend, routing)


@pytest.mark.tries("torchtitan", "FSDP2")
@pytest.mark.parametrize("override", titan.OVERRIDES)
def test_fully_sharded(two, override):
    two.run(ranks.fully_sharded, override)
