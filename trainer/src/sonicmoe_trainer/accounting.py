"""Parameters, FLOPs and bytes of a model and a run, by formula."""

from dataclasses import dataclass

from sonicmoe import MemoryPolicy
from sonicmoe.tools import cost

from .config import ModelConfig, TrainConfig

# Bytes per parameter: weights, gradient, moments; under autocast also a bf16 copy of the weights.
STATE_BYTES = {"fp32": 16, "autocast": 18, "bf16": 8, "fp8": 18, "bf16_fp8": 8}
ELEMENT_BYTES = {"fp32": 4, "autocast": 2, "bf16": 2, "fp8": 2, "bf16_fp8": 2}
# Elements per token and unit of H that a block keeps outside the MoE layer: its two inputs, the
# normalized ones, q, k, v (before and after their norm and rotation) and the attention's output.
BLOCK_ELEMENTS = 14
COMPILED_BLOCK_ELEMENTS = 9.2  # measured with 7B: compiled blocks normalize again


@dataclass(frozen=True, slots=True)
class Parameters:
    total: int
    active: int  # used by a token: K of E experts; the tied head once
    experts: int  # all experts of all layers


def parameters(m: ModelConfig) -> Parameters:
    attention = m.hidden_size * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
    norms = 2 * m.hidden_size + 2 * m.head_dim
    expert = 3 * m.hidden_size * m.intermediate_size
    router = m.num_experts * m.hidden_size
    rest = m.num_layers * (attention + norms + router) + m.hidden_size
    rest += m.vocab_size * m.hidden_size
    experts = m.num_layers * m.num_experts * expert
    active = rest + m.num_layers * m.experts_per_token * expert
    return Parameters(rest + experts, active, experts)


def flops_per_token(m: ModelConfig) -> float:
    """Forward and backward: 6 per active parameter, and causal attention."""
    return 6 * parameters(m).active + 6 * m.num_layers * m.num_heads * m.head_dim * m.context


def layer_bytes(m: ModelConfig, tokens: int, precision: str, memory: MemoryPolicy) -> int:
    """What one layer keeps for the backward pass: X, Z and about 20 bytes of routing per row."""
    p = cost.Problem(tokens, m.hidden_size, m.intermediate_size, m.num_experts, m.experts_per_token)
    router, element = m.router.partition(":")[0], ELEMENT_BYTES[precision]
    fp8 = "fp8" if precision in ("fp8", "bf16_fp8") else None
    kept = cost.kept_bytes(p, element, router=router, memory=memory, precision=fp8)
    return element * p.T * p.H + sum(kept.values())


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one GPU at the peak."""

    state: float
    kept: float
    head: float
    transient: float

    @property
    def total(self) -> float:
        return self.state + self.kept + self.head + self.transient


def memory(config: TrainConfig, shards: int = 1) -> Memory:
    """Peak of one GPU with the state cut into `shards` and one micro-batch in flight."""
    m = config.model
    element = ELEMENT_BYTES[config.precision]
    tokens = config.micro_batch * m.context
    rows = tokens * m.experts_per_token
    count = parameters(m)
    state = STATE_BYTES[config.precision] * count.total / shards
    gathered_weights = 0 if shards == 1 else 4 * element * count.total / m.num_layers
    policy = MemoryPolicy(config.memory)
    if config.fp8_experts and shards == 1:  # FP8 weights and their transposes stay
        state += 2 * count.experts
        policy = policy._replace(weights="recompute")
    elements = COMPILED_BLOCK_ELEMENTS if config.compile else BLOCK_ELEMENTS
    layer: float = layer_bytes(m, tokens, config.precision, policy)
    layer += elements * element * tokens * m.hidden_size
    if config.recompute:
        kept = m.num_layers * element * tokens * m.hidden_size + layer
    else:
        kept = m.num_layers * layer
    at_once = min(config.loss_chunk or tokens, tokens)
    # Logits, whose gradient replaces them; the gradient of the head, summed in fp32, and rounded.
    head = at_once * m.vocab_size * element + m.vocab_size * m.hidden_size * (4 + element)
    # dZ, A' and the rows of dX of one layer.
    transient = element * rows * (3 * m.intermediate_size + m.hidden_size) + gathered_weights
    return Memory(state, kept, head, transient)


def peak_flops(device_name: str) -> float | None:
    """FLOP/s in 16 bits by the data sheet; None for a GPU whose data sheet is not known."""
    try:
        return cost.find_gpu(device_name).half
    except ValueError:
        return None
