"""Continue a text with a trained model."""

import math
from pathlib import Path
from typing import Any

import torch

from sonicmoe.plugins import bad_argument

from . import checkpoint, parallel
from .config import ModelConfig, check_seed
from .corpus import END_OF_TEXT, read_tokenizer
from .model import Decoder
from .run import load_config


def load_model(folder: Path, device: torch.device) -> Decoder:
    """The model of a run's newest sound checkpoint, in eval mode."""
    config = load_config(folder)
    state = checkpoint.load_latest(folder / "checkpoints")
    with device:
        model = Decoder(config.model, "auto")
    if config.bf16_weights:
        model.to(torch.bfloat16)
    model.load_state_dict(state["model"])
    return model.eval()


def load_tokenizer(folder: Path) -> tuple[Any, int]:
    """The tokenizer of a run, and its token for the end of a text."""
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    return tokenizer, tokenizer.token_to_id(END_OF_TEXT)


def from_run(
    folder: Path,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    device: str = "auto",
) -> str:
    """The prompt and its continuation, as text."""
    _check(tokens, temperature, top_p)
    check_seed(seed)
    load_config(folder)
    tokenizer, end = load_tokenizer(folder)
    model = load_model(folder, parallel.start(device).device)
    ids = tokenizer.encode(prompt).ids or [end]
    return tokenizer.decode(
        continue_ids(model, ids, tokens, temperature=temperature, top_p=top_p, seed=seed, end=end)
    )


@torch.no_grad()
def continue_ids(
    model: Decoder,
    ids: list[int],
    tokens: int,
    *,
    temperature: float,
    top_p: float,
    seed: int,
    end: int | None = None,
) -> list[int]:
    """`ids` and at most `tokens` more, until `end`.

    The cache grows to the context the model was trained on; then it restarts from the second half.
    """
    device = model.embed.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    ids = list(ids)
    cache, unread = _fresh(model.config), ids[-model.config.context :]
    filled = 0
    for _ in range(tokens):
        if filled + len(unread) > model.config.context:
            cache, unread, filled = _fresh(model.config), ids[-model.config.context // 2 :], 0
        logits = model(torch.tensor([unread], device=device), cache=cache)[0, -1].float()
        filled += len(unread)
        token = _draw(logits, temperature, top_p, generator)
        ids.append(token)
        unread = [token]
        if token == end:
            break
    return ids


def _draw(logits, temperature: float, top_p: float, generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probability, order = (logits / temperature).softmax(-1).sort(descending=True)
    probability[probability.cumsum(-1) - probability > top_p] = 0  # the likeliest always stays
    return int(order[torch.multinomial(probability, 1, generator=generator)])


def _fresh(config: ModelConfig) -> list:
    return [None] * config.num_layers


def _check(tokens: int, temperature: float, top_p: float) -> None:
    if tokens < 1:
        raise bad_argument("tokens", "at least 1", tokens, "Pass more.")
    if not 0 <= temperature < math.inf:
        expected, remedy = "a finite number, 0 or more", "0 takes the likeliest token."
        raise bad_argument("temperature", expected, temperature, remedy)
    if not 0 < top_p <= 1:
        raise bad_argument("top_p", "more than 0, at most 1", top_p, "1 samples from all tokens.")
