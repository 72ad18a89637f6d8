"""The table of models and GPUs of `sonicmoe cost --finetune`, and its copy in the documents."""

import os
import re
from pathlib import Path

import pytest

from sonicmoe.bench.tables import table
from sonicmoe.cli import main
from sonicmoe.tools import finetune_memory as memory
from sonicmoe.tools.finetune_memory import GIB, MODELS, SETTINGS

DOCUMENT = Path(__file__).parents[1] / "docs" / "packed_models.md"
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


@pytest.mark.parametrize(
    ("model", "experts", "lora"),
    [
        ("gpt-oss-120b", 36 * 128 * 3 * 2880**2, 530_841_600),  # as the model's own modules have
        ("Qwen3-Next-80B", 48 * 512 * 3 * 2048 * 512, 1_107_296_256),
    ],
)
def test_sizes(model, experts, lora):
    m = BY_NAME[model]
    assert m.experts == experts and m.lora(8) == lora and m.lora(16) == 2 * lora


def test_every_model_has_plausible_sizes():
    for m in MODELS:
        others = m.parameters - m.experts
        assert 0.9 * m.embeddings < others < 0.12 * m.parameters, m.name


def test_bytes_of_a_format_are_those_of_packed_weights():
    """Experts of gpt-oss-120b: 17 bytes for 32 weights."""
    parts = memory.step_bytes(BY_NAME["gpt-oss-120b"], BY_SETTING["4-bit lean"])
    assert parts["experts"] == BY_NAME["gpt-oss-120b"].experts * 17 / 32
    dense = memory.step_bytes(BY_NAME["gpt-oss-120b"], BY_SETTING["bf16 lean"])
    assert dense["experts"] == 2 * BY_NAME["gpt-oss-120b"].experts and dense["decoded"] == 0


def test_smallest_gpu():
    assert [memory.smallest_gpu(n * GIB) for n in (23, 24, 79, 80, 178, 179)] == [
        24, 48, 80, 141, 192, None,
    ]  # fmt: skip


def test_the_command_and_the_document_have_the_table(capsys):
    """`SONICMOE_WRITE_TABLES=1 pytest tests/test_finetune_memory.py` writes it."""
    assert main(["cost", "--finetune"]) == 0
    wanted = table(*memory.rows())
    assert wanted in capsys.readouterr().out
    assert re.search(r"gpt-oss-120b +\| +69 → 80 GB", wanted)
    marked = r"(<!-- sonicmoe cost --finetune -->\n).*?(<!-- end -->)"
    text = DOCUMENT.read_text()
    written = re.sub(marked, rf"\g<1>{wanted}\n\g<2>", text, flags=re.DOTALL)
    if os.environ.get("SONICMOE_WRITE_TABLES"):
        DOCUMENT.write_text(written)
    assert DOCUMENT.read_text() == written


def test_memory_of_a_program_is_as_the_document_says():
    assert "23, 44, 79, 139 and 178 GiB" in DOCUMENT.read_text()
    assert [*memory.USABLE.values()] == [23, 44, 79, 139, 178]
