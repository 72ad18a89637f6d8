"""Hugging Face transformers: `register()`, then load with `experts_implementation=`.

transformers calls one function with the experts module, the tokens and the router's choice. The
router, the shared experts and the losses stay those of the model.
"""

import inspect
import re
import sys
from functools import cache, partial, wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import bad_argument
from ..extras import missing
from ..functional import experts
from ..layer.fp8_weights import Fp8Weights
from ..layer.lora import LowRank
from ..layer.memory import KEEP, MemoryPolicy
from ..layer.options import Options
from ..layer.weights import ExpertWeights, Projection
from ..packed import PackedWeight
from ..watch import LOOKS_LIKE_MOE
from .packed_parameter import is_packed, packed_of, weight_of
from .recognition import activation_of, gate_up_of

try:
    from transformers import PreTrainedModel
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
    from transformers.quantizers.quantizers_utils import should_convert_module

    from .packed_formats import check_method
    from .quantizers import keep_experts_packed, weight_names
except ImportError as error:
    raise missing("transformers", "sonicmoe.integrations.transformers") from error

__all__ = ["experts_forward", "register"]

_KEEP = "Or keep 'sonicmoe_experts'."


def register(
    name: str = "sonicmoe_experts",
    *,
    replace: bool = False,
    precision: str | None = None,
    cache_fp8_weights: bool = False,
    memory: str | MemoryPolicy = KEEP,
) -> None:
    """Make `name` a valid `experts_implementation` of transformers.

    Use it in `from_pretrained` or `model.set_experts_implementation`. transformers already has a
    "sonicmoe", which downloads another package; `register("sonicmoe", replace=True)` puts this
    package behind that name, for this process. Models whose experts do not use transformers'
    interface would ignore the name: asking for it raises a ValueError from now on. Models that are
    loaded with that name keep experts in MXFP4, FP8, INT4 of compressed-tensors and NF4 of
    bitsandbytes packed; other quantized experts raise. `precision` and `memory` are those of
    `sonicmoe.experts`. With `cache_fp8_weights` each module of experts has a `sonicmoe.Fp8Weights`
    as `sonicmoe_fp8_weights` after its first call, which must not be compiled; `refresh` it after
    changes that it does not see.
    They stay those of `name`: transformers looks a name up in every call, so other ones would
    change models that exist already. Register another name for them.
    """
    if not isinstance(name, str) or not name:
        raise bad_argument("name", "a string that is not empty", repr(name), _KEEP)
    if cache_fp8_weights and precision is None:
        remedy = "Set precision='fp8'."
        raise bad_argument("cache_fp8_weights", "False without precision='fp8'", True, remedy)
    options = Options.of({"precision": precision, "memory": memory})
    function: Any = experts_forward
    if options != Options():
        given: Any = {"options": options, "cache_fp8_weights": cache_fp8_weights}
        function = partial(experts_forward, **given)
    if name == "eager":
        raise bad_argument("name", "a name other than transformers' own loop", "'eager'", _KEEP)
    current = ALL_EXPERTS_FUNCTIONS.get(name)
    if calls_ours(current):
        _check_same_options(name, current, function)
        return
    if current is not None and not replace:
        raise bad_argument(
            "name",
            "one that transformers does not use",
            f"{name!r}, which is {current.__module__}.{current.__qualname__}",
            f"Pass replace=True to replace it. {_KEEP}",
        )
    ExpertsInterface.register(name, function)
    if ALL_EXPERTS_FUNCTIONS[name] is not function:  # assigned to the instance before
        ALL_EXPERTS_FUNCTIONS[name] = function
    _refuse_models_without_interface()
    keep_experts_packed(_runs_ours)


def _runs_ours(config: Any) -> bool:
    """Whether a model with this configuration, or a part of it, will call `experts_forward`."""
    configs = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    names = [getattr(c, "_experts_implementation", None) for c in configs if c is not None]
    return any(calls_ours(ALL_EXPERTS_FUNCTIONS.get(n)) for n in names if isinstance(n, str))


def calls_ours(function: Any) -> bool:
    """Whether transformers calls `experts_forward` by it."""
    return getattr(function, "func", function) is experts_forward


def options_of(function: Any) -> tuple[Options, bool]:
    """The options and `cache_fp8_weights` of what `register` made."""
    given = getattr(function, "keywords", {})
    return given.get("options", Options()), given.get("cache_fp8_weights", False)


def _check_same_options(name: str, current: Any, wanted: Any) -> None:
    if options_of(current) != options_of(wanted):
        options, cached = options_of(current)
        raise bad_argument(
            "name",
            "one that is not registered yet, for other options",
            f"{name!r}, which models may use with precision={options.precision!r},"
            f" cache_fp8_weights={cached} and {options.memory}",
            f"Register another name, for example {name + '_2'!r}, and load models with that.",
        )


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    lora1: LowRank | None = None,
    lora2: LowRank | None = None,
    options: Options = Options(),  # noqa: B008 it is immutable
    cache_fp8_weights: bool = False,
) -> torch.Tensor:
    """Run the experts of a transformers module; `register` makes transformers call this.

    Under expert parallelism, ids of experts on other ranks are outside [0, E) and are dropped.
    Adapters come from `sonicmoe.integrations.peft`; the weights of the experts are then frozen.
    Compiled, packed experts break the graph.
    """
    if torch.compiler.is_compiling() and is_packed(module):
        return _not_compiled(
            module, hidden_states, top_k_index, top_k_weights, lora1, lora2, options,
            cache_fp8_weights,
        )  # fmt: skip
    (w1, b1, *_), (w2, b2, *_) = weights_of(module, options.precision)
    # compressed-tensors' hooks make plain tuples of named ones.
    lora1, lora2 = (lora and LowRank(*lora) for lora in (lora1, lora2))
    options = options_for(module, options)._replace(lora1=lora1, lora2=lora2)
    if cache_fp8_weights:
        if isinstance(w1, PackedWeight) or isinstance(w2, PackedWeight):
            remedy = "Load the model with a name registered without it."
            raise bad_argument("cache_fp8_weights", "False for packed experts", True, remedy)
        options = options._replace(fp8_weights=_fp8_weights(module, _first_weight(module)))
    given: Any = options._asdict()

    def run(x, ids, scores):
        return experts(x, ids, scores, w1, w2, b1, b2, **given)

    if getattr(module, "has_post_expert_norm", False):
        norm = module.post_expert_norm
        out = _normed(run, norm, w1.shape[0], hidden_states, top_k_index, top_k_weights)
    else:
        out = run(hidden_states, top_k_index, top_k_weights)
    return out.to(hidden_states.dtype)


def weights_of(module: Any, precision: str | None = None) -> ExpertWeights:
    """The weights of an experts module of transformers on this rank, as `experts` takes them."""
    name = _first_weight(module)
    w1, w2 = weight_of(module, name), weight_of(module, "down_proj")
    b1 = _local(module, f"{name}_bias") if module.has_bias else None
    b2 = _local(module, "down_proj_bias") if module.has_bias else None
    number = w1.shape[0]
    if getattr(module, "num_experts", number) != number:  # ids of the others would drop out
        raise bad_argument(
            name,
            f"the weights of {module.num_experts} experts (num_experts)",
            tuple(w1.shape),
            "Change num_experts of the module together with its weights.",
        )
    if precision and (isinstance(w1, PackedWeight) or isinstance(w2, PackedWeight)):
        w1, w2 = _ready_for_fp8(module, name), _ready_for_fp8(module, "down_proj")
    return ExpertWeights(Projection(w1, b1), Projection(w2, b2))


def options_for(module: Any, options: Options) -> Options:
    """The options of a registered name, with what the module itself computes."""
    return options._replace(activation=activation_of(module), gate_up=gate_up_of(module))


def _first_weight(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


# Dynamo cannot read what a `PackedParameter` holds.
_not_compiled = torch.compiler.disable(experts_forward)


def _normed(run, norm, num_experts: int, x, ids, scores) -> torch.Tensor:
    """Σ score · norm(expert(x)): each (token, expert) is a token of its own up to the norm."""
    tokens, k = ids.shape
    rows = run(x.repeat_interleave(k, 0), ids.reshape(-1, 1), x.new_ones(tokens * k, 1))
    rows = norm(rows).view(tokens, k, -1) * scores[..., None]
    present = (ids >= 0) & (ids < num_experts)
    return torch.where(present[..., None], rows, 0).sum(1)


def _fp8_weights(module: Any, name: str) -> Fp8Weights | None:
    """Those of the module, made in the first call; None if that is compiled."""
    if not hasattr(module, "sonicmoe_fp8_weights"):
        if torch.compiler.is_compiling():
            return None
        module.sonicmoe_fp8_weights = Fp8Weights((name, "down_proj"))
    module.sonicmoe_fp8_weights.follow(getattr(module, name), module.down_proj)
    return module.sonicmoe_fp8_weights


def _ready_for_fp8(module: Any, name: str) -> torch.Tensor | PackedWeight:
    """The weight with its scales for e4m3, which a packed parameter keeps from its first call."""
    parameter = packed_of(module, name)
    if parameter is None:
        return weight_of(module, name)
    if parameter.packed.fp8 is None:
        parameter.packed = parameter.packed.for_fp8()
    return parameter.packed


def _local(module: Any, name: str) -> torch.Tensor:
    weight = getattr(module, name)
    return weight.to_local() if isinstance(weight, DTensor) else weight


def implementation_of(module: Any) -> tuple[str | None, Any]:
    """The name and the function that transformers calls for an experts module in its next call.

    The function is None for the module's own loop; the name is None if the class of the module does
    not use transformers' experts interface, or its `forward` was replaced.
    """
    forward = vars(module).get("forward")
    if getattr(forward, "__module__", "").startswith("transformers."):  # its expert parallelism
        forward = None
    # accelerate and compressed-tensors wrap `forward` in hooks.
    forward = inspect.unwrap(forward or type(module).forward, stop=_calls_interface)
    if not _calls_interface(forward):
        return None, None
    name = module.config._experts_implementation
    return name or "eager", ALL_EXPERTS_FUNCTIONS.get(name)


def _calls_interface(forward: Any) -> bool:
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(forward, "__closure__", None) or (), strict=True))
    return "experts_interface" in cells and (
        cells["experts_interface"].cell_contents is ALL_EXPERTS_FUNCTIONS
    )


# --- models without the interface -----------------------------------------------------------------
@cache  # once by each build of this package in a process
def _refuse_models_without_interface() -> None:
    """transformers accepts any registered name for any model, and checks only `grouped_mm`."""
    original = PreTrainedModel.get_correct_experts_implementation

    @wraps(original)
    def checked(self, requested_experts):
        name = original(self, requested_experts)
        if calls_ours(ALL_EXPERTS_FUNCTIONS.get(name)):
            if self._can_set_experts_implementation():
                _check_quantization(self)
            for model in self.modules():  # in its constructor: the model alone
                if isinstance(model, PreTrainedModel):
                    _check_interface(type(model))
        return name

    PreTrainedModel.get_correct_experts_implementation = checked


def _check_quantization(model: Any) -> None:
    """A ValueError for experts that transformers quantized, or will, unlike ours."""
    if (config := getattr(model.config, "quantization_config", None)) is not None:
        check_method(config, None)
    left_out = getattr(config, "llm_int8_skip_modules", None) or []
    in_4_bits = config is not None and getattr(model, "is_loaded_in_4bit", False)
    for path, module in model.named_modules():
        dense = weight_names(module) and not is_packed(module)
        if in_4_bits and dense and should_convert_module(path, left_out):
            raise bad_argument(
                "experts_implementation",
                "experts in 4 bits in a model that was loaded so",
                f"{path} in 16 bits",
                "Load the model with from_pretrained(…, experts_implementation=…), or, for experts"
                " in 16 bits, with llm_int8_skip_modules=['experts', 'lm_head'].",
            )
        if type(module).__name__ in ("Mxfp4GptOssExperts", "FP8Experts"):
            raise bad_argument(
                "experts_implementation",
                "experts that were loaded for it",
                type(module).__name__,
                "Load the model with from_pretrained(…, experts_implementation=…): then its experts"
                " stay packed, and run by ours.",
            )


@cache
def _check_interface(kind: type) -> None:
    modules = [sys.modules.get(c.__module__) for c in kind.__mro__ if _is_model(c)]
    sources = [_source(m) for m in modules if m is not None]
    found = [name for source in sources for name in _own_experts(source)]
    if found and not any("@use_experts_implementation" in source for source in sources):
        raise bad_argument(
            "experts_implementation",
            "None for a model without transformers' experts interface",
            f"a name for {kind.__name__}, where {found[0]} computes the experts itself",
            "Load this model without experts_implementation.",
        )


def _is_model(kind: type) -> bool:
    return issubclass(kind, PreTrainedModel) and kind is not PreTrainedModel


def _source(module) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # typed into a shell
        return ""


def _own_experts(source: str) -> list[str]:
    """The names of classes in the source of a model that look like experts or an MoE block."""
    return re.findall(rf"^class ({LOOKS_LIKE_MOE})\(nn\.Module\w*\):", source, re.MULTILINE)
