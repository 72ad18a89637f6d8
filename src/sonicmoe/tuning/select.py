"""The configuration of a kernel, chosen by dtype, sizes and device.

The table of `sonicmoe tune` comes first, see `table`; the built-in choices come from measurements
in docs/log/. Nothing depends on the number of tokens, so a new T compiles nothing.
"""

from dataclasses import replace
from functools import cache

from ..capability import check_z_in_e4m3
from ..shapes import BLOCK, ceil_div
from .config import RowConfig, Target, WeightConfig
from .table import RowKey, WeightKey, cached_until_tuned, tuned


@cached_until_tuned
def row_config(
    kernel: str, itemsize: int, K: int, N: int, gated: bool, target: Target
) -> RowConfig:
    """For kernel 'up', 'down', 'dx' or 'dz', a GEMM of (rows, K) with (K, N)."""
    key = RowKey(kernel, itemsize, K, N, gated)
    default = default_row_config(kernel, itemsize, K, N, target)
    return tuned(target).rows.get(key, default)


@cached_until_tuned
def weight_config(
    itemsize: int, M: int, N: int, gather_left: bool, gather_right: bool, target: Target
) -> WeightConfig:
    """For a weight gradient (M, N) of each expert; which operand's rows are gathered, if any."""
    key = WeightKey(itemsize, M, N, gather_left, gather_right)
    default = default_weight_config(itemsize, M, N, gather_right, target)
    return tuned(target).weights.get(key, default)


def default_row_config(kernel: str, itemsize: int, K: int, N: int, target: Target) -> RowConfig:
    """The built-in configuration, for shapes that no table covers."""
    if itemsize > 2:
        return RowConfig(32, 64, 32, warps=8, stages=2, tma=False, programs=2, slices=2)
    if target.arch == 90 and target.gluon:
        return _hopper_rows(kernel, K, N)
    if _has_tma_and_shared_memory(target):
        if kernel == "dz":
            return RowConfig(128, 128, 64, warps=8, stages=4, tma=True, slices=2)
        # With 256 columns the epilogue of a plain activation spills 33 registers.
        return RowConfig(128, 128, 64, warps=8, stages=4, tma=True)
    if target.shared_memory < 128 * 1024:
        return RowConfig(128, 64, 32, warps=8, stages=3, tma=False, slices=2)
    # With two slices the clamped activation spills up to 34 registers on an A100.
    return RowConfig(128, 128, 64, warps=8, stages=3, tma=False, slices=4)


@cache
def e4m3_row_config(
    config: RowConfig, kernel: str, hidden: int, inner: int, gate_up: str | None, target: Target
) -> RowConfig:
    """`config` for Z in e4m3: whole blocks in a tile of `up`, one block for a slice of `dz`."""
    check_z_in_e4m3(target.arch)
    # TMA needs rows of a multiple of 16 bytes; biases of a ragged N spill in a plain `up`.
    ragged = gate_up != "interleaved" and inner % (16 if gate_up else 64)
    narrow = kernel == "up" and config.block_n < 256  # the Hopper kernel stores half tiles
    if config.hopper and (ragged or narrow):
        config = default_row_config(kernel, 2, hidden, inner, target._replace(gluon=False))
    if kernel == "dz":
        return replace(config, slices=4) if config.block_n > 64 else config
    if config.block_n >= BLOCK:
        return config
    # In fp32, blocks of 32 spill 112 registers.
    return replace(config, block_n=BLOCK, block_k=16 if config.block_m < 128 else 32)


def _has_tma_and_shared_memory(target: Target) -> bool:
    """True for data-center Blackwell, and for Hopper with portable kernels."""
    return target.has_tma and target.shared_memory > 128 * 1024


def _hopper_rows(kernel: str, K: int, N: int) -> RowConfig:
    """Measured on an H200 at the shapes of docs/log/.

    Wide tiles load less for the same GEMM, which saves power, the limit of a layer. So 256 columns,
    except for `down` with a small K, where the epilogue dominates.
    """
    columns = 128 if N <= 128 or (kernel == "down" and K < 1024) else 256
    if kernel in ("down", "dx"):
        depth, stages = 64, 6 if columns == 128 else 3
    elif kernel == "dz":
        depth, stages = 32, 6
    else:
        depth, stages = 64, 4
    return RowConfig(128, columns, depth, warps=8, stages=stages, tma=True, hopper=True)


def default_weight_config(
    itemsize: int, M: int, N: int, gather_right: bool, target: Target
) -> WeightConfig:
    """The built-in configuration, for shapes that no table covers."""
    if itemsize > 2:
        return WeightConfig(64, 64, 32, warps=4, stages=2, tma=False, programs=2)
    if target.arch == 90 and target.gluon:
        # The gathered side is the narrow one: dW1 at 24576,1536,256,128,8 takes 0.498 ms, with a
        # wide gathered side 0.711 ms. dW2 takes the other orientation if that pads less: this
        # saves 2% of the layer at 32768,2048,1408,64,6 and 3% at 32768,2048,128,128,8.
        m, n = (256, 128) if gather_right else (128, 256)
        if not gather_right and _padded(M, N, 256, 128) < 0.95 * _padded(M, N, 128, 256):
            m, n = 256, 128
        m, n = (128 if M <= 128 else m), (128 if N <= 128 else n)
        stages = 4 if m + n > 256 else 5
        return WeightConfig(m, n, 64, warps=8, stages=stages, tma=True, hopper=True)
    if _has_tma_and_shared_memory(target):
        return WeightConfig(128, 128, 64, warps=8, stages=3, tma=True, programs=2)
    return WeightConfig(128, 64, 32, warps=4, stages=3, tma=False, programs=2)


def _padded(M: int, N: int, m: int, n: int) -> int:
    """Elements of the (m, n) tiles that cover (M, N), padding included."""
    return m * ceil_div(M, m) * n * ceil_div(N, n)
