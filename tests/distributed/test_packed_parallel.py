"""LoRA on packed experts under FSDP2 and DDP: two processes train as one, the experts whole."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="comes with the extra 'test'")
pytest.importorskip("bitsandbytes", reason="comes with the extra 'test'")

import packed_parallel as ranks
from packed_checkpoints import write


@pytest.mark.tries("FSDP2", "LoRA on packed experts, which stay whole; DDP too")
@pytest.mark.parametrize("kind", ["mxfp4", "dense"], ids=["MXFP4", "NF4"])
def test_two_ranks_train_packed_experts_as_one_process(two, kind, tmp_path):
    for losses in two.run(ranks.trains_as_one_process, str(write(kind, tmp_path / kind))):
        want = losses.pop("one process")
        assert len(losses) == 3 and want[-1] < want[0]
        for name, found in losses.items():
            assert found == pytest.approx(want, rel=0, abs=1e-5), name


def test_what_would_shard_packed_experts_is_refused(two, tmp_path):
    for messages in two.run(ranks.refusals, str(write("mxfp4", tmp_path / "mxfp4"))):
        assert "got FlatParamHandle of packed experts. Use FSDP2" in messages["FSDP1"]
        assert "fsdp_cpu_ram_efficient_loading: false" in messages["meta"]
        assert "got FSDPParam of packed experts" in messages["renamed"]
        assert "ignored_params={p for p in" in messages["renamed"]
