"""torchtitan's expert parallelism and FSDP2 with our experts inside, on two processes."""

import pytest

pytest.importorskip("torchtitan", reason="comes with the extra 'titan'")

import titan
import titan_parallel as ranks


@pytest.mark.tries("torchtitan", "its expert parallelism, two processes")
@pytest.mark.parametrize("experts_used", [[0, 1, 2, 3], [0, 1]], ids=["both", "one-rank-idle"])
@pytest.mark.parametrize("override", titan.OVERRIDES)
def test_experts_spread(two, override, experts_used):
    two.run(ranks.experts_spread, override, experts_used)


@pytest.mark.tries("torchtitan", "FSDP2, two processes")
@pytest.mark.parametrize("override", titan.OVERRIDES)
def test_fully_sharded(two, override):
    two.run(ranks.fully_sharded, override)
