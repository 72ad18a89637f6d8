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


class Weight(NamedTuple):
    """A weight (E, N, K) of all experts, as GEMMs take it: a parameter, also with its copy in e4m3,
    or a frozen weight in 4 or 8 bits.

    dense         the parameter, stored as (E, N, K) or (E, K, N); None: packed
    w8, w8_t      in e4m3, (E, N, K) and (E, K, N); what is None is computed when a GEMM needs it
    w_scale (E,)  of both; `reference.fp8` says what the scales are
    w_norm (E, K) bounds the Euclidean norms of the columns; the backward pass needs that of W2
    codes         (E, P, bytes of Q values), P = N and Q = K, or the other way round if
                  `is_transposed`; both are multiples of 8

    format   codes                       scale
    mxfp4    two e2m1 per byte           uint8 exponents + 127 (E, P, Q/32)
    nf4      two indices into `table`    fp32 of 64 flat elements; in 8 bits: index into
             per byte, the first high    `scale_table`, times scale2 of 256 scales, plus offset
    int4     two nibbles per byte,       bf16 (E, P, Q/32)
             8 more than the value
    fp8      e4m3                        fp32 or e8m0 (E, ⌈P/128⌉, ⌈Q/128⌉)
    """

    dense: torch.Tensor | None
    w8: torch.Tensor | None = None
    w8_t: torch.Tensor | None = None
    w_scale: torch.Tensor | None = None
    w_norm: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    table: torch.Tensor | None = None
    scale_table: torch.Tensor | None = None
    scale2: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    format: str | None = None
    is_transposed: bool = False

    @classmethod
    def of(cls, w: "torch.Tensor | Weight") -> "Weight":
        return w if type(w) is cls else cls(w)  # type: ignore[arg-type]

    @property
    def stored_sizes(self) -> tuple[int, int, int]:
        """E, P and Q of the codes."""
        assert self.codes is not None
        experts, rows, size = self.codes.shape
        return experts, rows, size if self.format == "fp8" else 2 * size

    @property
    def shape(self) -> torch.Size:
        """(E, N, K)."""
        if self.codes is None:
            found = self.w8 if self.dense is None else self.dense
            assert found is not None
            return found.shape
        experts, rows, columns = self.stored_sizes
        return torch.Size((experts, *((columns, rows) if self.is_transposed else (rows, columns))))

    @property
    def mT(self) -> "Weight":
        """As a weight (E, K, N), without norms."""
        return self._replace(
            dense=None if self.dense is None else self.dense.mT,
            w8=self.w8_t,
            w8_t=self.w8,
            w_norm=None,
            is_transposed=self.codes is not None and not self.is_transposed,
        )

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dense is None else self.dense.dtype

    @property
    def device(self) -> torch.device:
        held = self.codes if self.dense is None else self.dense
        assert held is not None
        return held.device

    @property
    def requires_grad(self) -> bool:
        return self.dense is not None and self.dense.requires_grad

    def dim(self) -> int:
        return len(self.shape)

    def ranges(self, dtype: torch.dtype) -> list[tuple[int, int]]:
        """The first expert and the number of experts of each part of a packed weight that is
        decoded at once."""
        experts, rows, columns = self.stored_sizes
        count = max(1, DECODED_BYTES // (rows * columns * dtype.itemsize))
        return [(e, min(count, experts - e)) for e in range(0, experts, count)]


class Linear(NamedTuple):
    """One of the two linear maps of every expert: W (E, out, in), a bias (E, out), and the LoRA
    factors A (E, r, in) and scale·B (E, out, r)."""

    weight: Weight
    bias: torch.Tensor | None = None
    lora_a: torch.Tensor | None = None
    lora_b: torch.Tensor | None = None


# --- between the passes ---------------------------------------------------------------------------
class Rows(NamedTuple):
    """Rows (R, N); in e4m3 with their scales, (⌈N/128⌉, R) or (1, R)."""

    values: torch.Tensor
    scale: torch.Tensor | None = None


class Kept(NamedTuple):
    """What dZ needs of the forward pass: Z (R, N) in the dtype of the data or e4m3.

    z_scale is None unless Z is in e4m3. In FP8 it is the largest |Z| of blocks of a row (J, R),
    from which the scale of Z follows. The others are of FP8 alone: the largest |Z| of columns of an
    expert (E, I), and the scales of A and X.
    """

    z: torch.Tensor | None = None
    z_scale: torch.Tensor | None = None
    zmax_columns: torch.Tensor | None = None
    a_scale: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None


class Dz(NamedTuple):
    """dZ (R, N); in FP8 with its scales (R,), and for dW1 dZᵀ (N, P) with its scales (E, N)."""

    values: torch.Tensor | None
    scale: torch.Tensor | None = None
    t: torch.Tensor | None = None
    t_scale: torch.Tensor | None = None


# --- FP8 ------------------------------------------------------------------------------------------
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


# --- which results of a backward pass are needed: the others are not computed ---------------------
class DzResults(NamedTuple):
    """dX and LoRA's dB1 are computed from dZ, dW1 from it or in FP8 from dZᵀ; dW2 and LoRA's dA2
    from A', in FP8 dW2 from A'ᵀ."""

    dz: bool
    dz_t: bool
    a: bool
    dscores: bool


class Needs(NamedTuple):
    """Which gradients of one projection and of its input, X or the scores, are needed."""

    source: bool
    weight: bool
    bias: bool
    lora_a: bool
    lora_b: bool

    @property
    def lora(self) -> bool:
        return self.lora_a or self.lora_b
