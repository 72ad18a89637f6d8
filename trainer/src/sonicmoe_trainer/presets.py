"""Named runs. The larger three have the layer shapes of the paper's models.

The paper gives the sizes of the layer, not the depth: the number of layers here is the one that
reaches the parameter count in the name.
"""

from sonicmoe.plugins import bad_argument

from .config import TrainConfig

# The batches divide over 8 ranks. A micro-batch of the larger three has T = 24576, 40960 and 24576
# tokens, as in the paper.
_SIZES = ["vocab_size", "context", "num_layers", "hidden_size", "num_heads", "num_kv_heads"]
_SIZES += ["head_dim", "num_experts", "experts_per_token", "intermediate_size", "init_std"]
_MODELS = {
    "demo": (1024, 128, 2, 128, 4, 4, 32, 8, 2, 128, 0.05),
    "small": (16384, 1024, 8, 512, 8, 8, 64, 32, 4, 256, 0.02),
    "0.5B": (50304, 4096, 12, 768, 12, 12, 64, 64, 8, 256, 0.02),
    "1.4B": (50304, 4096, 18, 768, 12, 12, 64, 128, 8, 256, 0.02),
    "7B": (50304, 4096, 44, 1536, 12, 12, 128, 128, 8, 256, 0.02),
}
_LENGTHS = ["steps", "batch", "micro_batch", "learning_rate", "warmup_steps", "validate_every"]
_LENGTHS += ["validation_sequences", "checkpoint_every", "log_every"]
_RUNS = {
    "demo": (300, 8, 8, 6e-3, 20, 50, 64, 100, 10),
    "small": (2000, 64, 64, 1e-3, 100, 200, 256, 500, 10),
    "0.5B": (10000, 96, 12, 6e-4, 500, 500, 128, 500, 10),
    "1.4B": (20000, 160, 10, 5e-4, 1000, 500, 128, 500, 10),
    "7B": (50000, 384, 6, 3e-4, 2000, 500, 96, 500, 10),
}
_LARGE: dict[str, object] = {
    "include_code": True,
    "data_megabytes": 2048,
    "validation_fraction": 0.005,
    "precision": "autocast",
    "compile": True,
    "loss_chunk": 8192,
}
_OTHERS: dict[str, dict[str, object]] = {
    # A minute on two CPU cores, on text that comes with Python.
    "demo": {"data_megabytes": 4, "validation_fraction": 0.05, "target_loss": 5.0},
    # Minutes on one GPU.
    "small": _LARGE | {"data_megabytes": 256, "validation_fraction": 0.01, "loss_chunk": 0},
    "0.5B": _LARGE,
    "1.4B": _LARGE,
    # On one GPU of 141 GB the weights and the optimizer's state must be bfloat16 (8 bytes a
    # parameter); sharded, `autocast` is better.
    "7B": _LARGE | {"precision": "bf16"},
}


def _preset(name: str) -> TrainConfig:
    model = dict(zip(_SIZES, _MODELS[name], strict=True))
    run = dict(zip(_LENGTHS, _RUNS[name], strict=True))
    return TrainConfig(preset=name).override(model | run | _OTHERS[name])


PRESETS = {name: _preset(name) for name in _MODELS}


def preset(name: str) -> TrainConfig:
    if name not in PRESETS:
        raise bad_argument(
            "preset", f"one of {', '.join(PRESETS)}", repr(name), "Size it further with --set."
        )
    return PRESETS[name]
