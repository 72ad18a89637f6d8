"""The table of models and GPUs in docs/packed_models.md."""

import finetune_memory as memory
import pytest
from finetune_memory import GIB, MODELS, SETTINGS

BY_NAME = {m.name: m for m in MODELS}
BY_SETTING = {s.name: s for s in SETTINGS}


def gib(model: str, setting: str) -> float:
    return sum(memory.step_bytes(BY_NAME[model], BY_SETTING[setting]).values()) / GIB


# Of an estimate that was made part by part, by hand.
BY_HAND = {
    "gpt-oss-20b": (18, 26, 27, 45),
    "Qwen3-30B-A3B": (24, 38, 37, 64),
    "Kimi-Linear-48B": (33, 49, 55, 99),
    "Qwen3-Next-80B": (54, 88, 88, 160),
    "gpt-oss-120b": (69, 88, 119, 226),
    "GLM-4.5-Air": (71, 93, 116, 208),
    "Mixtral-8x22B": (84, None, 145, 271),
}


@pytest.mark.parametrize("model", BY_HAND)
def test_estimates_by_hand_agree(model):
    for setting, wanted in zip(SETTINGS, BY_HAND[model], strict=False):
        if wanted is not None:
            assert gib(model, setting.name) == pytest.approx(wanted, rel=0.08), setting.name
    assert 124 < gib("MiniMax-M2", "all in nested NF4, lean") < 132
    assert 124 < gib("Qwen3-235B-A22B", "all in nested NF4, lean") < 132


def test_the_document_has_the_table():
    """If this fails: python benchmarks/finetune_memory.py"""
    assert memory.written(memory.DOCUMENT.read_text()) == memory.DOCUMENT.read_text()
