"""The table of what was tried: the words of the tests, and versions where all of them passed."""

from types import SimpleNamespace

import compatibility
import pytest


def test_table_is_that_of_the_tests():
    text, versions = compatibility.written(compatibility.DOCUMENT.read_text())
    assert text == compatibility.table(versions), "run `make compatibility`"
    assert compatibility.claims().keys() == compatibility.FRAMEWORKS.keys() == versions.keys()


@pytest.mark.parametrize("outcome", ["passed", "failed", "skipped", "partly run"])
def test_versions_come_from_tests_that_passed(outcome, tmp_path):
    document = tmp_path / "integrations.md"
    document.write_text(compatibility.BEGIN + compatibility.table({}) + compatibility.END)
    recorder = compatibility.Recorder(document)
    claims = compatibility.claims()["torchtitan"]
    for what in claims[1:] if outcome == "partly run" else claims:
        last = what == claims[-1] and outcome in ("failed", "skipped")
        recorder.pytest_runtest_logreport(
            SimpleNamespace(
                user_properties=[("tries", ("torchtitan", what))],
                when="setup" if last else "call",
                outcome=outcome if last else "passed",
            )
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compatibility, "version", {"torchtitan": "9.8.7+local"}.__getitem__)
        recorder.pytest_sessionfinish(SimpleNamespace(config=object()))
    text, versions = compatibility.written(document.read_text())
    assert versions.pop("torchtitan") == (["9.8.7"] if outcome == "passed" else [])
    assert not any(versions.values()) and text.count("none yet") >= len(versions)
