"""Checks of the caller's arguments. None synchronizes with a GPU: see `nan_unless`."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from .capability import check_fp8_experts
from .enums import ActivationType
from .errors import bad_argument
from .shapes import check_size
from .tensors import Weight

LAYOUTS = ("interleaved", "concatenated")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ALIGNMENT = 8  # elements: rows are 16-byte aligned in bf16, for vector loads and TMA
FP8_ALIGNMENT = 16  # elements of e4m3: also 16 bytes
_MAX_EXPERTS = 32767  # the permutation sorts int32 keys with 16 bits for the slot


def resolve_backend(backend: str | None, x: torch.Tensor) -> str:
    """`None` picks the Triton kernels for GPU tensors and plain PyTorch elsewhere.

    On the meta device, kernels are only compiled: see `precompile`.
    """
    if backend is None:
        return "triton" if x.is_cuda else "torch"
    if backend not in ("torch", "triton"):
        raise bad_argument(
            "backend", "'torch', 'triton' or None", repr(backend), "None picks by the device of x."
        )
    if backend == "triton" and not (x.is_cuda or x.is_meta or _interpreting()):
        raise bad_argument(
            "backend",
            "tensors on a GPU for the Triton kernels",
            f"x on {x.device}",
            "Move the tensors to a GPU, or omit backend to run plain PyTorch.",
        )
    if backend == "triton" and x.dtype == torch.float64:
        raise bad_argument(
            "x",
            "bfloat16, float16 or float32 for the Triton kernels",
            x.dtype,
            "Pass backend='torch' for float64.",
        )
    return backend


def _interpreting() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


def fp8_backend(backend: str, x: torch.Tensor) -> str:
    """The backend of experts in FP8. On a GPU, plain PyTorch must be requested: it loops over
    experts."""
    if backend == "triton" and x.is_cuda:
        gpu = torch.cuda.get_device_properties(x.device)
        arch = 10 * gpu.major + gpu.minor if torch.version.hip is None else 0
        remedy = "Omit precision, or pass backend='torch' (to MoE: KernelBackendMoE.torch)"
        check_fp8_experts(arch, f"{remedy}, which is slow.")
        return "triton"
    return backend if x.is_meta else "torch"


def check_writable(argument: str, folder: Path) -> None:
    """Raise unless files can be written to `folder`, which need not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise bad_argument(argument, "a folder", f"the file {existing}", "Name another folder.")
    try:
        with tempfile.TemporaryFile(dir=existing):  # `os.access` is always true for root
            pass
    except OSError as error:
        expected, got = "a folder that can be written to", f"{existing} ({error.strerror})"
        remedy = "Name another, or change its permissions."
        raise bad_argument(argument, expected, got, remedy) from None


def check_num_experts(num_experts: int, name: str = "num_experts") -> None:
    check_size(name, num_experts)
    if num_experts > _MAX_EXPERTS:
        raise bad_argument(
            name, f"at most {_MAX_EXPERTS} experts", num_experts, "Use fewer, larger experts."
        )


def check_k(k: int, num_experts: int, name: str = "k") -> None:
    check_size(name, k)
    if not 1 <= k <= num_experts:
        raise bad_argument(
            name,
            f"between 1 and the number of experts ({num_experts})",
            k,
            "Choose fewer experts per token or more experts.",
        )


def check_rank(name: str, t: torch.Tensor, dims: str) -> None:
    rank = dims.count(",") + (dims[-2] != ",")
    if t.dim() != rank:
        raise bad_argument(
            name,
            f"{rank} dimensions {dims}",
            f"shape {tuple(t.shape)}",
            f"Reshape {name} to {dims}.",
        )


def check_shape(name: str, t: torch.Tensor, shape: tuple[int, ...], dims: str) -> None:
    if t.shape != shape:
        raise bad_argument(
            name,
            f"shape {dims} = {tuple(shape)}",
            tuple(t.shape),
            "Check it against the shapes of x and the weights.",
        )


def nan_unless(
    holds: torch.Tensor, scores: torch.Tensor, argument: str, expected: str, got: str, remedy: str
) -> torch.Tensor:
    """Return `scores` if the condition `holds` () on the values of `argument` is true.

    Otherwise raise a ValueError on a CPU. On a GPU, reading `holds` would synchronize: the scores
    become NaN, and so does the output.
    """
    if holds.device.type == "cpu" and not torch.compiler.is_compiling() and not _is_fake(holds):
        if not holds:
            raise bad_argument(argument, expected, got, remedy)
        return scores
    return torch.where(holds, scores, torch.nan)


def _is_fake(t: torch.Tensor) -> bool:
    return type(t) is not torch.Tensor


def check_activation(activation: ActivationType) -> None:
    if not isinstance(activation, ActivationType):
        names = ", ".join(a.name for a in ActivationType)
        raise bad_argument(
            "activation",
            f"an ActivationType ({names})",
            repr(activation),
            "Import it: from sonicmoe.enums import ActivationType.",
        )


def parse_activation(
    activation: ActivationType | str, argument: str = "activation_type"
) -> ActivationType:
    """The activation, or the one with that value; `argument` is its name in an error."""
    if isinstance(activation, ActivationType):
        return activation
    try:
        return ActivationType(activation)
    except ValueError:
        expected = f"an ActivationType or one of {', '.join(a.value for a in ActivationType)}"
        remedy = "Import it: from sonicmoe.enums import ActivationType."
        raise bad_argument(argument, expected, repr(activation), remedy) from None


def check_gate_up(gate_up: str) -> None:
    if gate_up not in LAYOUTS:
        raise bad_argument(
            "gate_up",
            "'interleaved' (g0,u0,g1,u1,…) or 'concatenated' (all gates, then all ups)",
            repr(gate_up),
            "Hugging Face checkpoints are mostly 'concatenated'.",
        )


def check_weights(
    x: torch.Tensor,
    w1: Any,
    w2: Any,
    b1: torch.Tensor | None,
    b2: torch.Tensor | None,
    activation: ActivationType,
) -> None:
    """Raise unless x (·, H), W1 (E, N, H) and W2 (E, H, I) match in shape, dtype and device.

    Under autocast weights may have another dtype: the layer casts them; packed ones are decoded to
    any.
    """
    check_rank("x", x, "(T, H)")
    check_rank("w1", w1, "(E, N, H)")
    check_rank("w2", w2, "(E, H, I)")
    check_floating("x", x)
    experts, hidden, intermediate = w2.shape
    if experts < 1:
        raise bad_argument("w2", "at least one expert", tuple(w2.shape), "Pass (E, H, I), E ≥ 1.")
    check_num_experts(experts, "E of w2")
    columns = 2 * intermediate if activation.is_gated else intermediate
    if x.shape[1] != hidden:
        raise bad_argument(
            "x", f"(T, H) with H = {hidden}, the H of w2", tuple(x.shape), "Check H of both."
        )
    check_shape(
        "w1", w1, (experts, columns, hidden), "(E, 2I, H)" if activation.is_gated else "(E, I, H)"
    )
    for name, size in (("H", hidden), ("I", intermediate)):
        if size % _ALIGNMENT or size == 0:
            raise bad_argument(
                f"{name} of w2",
                f"a positive multiple of {_ALIGNMENT}",
                size,
                "Pad the weights with zeros.",
            )
    if b1 is not None:
        check_shape("b1", b1, (experts, columns), "(E, N)")
    if b2 is not None:
        check_shape("b2", b2, (experts, hidden), "(E, H)")
    dtype = x.dtype
    for name, t in (("w1", w1), ("w2", w2), ("b1", b1), ("b2", b2)):
        if t is None:
            continue
        check_floating(name, t)
        is_cast = type(t) is Weight or (name in ("w1", "w2") and _is_rounded(x, t))
        if t.dtype != dtype and not is_cast:
            raise bad_argument(
                name,
                f"the dtype of x ({dtype})",
                t.dtype,
                "Cast one of them, or use torch.autocast.",
            )
        check_device(name, t, x)


def check_fp8(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
) -> None:
    """Requirements of precision="fp8" beyond `check_weights`."""
    if x.dtype != torch.bfloat16:
        remedy = "Cast x and the weights, or use torch.autocast."
        raise bad_argument("x", "bfloat16 with precision='fp8'", x.dtype, remedy)
    for name, w in (("w1", w1), ("w2", w2)):
        if w.dtype not in (torch.bfloat16, torch.float32):
            expected = "bfloat16 or float32 with precision='fp8'"
            raise bad_argument(name, expected, w.dtype, f"Cast: {name}.bfloat16().")
    for name, size in (("H", w2.shape[1]), ("I", w2.shape[2])):
        if size % FP8_ALIGNMENT:
            expected = f"a multiple of {FP8_ALIGNMENT} with precision='fp8'"
            raise bad_argument(f"{name} of w2", expected, size, "Pad the weights with zeros.")


def _is_rounded(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the layer itself casts `weight` to the dtype of x.

    On the meta device, weights have been checked before.
    """
    return x.is_meta or _casts_both(x, weight)


def _casts_both(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether autocast is enabled and changes the dtype of both."""
    return torch.is_autocast_enabled(x.device.type) and is_autocast(x) and is_autocast(weight)


def is_autocast(t: torch.Tensor) -> bool:
    """Whether autocast changes the dtype of `t`: as in PyTorch, not that of float64 or integers."""
    return t.dtype in _DTYPES and t.dtype != torch.float64


def check_router_dtype(name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
    """Raise unless the router's weight has the dtype of x (·, H), or autocast casts both."""
    check_floating("x", x)
    check_floating(name, weight)
    if weight.dtype != x.dtype and not _casts_both(x, weight):
        raise bad_argument(
            name,
            f"the dtype of x ({x.dtype})",
            weight.dtype,
            "Cast one of them, or use torch.autocast.",
        )
    check_device(name, weight, x)


def check_device(name: str, t: torch.Tensor, x: torch.Tensor) -> None:
    if t.device != x.device:
        raise bad_argument(
            name,
            f"the device of x ({x.device})",
            t.device,
            f"Move {name} there with .to({str(x.device)!r}).",
        )


def check_choice(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> None:
    """Check ids and scores (T, K) for x (T, H)."""
    check_rank("ids", ids, "(T, K)")
    check_integer("ids", ids)
    if ids.shape[0] != x.shape[0]:
        raise bad_argument(
            "ids",
            f"(T, K) with T = {x.shape[0]}, the rows of x",
            tuple(ids.shape),
            "Flatten batch and sequence of both in the same way.",
        )
    if ids.shape[1] < 1:
        raise bad_argument(
            "ids", "(T, K) with K ≥ 1", tuple(ids.shape), "Choose at least one expert."
        )
    check_shape("scores", scores, tuple(ids.shape), "(T, K), the shape of ids")
    check_floating("scores", scores)
    check_device("ids", ids, x)
    check_device("scores", scores, x)


def check_integer(name: str, t: torch.Tensor) -> None:
    if t.dtype not in (torch.int32, torch.int64):
        raise bad_argument(name, "int32 or int64", t.dtype, f"Cast: {name}.to(torch.int32).")


def check_floating(name: str, t: torch.Tensor) -> None:
    if t.dtype not in _DTYPES:
        raise bad_argument(
            name, "bfloat16, float16, float32 or float64", t.dtype, f"Cast: {name}.float()."
        )


def check_pairs(x, ids, scores, slot_token, token_start) -> None:
    """Check ids, scores and slot_token (S,) and token_start (T+1,) or None for x (T, H)."""
    check_rank("ids", ids, "(S,)")
    for name, t in (("scores", scores), ("slot_token", slot_token)):
        check_shape(name, t, tuple(ids.shape), "(S,), the shape of ids")
    check_floating("scores", scores)
    if token_start is not None:
        check_shape("token_start", token_start, (x.shape[0] + 1,), "(T+1,)")
    for name, t in (("ids", ids), ("slot_token", slot_token), ("token_start", token_start)):
        if t is not None:
            check_integer(name, t)
            check_device(name, t, x)
    check_device("scores", scores, x)


def check_slots(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    slot_token: torch.Tensor | None,
    token_start: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return ids, scores and token_start for `experts`, after checking shapes and values.

    Pairs whose token does not exist get the id −1. For invalid values see `nan_unless`.
    """
    check_rank("x", x, "(T, H)")
    if slot_token is None:
        if token_start is not None:
            raise bad_argument(
                "token_start",
                "None without slot_token",
                "a tensor",
                "Pass both for tokens with different numbers of experts, or neither.",
            )
        check_choice(x, ids, scores)
        return ids, scores, None
    check_pairs(x, ids, scores, slot_token, token_start)
    ids = torch.where((slot_token >= 0) & (slot_token < x.shape[0]), ids, -1)
    if token_start is not None:
        return ids, *_check_token_start(scores, slot_token, token_start)
    ascending = (slot_token[1:] >= slot_token[:-1]).all()
    expected = "tokens in ascending order"
    remedy = "Sort the pairs by token."
    scores = nan_unless(ascending, scores, "slot_token", expected, "unsorted ones", remedy)
    return ids, scores, None


def _check_token_start(scores, slot_token, token_start) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and token_start; on a mismatch, NaN and all slots to the first token."""
    tokens, slots = token_start.shape[0] - 1, slot_token.shape[0]
    if tokens == 0:
        return scores, token_start
    slot = torch.arange(slots, device=slot_token.device)
    token = slot_token.clamp(0, tokens - 1)
    inside = (token_start[token] <= slot) & (slot < token_start[token + 1])
    absent = (slot_token < 0) | (slot_token >= tokens)
    fits = (inside | absent).all() & (token_start.diff() >= 0).all()
    expected = "slots of token t in [token_start[t], token_start[t+1])"
    remedy = "Omit token_start to have it computed."
    scores = nan_unless(fits, scores, "token_start", expected, "a mismatch with slot_token", remedy)
    first = torch.arange(tokens + 1, device=slot_token.device).clamp(max=1) * slots
    first = first.to(token_start.dtype)
    return scores, torch.where(fits, token_start, first)
