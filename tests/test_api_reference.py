"""docs/api.md is complete and up to date, its usage lines run, and its shapes are right."""

import re

import api_reference
import pytest
import torch
from api_reference import MODULES, USAGE


def test_document_is_up_to_date():
    assert api_reference.DOCUMENT.read_text() == api_reference.text(), "run `make api`"


def test_every_public_name_has_an_entry():
    """With a usage line, unless only the package or a framework constructs or calls it."""
    received = set()
    for module, defined in api_reference.names().items():
        entries = api_reference.usages(module)
        assert set(entries) == set(defined), module
        received |= {f"{module}.{n}" for n, e in entries.items() if not {"use", "run"} & set(e)}
    assert received == {
        "routing.RouterStatistics",
        "distributed.ExpertParallelMoE",
        "integrations.transformers.experts_forward",
        "integrations.report.LayerReport",
        "integrations.torchtitan.Experts",
        "integrations.torchtitan.FusedExperts",
    }


def test_usage_lines_run_and_shapes_are_right():
    names: dict = {}
    exec(USAGE["setup"], names)
    try:
        for module in MODULES:
            exec(f"from {api_reference.dotted(module)} import *", names)
            for name, usage in api_reference.usages(module).items():
                exec(usage.get("run", "") + "\n" + usage.get("use", ""), names)
                checked = check_shapes(usage.get("shapes", ""), names)
                assert checked == len(re.findall(r"\(", usage.get("shapes", ""))), (module, name)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_check_of_shapes_can_fail():
    names = {"x": torch.zeros(3, 4), "T": 3, "H": 4}
    assert check_shapes("x (T, H); x (…, H)", names) == 2
    for wrong in ("x (T, T)", "x (T,)", "x (…, T)", "x ()", "x (T, H) → x (H, T)"):
        with pytest.raises(AssertionError):
            check_shapes(wrong, names)


def check_shapes(shapes: str, names: dict) -> int:
    """Compare `a, b (T, H)` with the tensors of these names; returns how many shapes it found."""
    found = re.findall(r"((?:[\w.]+, )*[\w.]+) \(([^)]*)\)", shapes)
    for tensors, dimensions in found:
        any_number = dimensions.startswith("…, ")
        wanted = eval(f"[{dimensions.removeprefix('…, ').replace('·', '*')}]", dict(names))
        for tensor in tensors.split(", "):
            shape = list(eval(tensor, names).shape)
            if any_number:
                shape = shape[len(shape) - len(wanted) :]
            assert shape == wanted, f"{tensor} ({dimensions}) has shape {shape}"
    return len(found)
