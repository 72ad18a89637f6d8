"""Runs with a name. The larger three have the layer shapes of the paper's models.

The paper gives the sizes of the layer, not the depth: the number of layers here is the one that
reaches the parameter count in the name.
"""

from ..errors import bad_argument
from .config import ModelConfig, TrainConfig

# A minute on two CPU cores, on the text that any Python installation carries.
_DEMO = TrainConfig(
    preset="demo",
    model=ModelConfig(
        vocab_size=1024, context=128, num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=4,
        head_dim=32, num_experts=8, experts_per_token=2, intermediate_size=128, init_std=0.05,
    ),
    data_megabytes=4, validation_fraction=0.05,
    steps=300, batch=8, micro_batch=8, learning_rate=6e-3, warmup_steps=20,
    log_every=10, validate_every=50, validation_sequences=64, checkpoint_every=100,
    target_loss=5.0,
)  # fmt: skip

# About 100M parameters: minutes on one GPU.
_SMALL = TrainConfig(
    preset="small",
    model=ModelConfig(
        vocab_size=16384, context=1024, num_layers=8, hidden_size=512, num_heads=8, num_kv_heads=8,
        head_dim=64, num_experts=32, experts_per_token=4, intermediate_size=256,
    ),
    include_code=True, data_megabytes=256, validation_fraction=0.01,
    steps=2000, batch=64, micro_batch=64, learning_rate=1e-3, warmup_steps=100,
    precision="autocast", compile=True,
    log_every=10, validate_every=200, validation_sequences=256, checkpoint_every=500,
)  # fmt: skip

# T,H,I,E,K = 24576,768,256,64,8 a micro-batch.
_HALF_BILLION = TrainConfig(
    preset="0.5B",
    model=ModelConfig(
        vocab_size=50304, context=4096, num_layers=12, hidden_size=768, num_heads=12,
        num_kv_heads=12, head_dim=64, num_experts=64, experts_per_token=8, intermediate_size=256,
    ),
    include_code=True, data_megabytes=2048, validation_fraction=0.005,
    steps=10000, batch=120, micro_batch=12, learning_rate=6e-4, warmup_steps=500,
    precision="autocast", compile=True, loss_chunk=8192,
    log_every=10, validate_every=500, validation_sequences=128, checkpoint_every=500,
)  # fmt: skip

# T,H,I,E,K = 40960,768,256,128,8 a micro-batch.
_1_4_BILLION = TrainConfig(
    preset="1.4B",
    model=ModelConfig(
        vocab_size=50304, context=4096, num_layers=18, hidden_size=768, num_heads=12,
        num_kv_heads=12, head_dim=64, num_experts=128, experts_per_token=8, intermediate_size=256,
    ),
    include_code=True, data_megabytes=2048, validation_fraction=0.005,
    steps=20000, batch=120, micro_batch=10, learning_rate=5e-4, warmup_steps=1000,
    precision="autocast", compile=True, loss_chunk=8192,
    log_every=10, validate_every=500, validation_sequences=128, checkpoint_every=500,
)  # fmt: skip

# T,H,I,E,K = 24576,1536,256,128,8 a micro-batch. On one GPU of 141 GB the weights and the
# optimizer's state must be bfloat16 (8 bytes a parameter); sharded, `autocast` is better.
_7_BILLION = TrainConfig(
    preset="7B",
    model=ModelConfig(
        vocab_size=50304, context=4096, num_layers=44, hidden_size=1536, num_heads=12,
        num_kv_heads=12, head_dim=128, num_experts=128, experts_per_token=8, intermediate_size=256,
    ),
    include_code=True, data_megabytes=2048, validation_fraction=0.005,
    steps=50000, batch=384, micro_batch=6, learning_rate=3e-4, warmup_steps=2000,
    precision="bf16", compile=True, loss_chunk=8192,
    log_every=10, validate_every=500, validation_sequences=96, checkpoint_every=500,
)  # fmt: skip

PRESETS = {c.preset: c for c in (_DEMO, _SMALL, _HALF_BILLION, _1_4_BILLION, _7_BILLION)}


def preset(name: str) -> TrainConfig:
    if name not in PRESETS:
        raise bad_argument(
            "preset", f"one of {', '.join(PRESETS)}", repr(name), "Size it further with --set."
        )
    return PRESETS[name]
