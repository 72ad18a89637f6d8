"""The sizes of one layer call, and their letters.

T tokens, H hidden size, I expert intermediate size, E experts, K experts per token,
R routed rows (T·K for top-K), M the rows of a tile (`tile_m`).
W1 is (E, 2I, H) for gated activations and (E, I, H) for plain ones; W2 is (E, H, I).
"""

from dataclasses import dataclass

from .errors import bad_argument

BLOCK = 128  # columns of a row of Z or A that share one scale in e4m3
_SLICE_COLUMNS = 64  # slices of H are multiples of it: TMA reads views that are 16-byte aligned


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes of one layer call. `Problem.parse("24576,1536,256,128,8")` reads T,H,I,E,K."""

    T: int
    H: int
    I: int
    E: int
    K: int
    gated: bool = True

    def __post_init__(self) -> None:
        check_size("T", self.T, least=0)
        for name in ("H", "I", "E", "K"):
            check_size(name, getattr(self, name))

    @classmethod
    def parse(cls, text: str, gated: bool = True) -> "Problem":
        fields = text.split(",") if isinstance(text, str) else []
        if len(fields) != 5 or not all(field.strip().isdecimal() for field in fields):
            raise bad_argument(
                "shape",
                "five integers T,H,I,E,K",
                repr(text),
                "Write for example 24576,1536,256,128,8.",
            )
        T, H, I, E, K = (int(field) for field in fields)
        return cls(T, H, I, E, K, gated)

    def __str__(self) -> str:
        return f"{self.T},{self.H},{self.I},{self.E},{self.K}"

    @property
    def R(self) -> int:
        """Routed rows: one per (token, expert) pair."""
        return self.T * self.K

    @property
    def N(self) -> int:
        """Columns of Z: 2I for gated activations, I for plain ones."""
        return 2 * self.I if self.gated else self.I


def check_size(argument: str, value: object, least: int = 1, multiple: int = 1) -> None:
    """Raise ValueError unless `value` is an int, at least `least` and divisible by `multiple`."""
    if type(value) is bool or not isinstance(value, int) or value < least or value % multiple:
        kind = "an integer" if multiple == 1 else f"a multiple of {multiple}"
        raise bad_argument(
            argument,
            f"{kind} of at least {max(least, multiple)}",
            repr(value),
            "Pass such an int.",
        )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def max_tiles(rows: int, experts: int, tile_m: int) -> int:
    """Upper bound on the number of tiles for `rows` rows and `experts` experts, any routing."""
    return ceil_div(rows, tile_m) + experts


def slice_width(hidden: int, slices: int) -> int:
    """Columns of H in a slice; the last one may have fewer."""
    return min(hidden, _SLICE_COLUMNS * ceil_div(hidden, _SLICE_COLUMNS * slices))


def padded_rows(rows: int, experts: int) -> int:
    """Columns of dZᵀ and A'ᵀ: each expert's rows start at a multiple of 128."""
    return BLOCK * (rows // BLOCK + experts)
