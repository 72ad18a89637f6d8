"""What a training step and a validation promise, each seen in numbers."""

import pytest
import torch

from sonicmoe_trainer import checkpoint, corpus, generate, optim, run, runlog
from sonicmoe_trainer.batches import Batches
from sonicmoe_trainer.model import Decoder

RANDOM_ROUTER = {"router": "token_rounding:sr-f", "rounding_tile": 16}


def test_a_random_router_continues_its_random_numbers(tiny, cache, tmp_path, stop_after):
    config = tiny.override({**RANDOM_ROUTER, "steps": 6, "warmup_steps": 1, "validate_every": 4})
    run.train(config, tmp_path / "whole", cache, picture=False)
    with stop_after(3):
        assert not run.train(config, tmp_path / "parts", cache, picture=False)["finished"]
    run.train(run.continued(tmp_path / "parts", {}), tmp_path / "parts", cache, resume=True)

    logs = [runlog.read(tmp_path / name) for name in ("whole", "parts")]
    assert len(logs[0]) == 8
    assert [r["loss"] for r in logs[0]] == [r["loss"] for r in logs[1]]
    ends = [checkpoint.load_latest(tmp_path / n / "checkpoints") for n in ("whole", "parts")]
    for name, tensor in ends[0]["model"].items():
        assert torch.equal(tensor, ends[1]["model"][name]), name


def test_validation_is_that_of_the_model_in_eval_mode(tiny, cache, tmp_path):
    """In training mode token rounding changes which experts a token meets, and so the loss."""
    changes = {"steps": 2, "warmup_steps": 1, "validation_sequences": 7}  # batches of 2, 2, 2 and 1
    config = tiny.override({**RANDOM_ROUTER, **changes})
    numbers = run.train(config, tmp_path / "run", cache, picture=False)
    model = generate.load_model(tmp_path / "run", torch.device("cpu"))
    tokens = corpus.prepare(config, cache, lambda _: None).tokens("validation")
    context, sequences = config.model.context, config.validation_sequences
    [(x, y)] = Batches(tokens, context, config.batch, config.seed).spread(sequences, sequences)
    with torch.no_grad():
        expected, rounded = (model.train(mode)(x, y)[0].item() for mode in (False, True))
    assert abs(rounded - expected) > 1e-4
    assert numbers["validation_loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_the_gradient_is_the_mean_over_micro_batches(micro_batch, tiny, cache, tmp_path):
    """Of the loss and the auxiliary loss, which is what trains the routers' balance."""
    changes = {"steps": 1, "warmup_steps": 0, "gradient_clip": "inf", "aux_loss_coef": 0.5}
    config = tiny.override({**changes, "batch": 4, "micro_batch": micro_batch})
    run.train(config, tmp_path / "run", cache, picture=False)
    moments = checkpoint.load_latest(tmp_path / "run" / "checkpoints")["optimizer"]["state"]

    torch.manual_seed(config.seed)
    model = Decoder(config.model)
    tokens = corpus.prepare(config, cache, lambda _: None).tokens("train")
    x, y = Batches(tokens, config.model.context, config.batch, config.seed).step(0)
    pieces = list(zip(x.split(micro_batch), y.split(micro_batch), strict=True))
    torch.stack([sum(model(*piece)) for piece in pieces]).mean().backward()
    for name, p in model.named_parameters():
        # After one step the first moment is (1 − beta1) times the gradient.
        found, scale = moments[name]["exp_avg"] / (1 - config.beta1), p.grad.abs().max().item()
        torch.testing.assert_close(found, p.grad, rtol=1e-4, atol=1e-5 * scale, msg=name)


def test_the_optimizer_sees_clipped_gradients(tiny, cache, tmp_path):
    limit = 0.125
    config = tiny.override({"steps": 1, "warmup_steps": 0, "gradient_clip": limit})
    run.train(config, tmp_path / "run", cache, picture=False)
    moments = checkpoint.load_latest(tmp_path / "run" / "checkpoints")["optimizer"]["state"]
    # After one step the first moment is (1 − beta1) times the gradient.
    norm = torch.cat([m["exp_avg"].flatten() for m in moments.values()]).norm().item()
    assert norm / (1 - config.beta1) == pytest.approx(limit, rel=1e-4)


def test_the_biases_of_sigmoid_routers_follow_the_load(tiny, cache, tmp_path):
    config = tiny.override({"router": "sigmoid", "steps": 1, "warmup_steps": 0})
    run.train(config, tmp_path / "run", cache, picture=False)
    end = checkpoint.load_latest(tmp_path / "run" / "checkpoints")["model"]

    torch.manual_seed(config.seed)
    model = Decoder(config.model)
    tokens = corpus.prepare(config, cache, lambda _: None).tokens("train")
    model(*Batches(tokens, config.model.context, config.batch, config.seed).step(0))
    for i, block in enumerate(model.blocks):
        load = block.moe.routing.load
        bias = end[f"blocks.{i}.moe.routing.selection_bias"]
        assert bias.count_nonzero() > 0
        torch.testing.assert_close(bias, 1e-3 * (load.mean() - load).sign())


def test_each_step_has_its_own_learning_rate(tiny, cache, tmp_path):
    config = tiny.override({"steps": 4, "warmup_steps": 3, "checkpoint_every": 1, "keep": 4})
    run.train(config, tmp_path / "run", cache, picture=False)
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    states = [torch.load(folder / "state.pt", weights_only=True) for folder in folders]
    rates = [g["lr"] / config.learning_rate for s in states for g in s["optimizer"]["param_groups"]]
    assert rates == pytest.approx([r for r in (1 / 3, 2 / 3, 1, 1) for _ in range(2)])


def test_weight_decay_spares_the_norms(tiny):
    config = tiny.override({"weight_decay": 0.5, "learning_rate": 0.1})
    model = Decoder(config.model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optim.build(model, config)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert sum("norm" in name for name in before) == 4 * tiny.model.num_layers + 1
    for name, p in model.named_parameters():
        decayed = before[name] * (1 if "norm" in name else 1 - 0.1 * 0.5)
        torch.testing.assert_close(p.detach(), decayed, msg=name)
