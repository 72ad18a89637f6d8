"""Named cases: a grid of shapes from fine to coarse experts, and layers of published models."""

from dataclasses import dataclass, replace

from ..enums import ActivationType
from ..errors import bad_argument
from ..shapes import Problem, check_size
from ..validation import check_k, check_num_experts

ROUTERS = ("softmax_over_topk", "topk_over_softmax", "topk_over_softmax_normalized", "sigmoid")


@dataclass(frozen=True, slots=True)
class Case:
    """One layer to measure: sizes, activation, bias and router."""

    name: str
    problem: Problem
    activation: ActivationType = ActivationType.SWIGLU
    bias: bool = False
    router: str = "softmax_over_topk"

    @classmethod
    def of_shape(
        cls,
        text: str,
        activation: ActivationType = ActivationType.SWIGLU,
        bias: bool = False,
        router: str = "softmax_over_topk",
    ) -> "Case":
        """The case of a shape T,H,I,E,K, named after it."""
        problem = Problem.parse(text, gated=activation.is_gated)
        check_num_experts(problem.E, "E of --shape")
        check_k(problem.K, problem.E, "K of --shape")
        for name in ("H", "I"):
            check_size(f"{name} of --shape", getattr(problem, name), multiple=8)
        return cls(str(problem), problem, activation, bias, router)

    def with_tokens(self, tokens: int) -> "Case":
        return replace(self, problem=replace(self.problem, T=tokens))


def _case(name: str, shape: str, activation: str = "swiglu", **options) -> Case:
    kind = ActivationType(activation)
    return Case(name, Problem.parse(shape, gated=kind.is_gated), kind, **options)


GRID = (
    _case("7b-fine", "24576,1536,256,128,8"),
    _case("7b-medium", "24576,1536,512,64,4"),
    _case("7b-coarse", "24576,1536,1024,32,2"),
    _case("1.4b-fine", "40960,768,256,128,8"),
    _case("olmoe", "32768,2048,1024,64,8"),
    _case("30b-fine", "32768,4096,256,256,16"),
    _case("120b", "32768,4096,1024,128,8"),
    _case("qwen3-next", "32768,2048,512,512,10"),
    _case("sparse", "16384,4096,1024,256,4"),
)

# H, I, E, K, router and activation as in each model's config.json: allenai/OLMoE-1B-7B-0924,
# Qwen/Qwen3-30B-A3B, Qwen/Qwen3-Next-80B-A3B-Instruct, openai/gpt-oss-20b,
# mistralai/Mixtral-8x7B-v0.1, deepseek-ai/DeepSeek-V3, moonshotai/Kimi-Linear-48B-A3B-Instruct,
# nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16. T is ours. Shared experts, biases of
# routers and groups of experts are left out.
MODELS = (
    _case("olmoe-1b-7b", "32768,2048,1024,64,8", router="topk_over_softmax"),
    _case("qwen3-30b-a3b", "32768,2048,768,128,8", router="topk_over_softmax_normalized"),
    _case("qwen3-next-80b-a3b", "32768,2048,512,512,10", router="topk_over_softmax_normalized"),
    _case("gpt-oss-20b", "32768,2880,2880,32,4", "swiglu_clamped", bias=True),
    _case("mixtral-8x7b", "16384,4096,14336,8,2", router="topk_over_softmax_normalized"),
    _case("deepseek-v3", "16384,7168,2048,256,8", router="sigmoid"),
    _case("kimi-linear-48b-a3b", "32768,2304,1024,256,8", router="sigmoid"),
    _case("nemotron-3-nano", "32768,2688,1856,128,6", "relu_sq", router="sigmoid"),
)

ON_CPU = Case.of_shape("1024,256,128,8,2")  # seconds in plain PyTorch on two cores

SUITES = {"grid": GRID, "models": MODELS, "all": GRID + MODELS}
CASES = {case.name: case for case in SUITES["all"]}


def find_case(name: str) -> Case:
    if name not in CASES:
        raise bad_argument(
            "case", f"one of {', '.join(CASES)}", repr(name), "For any other: --shape T,H,I,E,K."
        )
    return CASES[name]
