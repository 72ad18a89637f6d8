"""What is selected where nobody tuned."""

import pytest
import torch

from sonicmoe.launch import spans as launch_spans
from sonicmoe.tuning import Target, is_valid, row_config, weight_config
from sonicmoe.tuning.select import e4m3_row_config

H200 = Target(90, 132)


def _weight_tile(M, N, gather_left, gather_right):
    config = weight_config(2, M, N, gather_left, gather_right, H200)
    return config.block_m, config.block_n


@pytest.mark.parametrize(
    ("M", "N", "tile"),
    [
        (2048, 1024, (128, 256)),
        (2048, 1408, (256, 128)),  # 11 columns of 128, or six of 256 of which the last is half
        (2880, 2880, (128, 256)),  # what is won in one direction is lost in the other
        (512, 128, (256, 128)),
        (100, 128, (128, 128)),
        (100, 300, (128, 256)),
    ],
)
def test_tiles_of_dw2(M, N, tile):
    assert _weight_tile(M, N, True, False) == tile


def test_the_gathered_side_of_dw1_is_the_narrow_one():
    assert _weight_tile(512, 1536, False, True) == (256, 128)
    assert _weight_tile(2 * 1408, 2048, False, True) == (256, 128)


@pytest.mark.parametrize("kernel", ["up", "down", "dx", "dz"])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_on_hopper(kernel, gated):
    assert row_config(kernel, 2, 2048, 1024, gated, H200).hopper
    assert not row_config(kernel, 4, 2048, 1024, gated, H200).hopper


@pytest.mark.parametrize(
    ("target", "tma"),
    [
        (Target(80, 108), False), (Target(100, 148), True), (Target(103, 148), True),
        (Target(120, 170), False), (Target(90, 132, gluon=False), True),
    ],
)  # fmt: skip
def test_other_devices_copy_in_boxes_where_they_can(target, tma):
    for kernel in ("up", "down", "dx", "dz"):
        config = row_config(kernel, 2, 2048, 1024, True, target)
        assert (config.tma, config.hopper) == (tma, False) and is_valid(config, 2, target, kernel)
    config = weight_config(2, 2048, 1024, True, False, target)
    assert (config.tma, config.hopper) == (tma, False) and is_valid(config, 2, target)


@pytest.mark.parametrize(
    ("arch", "fits"), [(80, False), (86, False), (89, True), (90, True), (100, True), (120, True)]
)
def test_z_in_e4m3_needs_a_gpu_that_has_it(arch, fits):
    target = Target(arch, 100)
    for kernel, itemsize in (("up", 2), ("dz", 2), ("up", 4), ("dz", 4)):
        config = row_config(kernel, itemsize, 2048, 1024, True, target)
        given = (config, kernel, 2048, 1024, "interleaved", target)
        if fits:
            e4m3_row_config(*given)
            continue
        with pytest.raises(ValueError, match=rf"got 'e4m3' on compute capability {arch / 10}"):
            e4m3_row_config(*given)


def spans_of(rows: int, longest: int, experts: int, tiles: int) -> launch_spans.Spans:
    sizes = (rows, longest, (experts, 64, 64), tiles, 132)
    return launch_spans.spans_of(*sizes, torch.device("cpu"))


@pytest.mark.parametrize(
    ("experts", "tiles", "split"),
    [
        (64, 4, False),  # 256 tiles for 132 programs: two turns, nearly full
        (33, 4, False),  # 132: one turn
        (34, 4, True),  # 136: a second turn for four
        (8, 4, True),  # too few for one turn
        (128, 24, False),
    ],
)
def test_even_experts_are_split_where_they_leave_programs_idle(experts, tiles, split):
    rows = 524288
    spans = spans_of(rows, rows, experts, tiles)
    assert (rows // experts >= 2 * spans.rows) == split
    assert spans.rows <= rows * tiles / 132 or spans.rows == launch_spans.SHORTEST_SPAN
    assert rows >= 2 * spans.rows  # an expert that has them all is split


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("tiles", [4, 24, 64, 128])
def test_no_spans_where_no_expert_is_long_enough(tiles, k):
    """The same for every T, since the kernel differs."""
    found = set()
    for tokens in (1, 100, 2048, 32768, 524288):
        unbounded = spans_of(tokens * k, tokens * k, 64, tiles)
        bounded = spans_of(tokens * k, tokens, 64, tiles)
        found.add(bounded.partial is None)
        if bounded.partial is None:
            assert tokens < 2 * unbounded.rows  # not even an expert that has them all is split
        else:
            assert (bounded.rows, bounded.places) == (unbounded.rows, unbounded.places)
    assert found == {tiles * k > 2 * 132}
