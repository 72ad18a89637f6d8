"""Tensor and expert parallelism as transformers does it, with our experts inside."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers wants it to load a model in parts")
pytest.importorskip("peft")

import hf_parallel as ranks


@pytest.mark.tries("Hugging Face transformers", "tensor and expert parallelism")
@pytest.mark.parametrize("layout", ranks.LAYOUTS)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_two_ranks(two, name, layout, tmp_path):
    two.run(ranks.save, name, str(tmp_path))
    two.run(ranks.two_ranks_equal_one, name, str(tmp_path), layout)


@pytest.mark.parametrize("lora", [False, True], ids=["trained", "lora"])
def test_report_under_fsdp2(two, lora):
    two.run(ranks.report_of_sharded_layers, lora)
