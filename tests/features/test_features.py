"""Every pair of features works together, or is refused for the reason in feature_list.py."""

import feature_table
import pytest
import torch.distributed as dist
from devices import on
from feature_combinations import Combination, calls, covering, kernels, name_of
from feature_list import BAD_ARGUMENT, ERRORS, Feature, case_of, pairs, reasons
from feature_runs import check, results, start

from sonicmoe.ops import registry

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


@pytest.fixture(autouse=True)
def _named_tuples_are_dense(monkeypatch):
    """Operators that are called directly rely on it; what callers own they make dense."""
    chosen = registry.Operator.chosen

    def checked(self, args, plan):
        if plan is self.signature.of_callers:
            dense = registry.laid_out(args, plan, False)
            assert registry.laid_out(dense, self.signature.of_all, False) is dense, self.function
        return chosen(self, args, plan)

    monkeypatch.setattr(registry.Operator, "chosen", checked)


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


# --- on a GPU -------------------------------------------------------------------------------------
# All combinations of precision, memory, biases, LoRA, activation, order of gate and up, frozen
# parts and entry point; every triple of all features. A test has the cases with the same kernels.
def _failures(combinations: list[Combination]) -> list[str]:
    found = []
    for features in combinations:
        try:
            check(case_of(features), "cuda")
        except Exception as error:
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(f"{name_of(features)}: {words[:300]}")
    return found


@on("cuda")
@pytest.mark.parametrize("of_kernels", kernels(), ids=name_of)
def test_product(of_kernels):
    combinations = calls(of_kernels)
    found = _failures(combinations)
    assert not found, f"{len(found)} of {len(combinations)} failed:\n" + "\n".join(found)


@on("cuda")
@pytest.mark.parametrize("combination", covering(strength=3), ids=name_of)
def test_every_triple(combination):
    check(case_of(combination), "cuda")
