"""Named tuples of tensors that operators take and return.

None stands for what is not needed or not kept.
"""

from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0

# Of a weight that is decoded for a GEMM: if there are more, GEMMs run on a part of the experts at a
# time. It has all experts of Qwen3-30B and gpt-oss-20b; a part still keeps every SM busy.
DECODED_BYTES = 2**30


class Permutation(NamedTuple):
    """Where each routed row comes from and where it goes. Rows are sorted by expert.

    row_token     (R,)    row  -> token
    row_slot      (R,)    row  -> flat (token, k) slot
    slot_row      (S,)    slot -> row, the inverse; -1 where the slot's expert is not here
    token_start   (T+1,)  slots of token t are [start[t], start[t+1]); None: K slots each
    counts        (E,)    rows of each expert
    expert_start  (E+1,)  rows of expert e are [start[e], start[e+1])
    tiles         (1+n,4) row 0: (number of tiles, rows of the longest expert, 1 if the offsets of
                  `grouped_experts` were out of bounds, 0); row 1+i: of tile i (expert, the expert's
                  first and end row, number among the expert's tiles)
    tile_m        rows of a tile

    The first five are None for rows that arrive sorted: row i is token i there.

    Tensors are int32. R = S is the size of the buffers; rows at or past expert_start[E] are not in
    use and hold nothing to be trusted. Within an expert, rows keep the order of their slots.

    T=3, K=1, E=2, ids=[1, 0, 1]: row_token=[1, 0, 2], expert_start=[0, 1, 3].
    """

    row_token: torch.Tensor | None
    row_slot: torch.Tensor | None
    slot_row: torch.Tensor | None
    token_start: torch.Tensor | None
    counts: torch.Tensor | None
    expert_start: torch.Tensor
    tiles: torch.Tensor
    tile_m: int

    @classmethod
    def of_sorted_rows(
        cls, expert_start: torch.Tensor, tiles: torch.Tensor, tile_m: int
    ) -> "Permutation":
        return cls(None, None, None, None, None, expert_start, tiles, tile_m)

    @property
    def is_gathered(self) -> bool:
        """Whether rows are gathered from tokens; otherwise they arrive sorted by expert."""
        return self.row_token is not None

    @property
    def sorted_rows(self) -> "Permutation":
        """The same rows for a GEMM whose operands both have one row for each of them."""
        return Permutation.of_sorted_rows(self.expert_start, self.tiles, self.tile_m)

    def rows_of(self, x: torch.Tensor) -> int:
        """R, where x (T, H) are the tokens, or (R, H) the sorted rows."""
        return (x if self.row_token is None else self.row_token).shape[0]

    def most_rows_of_an_expert(self, x: torch.Tensor) -> int:
        """T if each token names K experts, no expert twice; else R."""
        return x.shape[0] if self.token_start is None else self.rows_of(x)


class Lora(NamedTuple):
    """U (R, r), contiguous, and B (E, N, r): U Bᵀ joins a GEMM's accumulator.

    B is best stored like the weights beside it.
    """

    lora_u: torch.Tensor | None = None
    lora_b: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return 0 if self.lora_u is None else self.lora_u.shape[1]


NO_LORA = Lora()


class Packed(NamedTuple):
    """A frozen weight (E, N, K) in 4 or 8 bits, stored as (E, P, Q): P = N, Q = K, or the other way
    round if `is_transposed`. Both are multiples of 8.

    format   codes                       scale
    mxfp4    two e2m1 per byte           uint8 exponents + 127 (E, P, Q/32)
    nf4      two indices into `table`    fp32 of 64 flat elements; in 8 bits: index into
             per byte, the first high    `scale_table`, times scale2 of 256 scales, plus offset
    int4     eight nibbles per int32,    bf16 (E, P, Q/32)
             8 more than the value
    fp8      e4m3 (E, P, Q)              fp32 or e8m0 (E, ⌈P/128⌉, ⌈Q/128⌉)

    The last two fields are w_scale and w_norm of `Fp8Weight`, if they were computed before.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor | None
    scale_table: torch.Tensor | None
    scale2: torch.Tensor | None
    offset: torch.Tensor | None
    format: str
    experts: int
    stored_rows: int
    stored_columns: int
    is_transposed: bool
    fp8_scale: torch.Tensor | None = None
    fp8_norm: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """(E, N, K)."""
        stored = (self.stored_rows, self.stored_columns)
        return torch.Size((self.experts, *(stored[::-1] if self.is_transposed else stored)))

    @property
    def mT(self) -> "Packed":
        """As a weight (E, K, N)."""
        return self._replace(is_transposed=not self.is_transposed)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def requires_grad(self) -> bool:
        return False

    def dim(self) -> int:
        return 3

    def parts(self, dtype: torch.dtype) -> list[tuple[int, int]]:
        """The first expert and the number of experts of each part that is decoded at once."""
        expert = self.stored_rows * self.stored_columns * dtype.itemsize
        count = max(1, DECODED_BYTES // expert)
        return [(e, min(count, self.experts - e)) for e in range(0, self.experts, count)]


# --- FP8 ------------------------------------------------------------------------------------------
class Fp8Weight(NamedTuple):
    """A weight (E, N, K), the same transposed (E, K, N), and its scales (E,).

    `w_norm` (E, K) bounds the Euclidean norms of the columns; the backward pass needs that of W2.
    `reference.fp8` says what the scales are.
    """

    w8: torch.Tensor | None = None
    w8_t: torch.Tensor | None = None
    w_scale: torch.Tensor | None = None
    w_norm: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        assert self.w8 is not None
        return self.w8.shape

    @property
    def mT(self) -> "Fp8Weight":
        return Fp8Weight(self.w8_t, self.w8, self.w_scale)


class Fp8Kept(NamedTuple):
    """What dZ needs of the forward pass: Z in bf16 or e4m3 (R, N), the largest |Z| of blocks of
    a row (J, R) and of columns of an expert (E, I), and the scales of A and X."""

    z: torch.Tensor
    zmax: torch.Tensor
    zmax_columns: torch.Tensor
    a_scale: torch.Tensor
    x_scale: torch.Tensor


class DzScales(NamedTuple):
    """What the dZ GEMM multiplies by before it rounds, and the scales that undo it.

    row_factors (5, R): of the accumulator to dA', the score, and of rows of dZ, dZᵀ and A'ᵀ.
    column_factors (E, I): of columns of dZᵀ; gate and up have the same.
    block_factors (E, J): of blocks of 128 columns of A'ᵀ.
    """

    row_factors: torch.Tensor
    column_factors: torch.Tensor | None
    block_factors: torch.Tensor | None
    dz_scale: torch.Tensor
    dz_t_scale: torch.Tensor | None
    a_t_scale: torch.Tensor | None


class Fp8Dz(NamedTuple):
    """dZ (R, N) with its scales (R,) for dX; dZᵀ (N, P) with its scales (E, N) for dW1."""

    dz8: torch.Tensor | None
    dz_scale: torch.Tensor | None
    dz_t: torch.Tensor | None
    dz_t_scale: torch.Tensor | None


# --- which results of a backward pass are needed: the others are not computed ---------------------
class DzResults(NamedTuple):
    """`ops.dz`: A' is what dW2 and LoRA's dA2 are computed from."""

    dz: bool
    a: bool
    dscores: bool


class Fp8DzResults(NamedTuple):
    """`ops.fp8_dz`: dX is computed from dZ, dW1 from dZᵀ and dW2 from A'ᵀ."""

    dz: bool
    dz_t: bool
    a_t: bool
    dscores: bool
