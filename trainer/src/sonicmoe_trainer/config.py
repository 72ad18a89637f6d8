"""Configuration of a run: the sizes of the model, and the training settings."""

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sonicmoe.plugins import bad_argument

PRECISIONS = {
    "fp32": "everything in float32",
    "autocast": "float32 weights, bfloat16 arithmetic",
    "bf16": "bfloat16 weights and optimizer state",
    "fp8": "as autocast, experts in FP8",
    "bf16_fp8": "as bf16, experts in FP8",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a decoder with a Mixture-of-Experts layer in every block.

    `router` is a name for `MoE`. Token rounding takes its subroutine after a colon, as in
    "token_rounding:down", and rounds to multiples of `rounding_tile`.
    """

    vocab_size: int = 2048
    context: int = 128
    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    num_experts: int = 8
    experts_per_token: int = 2
    intermediate_size: int = 128
    router: str = "softmax_over_topk"
    rounding_tile: int = 128
    aux_loss_coef: float = 0.01
    z_loss_coef: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if f.type is int:
                _positive(f.name, getattr(self, f.name))
        for name in ("aux_loss_coef", "z_loss_coef", "init_std"):
            _not_negative(name, getattr(self, name))
        for name in ("rope_theta", "norm_eps"):
            _above_zero(name, getattr(self, name))
        for name in ("hidden_size", "intermediate_size"):
            _multiple(name, getattr(self, name), 8)
        _multiple("head_dim", self.head_dim, 2)
        _multiple("num_heads", self.num_heads, self.num_kv_heads, "num_kv_heads")
        if self.experts_per_token > self.num_experts:
            most, remedy = f"at most num_experts ({self.num_experts})", "Add experts, or use fewer."
            raise bad_argument("experts_per_token", most, self.experts_per_token, remedy)


_POSITIVE = ["steps", "batch", "micro_batch", "log_every", "validate_every", "expert_parallel"]
_POSITIVE += ["validation_sequences", "checkpoint_every"]
_NOT_NEGATIVE = ["weight_decay", "beta1", "beta2", "final_learning_rate_ratio"]
_NOT_NEGATIVE += ["loss_chunk", "keep"]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run. `batch` sequences per step, in micro-batches of `micro_batch`.

    `data` is "local" (text of this installation), files and folders, or a Hugging Face
    dataset. With `deterministic` a run on a GPU repeats bit for bit; on a CPU it always does.
    `memory` is keep, e4m3 or recompute, as in `MoE`. `target_loss` is checked against the
    validation loss at the end. `keep` checkpoints are kept; 0 writes none. `wandb` also logs to
    Weights & Biases, in the project sonicmoe or $WANDB_PROJECT. `init_from` is the
    folder of a run whose weights and tokenizer this one starts with.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    preset: str = "demo"
    seed: int = 0
    init_from: str = ""

    data: tuple[str, ...] = ("local",)
    include_code: bool = False
    data_megabytes: float = 8.0
    validation_fraction: float = 0.05

    steps: int = 200
    batch: int = 16
    micro_batch: int = 16
    learning_rate: float = 3e-3
    final_learning_rate_ratio: float = 0.1
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    gradient_clip: float = 1.0

    device: str = "auto"
    precision: str = "fp32"
    backend: str = "auto"
    compile: bool = False
    deterministic: bool = False
    recompute: bool = False
    memory: str = "keep"
    loss_chunk: int = 0
    expert_parallel: int = 1

    log_every: int = 5
    validate_every: int = 50
    validation_sequences: int = 64
    checkpoint_every: int = 100
    keep: int = 2
    tensorboard: bool = True
    wandb: bool = False
    target_loss: float | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _positive(name, getattr(self, name))
        for name in _NOT_NEGATIVE:
            _not_negative(name, getattr(self, name))
        for name in ("learning_rate", "data_megabytes"):
            _above_zero(name, getattr(self, name))
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise bad_argument(name, "below 1", getattr(self, name), "Try 0.9.")
        if not self.gradient_clip > 0:
            raise bad_argument("gradient_clip", "> 0", self.gradient_clip, "inf disables it.")
        check_seed(self.seed)
        if self.target_loss is not None:
            _not_negative("target_loss", self.target_loss)
        _multiple("batch", self.batch, self.micro_batch, "micro_batch")
        if self.precision not in PRECISIONS:
            remedy = "; ".join(f"{name}: {meaning}" for name, meaning in PRECISIONS.items())
            raise bad_argument("precision", " or ".join(PRECISIONS), self.precision, f"{remedy}.")
        if self.warmup_steps < 0 or self.warmup_steps >= self.steps:
            below, remedy = f"at least 0 and below steps ({self.steps})", "Use a few percent."
            raise bad_argument("warmup_steps", below, self.warmup_steps, remedy)
        if not 0 < self.validation_fraction < 0.5:
            got, remedy = self.validation_fraction, "0.05 holds out every twentieth document."
            raise bad_argument("validation_fraction", "between 0 and 0.5", got, remedy)

    @property
    def fp8_experts(self) -> bool:
        return self.precision in ("fp8", "bf16_fp8")

    @property
    def bf16_weights(self) -> bool:
        return self.precision in ("bf16", "bf16_fp8")

    @property
    def is_autocast(self) -> bool:
        """Whether weights are fp32 and arithmetic is bf16, or FP8 in the experts."""
        return self.precision in ("autocast", "fp8")

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.model.context

    def override(self, values: Mapping[str, Any]) -> "TrainConfig":
        """A copy with some settings replaced; text is converted to the type of the setting."""
        ours: dict[str, Any] = {}
        models: dict[str, Any] = {}
        for key, value in values.items():
            owner = ours if key in _TRAIN_FIELDS else models if key in _MODEL_FIELDS else None
            if owner is None:
                raise bad_argument(
                    key, "the name of a setting", repr(key), f"Settings: {', '.join(KEYS)}."
                )
            owner[key] = _read(key, value)
        # If only `batch` is given and the preset's micro_batch does not divide it: one micro-batch.
        if "batch" in ours and "micro_batch" not in ours and ours["batch"] % self.micro_batch:
            ours["micro_batch"] = ours["batch"]
        if "steps" in ours and "warmup_steps" not in ours and ours["steps"] > 0:
            ours["warmup_steps"] = min(self.warmup_steps, ours["steps"] // 10)
        model = dataclasses.replace(self.model, **models)
        return dataclasses.replace(self, model=model, **ours)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """The inverse of `to_dict`, also after a round trip through JSON."""
        rest = {**values, "model": ModelConfig(**values["model"]), "data": tuple(values["data"])}
        return cls(**rest)


_MODEL_FIELDS = {f.name: f.type for f in dataclasses.fields(ModelConfig)}
_TRAIN_FIELDS = {
    f.name: f.type for f in dataclasses.fields(TrainConfig) if f.name not in ("model", "preset")
}
KEYS = tuple(sorted({*_MODEL_FIELDS, *_TRAIN_FIELDS}))
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _read(key: str, value: Any) -> Any:
    """`value`, text or a value from TOML or Python, in the type of `key`."""
    kind = {**_MODEL_FIELDS, **_TRAIN_FIELDS}[key]
    try:
        if kind is bool:
            return value if isinstance(value, bool) else _WORDS[str(value).lower()]
        if kind is int:
            if isinstance(value, bool) or int(value) != float(value):
                raise ValueError
            return int(value)
        if kind is float:
            return float(value)
        if kind is str:
            return str(value)
        if key == "data":
            return tuple(value.split(",")) if isinstance(value, str) else tuple(map(str, value))
        return None if value is None or str(value).lower() == "none" else float(value)
    except (KeyError, TypeError, ValueError):
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        raise bad_argument(key, f"a value of type {name}", repr(value), f"Write {key}=….") from None


def parse_assignments(items: Iterable[str]) -> dict[str, str]:
    """`["steps=10", "seed=1"]` → `{"steps": "10", "seed": "1"}`."""
    pairs = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise bad_argument(
                "--set", "key=value", repr(item), "Write for example --set steps=500."
            )
        pairs[key.strip().replace("-", "_")] = value.strip()
    return pairs


def read_toml(path: str | Path) -> dict[str, Any]:
    """Keys of a TOML file; tables such as [model] only group them."""
    path = Path(path)
    if not path.is_file():
        raise bad_argument("--config", "a TOML file", repr(str(path)), "Check the path.")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or not TOML
        raise bad_argument("--config", "valid TOML", f"{path}: {error}", "Correct it.") from None
    flat: dict[str, Any] = {}
    for key, value in document.items():
        flat.update(value if isinstance(value, dict) else {key: value})
    return flat


def check_seed(seed: int) -> None:
    """Raise if `seed` has more than 43 bits: batches derive a 64-bit seed per epoch from it."""
    if not -(2**43) < seed < 2**43:
        raise bad_argument("seed", "an integer of at most 43 bits", seed, "Choose a smaller one.")


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise bad_argument(name, "at least 1", value, f"Set {name} to a positive integer.")


def _not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise bad_argument(name, "a finite number, 0 or more", value, f"Set {name} to one.")


def _above_zero(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise bad_argument(name, "a finite number above 0", value, f"Set {name} to one.")


def _multiple(name: str, value: int, of: int, of_name: str = "") -> None:
    if value % of:
        unit = f"{of_name} = {of}" if of_name else str(of)
        raise bad_argument(name, f"a multiple of {unit}", value, f"Round {name} to one.")
