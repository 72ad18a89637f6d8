"""Every pair of features works together, or is refused for the reason in feature_list.py."""

import feature_table
import pytest
import torch.distributed as dist
from feature_list import BAD_ARGUMENT, ERRORS, Feature, case_of, pairs, reasons
from feature_runs import check, results, start

pytest.importorskip("transformers")
pytest.importorskip("peft")


def parameters() -> list:
    return [
        pytest.param(*pair, id=" and ".join(f.name for f in pair),
                     marks=pytest.mark.gpu if any(f.gpu for f in pair) else ())
        for pair in pairs()
    ]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory):
    """Expert parallelism runs in a group of one process."""
    start(str(tmp_path_factory.mktemp("group")))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("one", "other"), parameters())
def test_pair(one: Feature, other: Feature):
    pair = (one, other)
    device = "cuda" if any(f.gpu for f in pair) else "cpu"
    found = reasons(pair)
    if not found:
        check(case_of(pair), device)
        return
    kinds, messages = zip(*(ERRORS.get(reason, BAD_ARGUMENT) for reason in found), strict=True)
    with pytest.raises(kinds, match="|".join(messages)):
        results(case_of(pair), device)


def test_document_is_up_to_date():
    assert feature_table.DOCUMENT.read_text() == feature_table.text(), "run `make features`"
