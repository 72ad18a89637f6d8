"""Where a test runs: plain PyTorch on the CPU, kernels in Triton's interpreter, kernels on a GPU.

    @on("cpu", "interpreter", "cuda")
    def test(device, backend): ...

    @values_on("shape", interpreter=["33,24,8,3,2"], cuda=["8000,264,136,100,3"])
    def test(shape, device): ...

A test without either runs on the CPU, or with `pytest.mark.gpu` on a GPU. The fixture `device` is
the name PyTorch has for it, `backend` is "torch" on the CPU and "triton" elsewhere.

Triton decides when a kernel is defined whether it will be interpreted, so the interpreter needs a
process with TRITON_INTERPRET=1. It collects what is for the interpreter, and any other process the
rest; conftest.py does this, and test_interpreter_kernels.py starts the process.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet  # the type of pytest.param()

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
HERE = ("interpreter",) if INTERPRETING else ("cpu", "cuda")
# What the text of a file has that holds tests for a device: no other is imported to look for them.
SIGNS = {
    "interpreter": re.compile(r'"interpreter"|\binterpreter='),
    "cuda": re.compile(r'"cuda"|\bcuda=|mark\.gpu'),
}


def on(*devices: str) -> pytest.MarkDecorator:
    """Run on each of these devices."""
    _check(devices)
    return pytest.mark.on(*devices)


def values_on(
    names: str | tuple[str, ...], *, ids: Callable[[Any], str] = str, **values: Iterable
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with values of its own for each device, on which it also runs."""
    _check(values)
    return pytest.mark.values_on(names, ids, {name: list(each) for name, each in values.items()})


def _check(devices: Iterable[str]) -> None:
    if unknown := set(devices) - {"cpu", "interpreter", "cuda"}:
        raise ValueError(f"devices: expected cpu, interpreter or cuda, got {sorted(unknown)}")


def devices_of(item: pytest.Item) -> list[str]:
    tables = [mark.args[2].keys() for mark in item.iter_markers("values_on")]
    if tables:
        if any(table != tables[0] for table in tables):
            raise ValueError(f"{item.nodeid}: expected values for the same devices")
        return list(tables[0])
    if mark := item.get_closest_marker("on"):
        return list(mark.args)
    return ["cuda" if item.get_closest_marker("gpu") else "cpu"]


def device_of(item: pytest.Item) -> str | None:
    """Where this process runs it, if at all."""
    if "on_device" in getattr(item, "callspec", item).__dict__.get("params", {}):
        return item.callspec.params["on_device"]  # type: ignore[attr-defined]
    here = [device for device in devices_of(item) if device in HERE]
    return here[0] if here else None


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Every value of every device that this process has, and the fixture `on_device`."""
    item = metafunc.definition
    here = [device for device in devices_of(item) if device in HERE]
    takes_device = "on_device" in metafunc.fixturenames
    if len(here) > 1 and not takes_device:
        raise ValueError(f"{item.nodeid}: expected the argument `device` of a test of {here}")
    tables = [mark.args for mark in item.iter_markers("values_on")][::-1]
    if not here or not (tables or takes_device):
        return
    names, rows = [], []
    for table_names, _, _ in tables:
        each = table_names.split(",") if isinstance(table_names, str) else table_names
        names.append([name.strip() for name in each])
    for device in here:
        for chosen in itertools.product(*(values[device] for _, _, values in tables)):
            row: list = []
            word: list[str] = [device] if takes_device else []
            marks: list = []
            for value, of_table, (_, ids, _) in zip(chosen, names, tables, strict=True):
                if isinstance(value, ParameterSet):
                    marks, value = [*marks, *value.marks], value.values
                elif len(of_table) == 1:
                    value = (value,)
                row, word = [*row, *value], [*word, *map(ids, value)]
            row += [device] if takes_device else []
            rows.append(pytest.param(*row, id="-".join(word), marks=marks))
    every = [*itertools.chain(*names), *(["on_device"] if takes_device else [])]
    indirect = ["on_device"] if takes_device else False
    metafunc.parametrize(every, rows, indirect=indirect)


@cache
def has_tests_for(device: str, path: Path) -> bool:
    """Whether a test file, or one in a folder, may hold tests for this device."""
    files = path.rglob("test_*.py") if path.is_dir() else [path]
    return any(SIGNS[device].search(file.read_text()) for file in files)
