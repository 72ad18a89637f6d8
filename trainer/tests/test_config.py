import pytest

from sonicmoe import MemoryPolicy
from sonicmoe_trainer.accounting import layer_bytes, parameters
from sonicmoe_trainer.config import ModelConfig, TrainConfig, parse_assignments, read_toml
from sonicmoe_trainer.model import Decoder
from sonicmoe_trainer.presets import PRESETS, preset
from sonicmoe_trainer.run import configure


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stepz": 3}, ["stepz", "Settings:", "steps"]),
        ({"steps": "many"}, ["steps", "int", "many"]),
        ({"steps": 0}, ["steps", "at least 1", "0"]),
        ({"steps": 1.5}, ["steps", "int", "1.5"]),
        ({"compile": "perhaps"}, ["compile", "bool"]),
        ({"experts_per_token": 99}, ["experts_per_token", "num_experts", "99"]),
        ({"hidden_size": 100}, ["hidden_size", "multiple of 8", "100"]),
        ({"num_kv_heads": 3}, ["num_heads", "num_kv_heads = 3"]),
        ({"precision": "fp4"}, ["precision", "autocast", "fp8", "fp4"]),
        ({"batch": 9, "micro_batch": 2}, ["batch", "micro_batch = 2", "9"]),
        ({"warmup_steps": 10**6}, ["warmup_steps", "below steps"]),
        ({"keep": -1}, ["keep", "0 or more", "-1"]),
        ({"validation_fraction": 0.9}, ["validation_fraction", "0.9"]),
        ({"learning_rate": -1}, ["learning_rate", "above 0", "-1"]),
        ({"learning_rate": "nan"}, ["learning_rate", "finite", "nan"]),
        ({"learning_rate": "inf"}, ["learning_rate", "finite", "inf"]),
        ({"gradient_clip": 0}, ["gradient_clip", "> 0", "inf disables it"]),
        ({"gradient_clip": -1}, ["gradient_clip", "> 0", "-1"]),
        ({"beta1": 2}, ["beta1", "below 1", "2"]),
        ({"weight_decay": "nan"}, ["weight_decay", "0 or more", "nan"]),
        ({"data_megabytes": -1}, ["data_megabytes", "above 0", "-1"]),
        ({"loss_chunk": -5}, ["loss_chunk", "0 or more", "-5"]),
        ({"rope_theta": 0}, ["rope_theta", "above 0"]),
        ({"target_loss": "nan"}, ["target_loss", "finite", "nan"]),
        ({"seed": 2**43}, ["seed", "43 bits"]),
        ({"init_std": -1}, ["init_std", "0 or more", "-1"]),
    ],
)
def test_errors_name_the_argument_and_what_came(values, words):
    with pytest.raises(ValueError) as caught:
        preset("demo").override(values)
    for word in words:
        assert word in str(caught.value)


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"demo, small, 0\.5B"):
        preset("70B")


def test_assignments_and_toml(tmp_path):
    assert parse_assignments(["steps=10", "log-every=2"]) == {"steps": "10", "log_every": "2"}
    with pytest.raises(ValueError, match="key=value"):
        parse_assignments(["steps"])
    path = tmp_path / "run.toml"
    path.write_text('seed = 4\n[model]\nhidden_size = 64\n[train]\ndata = ["a.txt", "b"]\n')
    config = preset("demo").override(read_toml(path))
    assert (config.seed, config.model.hidden_size, config.data) == (4, 64, ("a.txt", "b"))
    for content in (b"seed = = 4", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"--config: expected valid TOML, got .*run\.toml"):
            read_toml(path)
    with pytest.raises(ValueError, match="--config"):
        read_toml(tmp_path / "absent.toml")


def test_a_changed_preset_has_no_goal_of_its_own():
    assert configure("demo", {}).target_loss is not None
    assert configure("demo", {"log_every": 1}).target_loss is not None
    assert configure("demo", {"steps": 5}).target_loss is None
    assert configure("demo", {"steps": 5, "target_loss": 6}).target_loss == 6


def test_configurations_survive_json():
    import json

    for config in PRESETS.values():
        assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_parameters_are_counted_as_the_model_has_them():
    config = ModelConfig(num_kv_heads=2)
    assert parameters(config).total == sum(p.numel() for p in Decoder(config).parameters())


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("small", 90e6, 125e6),
        ("0.5B", 0.45e9, 0.55e9),
        ("1.4B", 1.35e9, 1.5e9),
        ("7B", 6.8e9, 7.3e9),
    ],
)
def test_presets_have_the_size_of_their_name(name, low, high):
    assert low < parameters(preset(name).model).total < high


def test_what_is_kept_does_not_grow_with_finer_experts():
    coarse = ModelConfig(experts_per_token=2, num_experts=8, intermediate_size=128)
    fine = ModelConfig(experts_per_token=8, num_experts=32, intermediate_size=32)
    a, b = (layer_bytes(m, 1024, "bf16", MemoryPolicy()) for m in (coarse, fine))
    assert 0 < b - a < 21 * 1024 * 6  # only the routing of six more rows a token


def test_what_fp8_keeps_is_known():
    m = ModelConfig(experts_per_token=2, num_experts=8, hidden_size=64, intermediate_size=128)
    bf16, fp8 = (layer_bytes(m, 1024, p, MemoryPolicy()) for p in ("autocast", "fp8"))
    of_weights = 2 * 4 * 8 + 4 * 8 * 128  # scales, the norms of W2
    scales = 2 * 4 * 2048 + 4 * 1024 + 4 * 8 * 128  # zmax and a_scale, x_scale, zmax_columns
    assert fp8 - bf16 == 8 * 3 * 128 * 64 + scales + of_weights
    fp8, bf16 = (layer_bytes(m, 1024, p, MemoryPolicy("recompute")) for p in ("fp8", "bf16"))
    assert fp8 - bf16 == of_weights
