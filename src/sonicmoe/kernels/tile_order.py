"""The order in which programs take tiles, and where a tile lies: shared by all grouped GEMMs."""

import triton
import triton.language as tl

BAND: tl.constexpr = tl.constexpr(2048)  # rows, which the tiles in work at once should cover
_STAYS: tl.constexpr = tl.constexpr(1 << 23)  # weights of an expert that L2 keeps: 16 MB of 60
_LIGHT: tl.constexpr = tl.constexpr(1 << 19)  # such that tiles far apart find them in L2: 1 MB
_SHORT: tl.constexpr = tl.constexpr(1024)  # rows of an expert


@triton.jit
def in_bands(index, m_tiles, n_tiles: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row and column of tile `index` of m_tiles × n_tiles.

    The tiles in work at once should be about as high as wide, and share most of what they fetch: a
    wide matrix is walked in bands, down each of their columns, one that is narrow and higher than
    wide row by row.
    """
    HIGH: tl.constexpr = max(BAND // BLOCK_M, 1)
    bands = tl.maximum((m_tiles + HIGH // 2) // HIGH, 1)  # the last one has the remainder too
    band = tl.minimum(index // (HIGH * n_tiles), bands - 1)
    first = band * HIGH
    high = tl.where(band == bands - 1, tl.maximum(m_tiles - first, 1), HIGH)
    if n_tiles * BLOCK_N <= BAND:
        by_row = m_tiles * BLOCK_M >= n_tiles * BLOCK_N
        first = tl.where(by_row, index // n_tiles, first)
        high = tl.where(by_row, 1, high)
    index -= first * n_tiles
    n = index // high
    return first + index - n * high, n


@triton.jit
def load_tile(tiles, index):
    """Expert, the expert's first and end row, and the tile's number among those of the expert."""
    entry = tiles + 4 + 4 * index
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def place_of(
    index, start, end, number,
    K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """First row and column of tiles of work item `index` of rows (R, K) times weights (E, N, K).

    start, end and number are the entry of tile index // n_tiles. Where L2 keeps the weights of an
    expert, rows of tiles follow each other, and a row of the result is written at once. Large ones
    would be read again for every row: at 16384,4096,14336,8,2 up reads 41.5 GB so, 7.7 in bands.
    A short expert's tiles go column by column: those that share weights run together, where one of
    its rows might fall into the next round. 2% of the layer at 16384,4096,1024,256,4; not where
    weights are light: forward took 4% longer at 16384,2048,64,1024,32.
    """
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    m_tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    among_the_experts = number * n_tiles + index % n_tiles
    if N * K > _STAYS:
        row, column = in_bands(among_the_experts, m_tiles, n_tiles, BLOCK_M, BLOCK_N)
    else:
        by_row = (m_tiles * BLOCK_M > _SHORT) | (N * K < _LIGHT)
        first = tl.where(by_row, number, 0)
        high = tl.where(by_row, 1, tl.maximum(m_tiles, 1))
        among_the_experts -= first * n_tiles
        column = among_the_experts // high
        row = first + among_the_experts - column * high
    return start + row * BLOCK_M, column


@triton.jit
def tile_of(
    tiles, index, K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Expert, first row, the expert's end row, and column of tiles of work item `index`."""
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    expert, start, end, number = load_tile(tiles, index // n_tiles)
    row, column = place_of(index, start, end, number, K, N, BLOCK_M, BLOCK_N)
    return expert, row, end, column
