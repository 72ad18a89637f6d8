"""The order in which programs take tiles, and where a tile lies: shared by all grouped GEMMs."""

import triton
import triton.language as tl

BAND: tl.constexpr = tl.constexpr(2048)  # rows that the tiles in flight at once should cover
_STAYS: tl.constexpr = tl.constexpr(1 << 23)  # weights per expert that stay in L2: 16 of 60 MB
_LIGHT: tl.constexpr = tl.constexpr(1 << 19)  # weights that tiles far apart find in L2: 1 MB
_SHORT: tl.constexpr = tl.constexpr(1024)  # rows of a short expert


@triton.jit
def in_bands(index, m_tiles, n_tiles: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """M-tile and N-tile of tile `index` of m_tiles × n_tiles.

    The tiles in flight at once should form a square, so that they share most of what they load. A
    wide matrix is walked in bands of BAND rows, column by column within a band; a narrow one that
    is higher than wide row by row.
    """
    HIGH: tl.constexpr = max(BAND // BLOCK_M, 1)
    bands = tl.maximum((m_tiles + HIGH // 2) // HIGH, 1)  # the last band has the remainder too
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
    """Expert, its first and end row, and the tile's number within the expert."""
    entry = tiles + 4 + 4 * index
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def corner_of(
    index, start, end, number,
    K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """First row and N-tile of work item `index` of a GEMM of rows (R, K) with weights (E, N, K).

    start, end and number are the entry of tile index // n_tiles. The order depends on the expert:

    - Weights that stay in L2: row by row, so that a row of the result is written at once.
    - Larger weights: in bands. Row by row they would be read again for every row of tiles: at
      16384,4096,14336,8,2 up reads 41.5 GB that way, 7.7 GB in bands.
    - Few rows: column by column, so that tiles that share weights run together. This saves 2% of
      the layer at 16384,4096,1024,256,4. Not for light weights: there the forward pass took 4%
      longer at 16384,2048,64,1024,32.
    """
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    m_tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    in_expert = number * n_tiles + index % n_tiles
    if N * K > _STAYS:
        row, column = in_bands(in_expert, m_tiles, n_tiles, BLOCK_M, BLOCK_N)
    else:
        by_row = (m_tiles * BLOCK_M > _SHORT) | (N * K < _LIGHT)
        first = tl.where(by_row, number, 0)
        high = tl.where(by_row, 1, tl.maximum(m_tiles, 1))
        in_expert -= first * n_tiles
        column = in_expert // high
        row = first + in_expert - column * high
    return start + row * BLOCK_M, column


@triton.jit
def tile_of(
    tiles, index, K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Expert, first row, the expert's end row, and N-tile of work item `index`."""
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    expert, start, end, number = load_tile(tiles, index // n_tiles)
    row, column = corner_of(index, start, end, number, K, N, BLOCK_M, BLOCK_N)
    return expert, row, end, column
