"""Frozen weights in 4 or 8 bits, as arguments where `experts` takes w1 and w2.

They stay packed. Each GEMM decodes its weight just before it runs, into memory that is freed after
it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import torch

from . import ops
from .errors import bad_argument, say_once
from .reference import weights as reference
from .shapes import BLOCK, ceil_div
from .tensors import E4M3, Weight
from .validation import check_rank, resolve_backend

_E8M0 = torch.float8_e8m0fnu
_MXFP4_SPAN = 14  # between block exponents of an expert that e4m3 holds under one scale


class ForFp8(NamedTuple):
    """What `precision="fp8"` needs of a weight: the scales (E,) and bounds of the norms (E, K)."""

    scale: torch.Tensor
    norm: torch.Tensor


class PackedWeight:
    """A packed weight of all experts: a frozen dataclass of tensors and of `transposed`.

    `transposed`: packed along N, in the order (E, K, N); the tensors then have the shapes that the
    format gives to (E, K, N).
    """

    shape: torch.Size  # (E, N, K), as the GEMM sees it
    transposed: bool

    def stored(self) -> Weight:
        """As operators take it."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """What it is decoded to by default; `experts` decodes it to the dtype of x."""
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return next(self.tensors())[1].device

    @property
    def requires_grad(self) -> bool:
        return False

    def __len__(self) -> int:
        """E, as of a tensor."""
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for _, t in self.tensors())

    @property
    def mT(self) -> Self:
        """The same memory as a weight (E, K, N)."""
        return replace(self, transposed=not self.transposed)  # type: ignore[type-var]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of the format."""
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            parts = value._asdict() if isinstance(value, NestedAbsmax) else {field.name: value}
            yield from ((n, t) for n, t in parts.items() if isinstance(t, torch.Tensor))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """A weight of what a function makes of each tensor."""
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]
        return replace(self, **{n: _each(getattr(self, n), function) for n in names})  # type: ignore

    def to(self, device: torch.device | str) -> Self:
        """The same weight on another device."""
        moved, scales = self.map(lambda t: t.to(device)), self.fp8
        return moved if scales is None else moved._with(ForFp8(*(t.to(device) for t in scales)))

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The weight (E, N, K), computed by plain PyTorch."""
        return reference.dequantize_weight(self.stored(), 0, len(self), dtype)

    @torch.no_grad()
    def for_fp8(self) -> Self:
        """The same weight with the scales and norms that `precision="fp8"` needs.

        Call it once, on the device of the layer. Without them every call computes them, which
        decodes the weight to bf16. A change of the weight drops them, unless it is made through
        `.data` of a tensor, which PyTorch does not count.
        """
        self._warn_if_wide()
        w = self.stored()
        assert w.codes is not None
        backend = resolve_backend(None, w.codes)
        _, _, scale, norm = ops.quantize_weight(w, False, True, backend)
        return self._with(ForFp8(scale, norm))

    @property
    def fp8(self) -> ForFp8 | None:
        """What `for_fp8` computed; None after a change of the weight."""
        scales, versions = vars(self).get("_fp8", (None, None))
        return scales if versions == self._versions() else None

    def _with(self, scales: ForFp8) -> Self:
        made = replace(self)  # type: ignore[type-var]
        object.__setattr__(made, "_fp8", (scales, made._versions()))
        return made

    def _versions(self) -> list[int]:
        """PyTorch's count of changes of each tensor; those of inference mode have none."""
        if torch.compiler.is_compiling():  # Dynamo of PyTorch 2.11 knows no `is_inference`
            return []
        return [0 if t.is_inference() else t._version for _, t in self.tensors()]

    def __getstate__(self) -> dict[str, Any]:
        # Tensors of a copy or file count their changes anew.
        return {name: value for name, value in vars(self).items() if name != "_fp8"}

    def _warn_if_wide(self) -> None:
        """Warn if e4m3 cannot hold a weight for which it should be exact."""

    def _check(self) -> None:
        for name, t in self.tensors():
            if hasattr(t, "placements"):
                remedy = "Pack each rank's own experts; see sonicmoe.distributed.experts."
                raise bad_argument(name, "a plain tensor", "a DTensor", remedy)
            if t.requires_grad:
                expected = "a tensor without gradient: packed weights are frozen"
                raise bad_argument(name, expected, "requires_grad=True", "requires_grad_(False).")
            if t.device != self.device:
                raise bad_argument(
                    name, f"the device of the others ({self.device})", t.device, "Move it."
                )
        for field in fields(self):  # type: ignore[arg-type]
            # The kernels read them as they are in memory, so others are copied, once.
            value = _each(getattr(self, field.name), torch.Tensor.contiguous)
            object.__setattr__(self, field.name, value)


@dataclass(frozen=True, eq=False)
class Mxfp4(PackedWeight):
    """OCP MXFP4, as gpt-oss stores it: e2m1 · 2^(scale − 127), a scale for 32 weights of a row.

    blocks (E, N, K/32, 16) uint8, the low nibble is the even column; scales (E, N, K/32) uint8.
    """

    blocks: torch.Tensor
    scales: torch.Tensor
    transposed: bool = False

    def __post_init__(self) -> None:
        _check_tensor("blocks", self.blocks, (torch.uint8,), "(E, N, K/32, 16)")
        experts, rows, blocks, _ = self.blocks.shape
        _check_size("blocks", self.blocks, (experts, rows, blocks, 16), "(E, N, K/32, 16)")
        _check_tensor("scales", self.scales, (torch.uint8,), "(E, N, K/32)")
        _check_size("scales", self.scales, (experts, rows, blocks), "(E, N, K/32)")
        self._check()

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.stored().shape

    def stored(self) -> Weight:
        return _packed("mxfp4", self.blocks.flatten(2), self.scales, self.transposed, self.fp8)

    def wide_experts(self) -> int:
        """How many experts e4m3 cannot hold exactly under one scale: the exponents of their blocks,
        those of zeros aside, span more than 14. Waits for the device."""
        used = torch.empty_like(self.scales, dtype=torch.bool)
        for e in range(len(used)):
            used[e] = ((self.blocks[e] & 0x77) != 0).any(-1)
        exponents = self.scales.short()
        largest = torch.where(used, exponents, -1).flatten(1).amax(1)
        smallest = torch.where(used, exponents, 256).flatten(1).amin(1)
        return int((largest - smallest > _MXFP4_SPAN).sum())

    def _warn_if_wide(self) -> None:
        if wide := self.wide_experts():
            say_once(
                f"{wide} of {len(self.scales)} experts have MXFP4 exponents that span more than"
                f" {_MXFP4_SPAN}: in e4m3 their smallest weights are rounded"
            )


class NestedAbsmax(NamedTuple):
    """How the uint8 absmax of NF4 is decoded: code2[absmax] · absmax2 + offset.

    code2 (256,) and absmax2, one for 256 of absmax, in fp32; offset is a number or a tensor ().
    """

    code2: torch.Tensor
    absmax2: torch.Tensor
    offset: Any
    blocksize: int = 256


@dataclass(frozen=True, eq=False)
class Nf4(PackedWeight):
    """NF4 of bitsandbytes: code[nibble] · absmax, an absmax for 64 weights in memory order.

    codes uint8, one for two weights, the high nibble is the even one; absmax fp32, or uint8 with
    `nested`; shape (E, N, K); code (16,) fp32. If `transposed`, blocks run over (E, K, N): `shape`
    is what the GEMM sees all the same.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    shape: tuple[int, int, int]  # type: ignore[assignment]
    code: torch.Tensor
    nested: NestedAbsmax | None = None
    transposed: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or not all(isinstance(size, int) for size in self.shape):
            raise bad_argument("shape", "(E, N, K)", tuple(self.shape), "That of the weight.")
        object.__setattr__(self, "shape", torch.Size(self.shape))
        weights = self.shape.numel()  # type: ignore[attr-defined]
        if weights % 64:
            expected = "sizes whose product is a multiple of 64"
            raise bad_argument("shape", expected, tuple(self.shape), "Pad the weight with zeros.")
        _check_dtype("codes", self.codes, (torch.uint8,))
        if self.codes.shape not in ((weights // 2,), (weights // 2, 1)):
            expected = f"shape (E·N·K/2,) = ({weights // 2},)"
            raise bad_argument("codes", expected, tuple(self.codes.shape), "See `shape`.")
        _check_tensor("code", self.code, (torch.float32,), "(16,)")
        _check_size("code", self.code, (16,), "(16,)")
        scale = torch.float32 if self.nested is None else torch.uint8
        _check_dtype("absmax", self.absmax, (scale,))
        if self.absmax.numel() != weights // 64:
            expected = f"{weights // 64} values, one for 64 weights"
            raise bad_argument("absmax", expected, self.absmax.numel(), "Use blocksize=64.")
        if self.nested is not None:
            self._check_nested(self.nested)
        self._check()

    def _check_nested(self, nested: NestedAbsmax) -> None:
        if not isinstance(nested, NestedAbsmax):
            remedy = "NestedAbsmax(code2, absmax2, offset)."
            raise bad_argument("nested", "a NestedAbsmax", type(nested).__name__, remedy)
        code2, absmax2, offset, blocksize = nested
        if blocksize != reference.NESTED_BLOCK:
            raise bad_argument("blocksize", "256", blocksize, "bitsandbytes uses no other.")
        _check_tensor("code2", code2, (torch.float32,), "(256,)")
        _check_size("code2", code2, (256,), "(256,)")
        _check_tensor("absmax2", absmax2, (torch.float32,), "(blocks,)")
        blocks = ceil_div(self.absmax.numel(), reference.NESTED_BLOCK)
        _check_size("absmax2", absmax2, (blocks,), "(blocks,), one for 256 of absmax")
        offset = torch.as_tensor(offset, dtype=torch.float32, device=self.codes.device)
        object.__setattr__(self, "nested", nested._replace(offset=offset.reshape(())))

    def stored(self) -> Weight:
        experts, n, k = self.shape
        codes = self.codes.view(experts, k if self.transposed else n, -1)
        found = _packed("nf4", codes, self.absmax, self.transposed, self.fp8)
        found = found._replace(table=self.code)
        if self.nested is None:
            return found
        code2, absmax2, offset, _ = self.nested
        return found._replace(scale_table=code2, scale2=absmax2, offset=offset)

    @property
    def mT(self) -> "Nf4":
        experts, n, k = self.shape
        return replace(self, shape=(experts, k, n), transposed=not self.transposed)


@dataclass(frozen=True, eq=False)
class Fp8Blocks(PackedWeight):
    """e4m3 with a scale for 128×128 weights, as DeepSeek-V3 and Qwen store it.

    weight (E, N, K) e4m3; scale_inv (E, ⌈N/128⌉, ⌈K/128⌉), fp32 or e8m0. The weight is the fp32
    product of both, rounded once.
    """

    weight: torch.Tensor
    scale_inv: torch.Tensor
    transposed: bool = False

    def __post_init__(self) -> None:
        _check_tensor("weight", self.weight, (E4M3,), "(E, N, K)")
        experts, rows, columns = self.weight.shape
        blocks = (experts, ceil_div(rows, BLOCK), ceil_div(columns, BLOCK))
        dims = "(E, ⌈N/128⌉, ⌈K/128⌉)"
        _check_tensor("scale_inv", self.scale_inv, (torch.float32, _E8M0), dims)
        _check_size("scale_inv", self.scale_inv, blocks, dims)
        self._check()

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.stored().shape

    def stored(self) -> Weight:
        return _packed("fp8", self.weight, self.scale_inv, self.transposed, self.fp8)


@dataclass(frozen=True, eq=False)
class Int4(PackedWeight):
    """INT4 of compressed-tensors: (nibble − 8) · scale, a scale for 32 weights of a row.

    packed (E, N, K/8) int32: nibble i of word j is column 8j + i; scale (E, N, K/32) bf16.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    transposed: bool = False

    def __post_init__(self) -> None:
        _check_tensor("packed", self.packed, (torch.int32,), "(E, N, K/8)")
        experts, rows, words = self.packed.shape
        if words % 4:
            expected = "(E, N, K/8) with K a multiple of 32"
            got = tuple(self.packed.shape)
            raise bad_argument("packed", expected, got, "Other group sizes are not supported.")
        _check_tensor("scale", self.scale, (torch.bfloat16,), "(E, N, K/32)")
        _check_size("scale", self.scale, (experts, rows, words // 4), "(E, N, K/32)")
        self._check()

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.stored().shape

    def stored(self) -> Weight:
        codes = self.packed.view(torch.uint8)
        return _packed("int4", codes, self.scale, self.transposed, self.fp8)


def stored(w: Any) -> Any:
    """A tensor as it is, a packed weight as operators take it."""
    return w.stored() if isinstance(w, PackedWeight) else w


# --- what the classes share -----------------------------------------------------------------------
def _packed(format: str, codes, scale, transposed: bool, fp8: ForFp8 | None) -> Weight:
    w_scale, w_norm = fp8 or (None, None)
    packed = {"codes": codes, "scale": scale, "format": format, "is_transposed": transposed}
    return Weight(None, w_scale=w_scale, w_norm=w_norm, **packed)


def _each(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value of a field after a function of its tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, NestedAbsmax):
        return NestedAbsmax(*[_each(part, function) for part in value])
    return value


def _check_dtype(name: str, t: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(t, torch.Tensor):
        raise bad_argument(name, "a tensor", type(t).__name__, "Pass what the checkpoint holds.")
    if t.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise bad_argument(name, expected, t.dtype, "Pass what the checkpoint holds.")


def _check_tensor(name: str, t: Any, dtypes: tuple[torch.dtype, ...], dims: str) -> None:
    _check_dtype(name, t, dtypes)
    check_rank(name, t, dims)


def _check_size(name: str, t: torch.Tensor, shape: tuple[int, ...], dims: str) -> None:
    if t.shape != shape:
        remedy = "Check it against the other tensors of the weight."
        raise bad_argument(name, f"shape {dims} = {tuple(shape)}", tuple(t.shape), remedy)
