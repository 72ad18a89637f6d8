"""Tables on disk: what is read, what is left out and said, what the selection makes of it."""

import json
import warnings
from dataclasses import asdict, replace

import pytest

from sonicmoe import errors
from sonicmoe.tuning import RowConfig, Target, WeightConfig, row_config, table, weight_config
from sonicmoe.tuning.candidates import candidates, default_config
from sonicmoe.tuning.table import RowKey, Table, WeightKey

H200 = Target(90, 132)
DEVICE = "NVIDIA H200"
UP = RowKey("up", 2, 1536, 512, True)
DW1 = WeightKey(2, 512, 1536, False, True)
ROWS = RowConfig(128, 128, 64, warps=8, stages=5, tma=True, hopper=True)
PLAIN = RowConfig(128, 128, 64, warps=8, stages=3, tma=True)
WEIGHTS = WeightConfig(128, 256, 32, warps=8, stages=6, tma=True, hopper=True)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The path of the table of an H200 that is not here."""
    monkeypatch.delenv(table.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(table, "_name_of", lambda target: DEVICE if target == H200 else None)
    table.invalidate()
    errors.say_once.cache_clear()
    yield tmp_path / "sonicmoe" / "tuned-nvidia-h200.json"
    table.invalidate()


def write(path, *pairs, measured=()):
    entries = [table.encode(key, config, default_ms=2.0, ms=1.0) for key, config in pairs]
    table.write(path, DEVICE, H200, [*(key for key, _ in pairs), *measured], entries)


def test_the_selection_takes_what_was_tuned(here):
    assert row_config(*UP, H200) == default_config(UP, H200) != ROWS
    write(here, (UP, ROWS), (DW1, WEIGHTS))
    assert row_config(*UP, H200) == ROWS
    assert weight_config(*DW1, H200) == WEIGHTS
    assert row_config(*UP, Target(90, 114)) == default_config(UP, Target(90, 114))
    for other in (UP._replace(K=1024), UP._replace(kernel="dx"), UP._replace(gated=False)):
        assert row_config(*other, H200) == default_config(other, H200)


def test_the_file_is_read_once(here):
    write(here, (UP, ROWS))
    assert row_config(*UP, H200) == ROWS
    here.unlink()
    assert row_config(*UP, H200) == ROWS


def test_no_table_is_no_complaint(here):
    with warnings.catch_warnings(action="error"):
        assert row_config(*UP, H200) == default_config(UP, H200)


def test_a_named_file_comes_first_and_empty_means_none(here, tmp_path, monkeypatch):
    write(here, (UP, ROWS))
    named = tmp_path / "mine.json"
    write(named, (DW1, WEIGHTS))
    monkeypatch.setenv(table.VARIABLE, str(named))
    table.invalidate()
    assert table.tuned(H200) == Table(weights={DW1: WEIGHTS})
    monkeypatch.setenv(table.VARIABLE, "")
    table.invalidate()
    assert table.tuned(H200) == Table()
    monkeypatch.setenv(table.VARIABLE, str(tmp_path / "gone.json"))
    table.invalidate()
    with pytest.warns(UserWarning, match=r"gone.json: named by SONICMOE_TUNED, but there is no"):
        assert table.tuned(H200) == Table()


def broken(**changes):
    return table.encode(UP, ROWS) | changes


@pytest.mark.parametrize(
    "entry",
    [
        broken(config=asdict(replace(ROWS, stages=9))),  # more shared memory than there is
        broken(config=asdict(replace(ROWS, stages=1))),  # a ring of one would wait for itself
        broken(config=asdict(replace(ROWS, block_m=64))),  # not the height of the tiles
        broken(config=asdict(replace(ROWS, block_n=64))),  # no Hopper kernel is that narrow
        broken(config=asdict(replace(ROWS, warps=4))),
        broken(config=asdict(ROWS) | {"cluster": 2}),  # of another version
        broken(config=asdict(ROWS) | {"block_n": "128"}),
        broken(config=asdict(WEIGHTS)),
        {name: value for name, value in broken().items() if name != "K"},
        table.encode(UP._replace(kernel="dz"), replace(ROWS, stages=6)),
        table.encode(DW1, replace(WEIGHTS, block_m=64)),
        table.encode(UP, replace(PLAIN, programs=0)),
        table.encode(UP, replace(PLAIN, programs=10**6)),  # memory for partial sums of each
        table.encode(UP, replace(PLAIN, warps=64)),  # more threads than a block may have
        table.encode(UP, replace(PLAIN, block_n=512, block_k=16, warps=16)),  # too wide for TMA
        table.encode(DW1, WeightConfig(8, 64, 32, warps=4, stages=2, tma=False)),  # for tl.dot
        table.encode(UP._replace(kernel="sideways"), ROWS),
        broken(K=[1536]),
        broken(config=asdict(ROWS) | {"stages": True}),
        broken(config=None),
        None,
    ],
)
def test_what_cannot_run_is_left_out_and_said_once(here, entry):
    write(here, (DW1, WEIGHTS))
    document = json.loads(here.read_text())
    document["entries"].append(entry)
    here.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match=r"tuned-nvidia-h200.json.*ignored.*sonicmoe tune") as said:
        assert table.tuned(H200) == Table(weights={DW1: WEIGHTS})
        assert row_config(*UP, H200) == default_config(UP, H200)
    assert len(said) == 1


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"format": 1}, "a table of format 1, this version reads 2"),
        ({"device": "NVIDIA H100"}, "tuned for 'NVIDIA H100', the device here is 'NVIDIA H200'"),
        ({"entries": 3}, "not a table"),
        (b"{", "not a table"),
        (b"[]", "not a table"),
        (b"\xff\xfe\0", "not a table"),
        (b"[" * 100_000, "not a table"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_table_of_something_else_is_ignored(here, change, complaint):
    write(here, (UP, ROWS))
    if isinstance(change, bytes):
        here.write_bytes(change)
    else:
        here.write_text(json.dumps(json.loads(here.read_text()) | change))
    with pytest.warns(UserWarning, match=complaint) as said:
        assert table.tuned(H200) == Table()
        assert row_config(*UP, H200) == default_config(UP, H200)
    assert len(said) == 1 and str(here) in str(said[0].message)


@pytest.mark.parametrize("name", ["a folder", "n" * 300, "~nobody-of-that-name/tuned.json", "a/b"])
def test_a_named_file_that_cannot_be_read_is_said_once(here, tmp_path, monkeypatch, name):
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a").touch()
    named = name if name.startswith("~") else str(tmp_path / name)
    monkeypatch.setenv(table.VARIABLE, named)
    with pytest.warns(UserWarning, match="This is ignored") as said:
        assert row_config(*UP, H200) == default_config(UP, H200)
    assert len(said) == 1 and named in str(said[0].message)


def test_tuning_again_replaces_what_was_measured_again(here):
    write(here, (UP, ROWS), (DW1, WEIGHTS))
    write(here, measured=[UP])  # the default was the best this time
    assert table.tuned(H200) == Table(weights={DW1: WEIGHTS})
    write(here, (UP, replace(ROWS, stages=4)))
    assert table.tuned(H200).rows == {UP: replace(ROWS, stages=4)}
    assert list(here.parent.iterdir()) == [here]


def test_a_scope_of_its_own(here):
    write(here, (UP, ROWS))
    with table.using(Table()):
        assert row_config(*UP, H200) == default_config(UP, H200)
    assert row_config(*UP, H200) == ROWS


# --- candidates -----------------------------------------------------------------------------------
KEYS = [
    UP, DW1, UP._replace(itemsize=4), DW1._replace(itemsize=4), UP._replace(gated=False),
    RowKey("dz", 2, 1536, 256, True), RowKey("down", 2, 64, 128, True),
    WeightKey(2, 128, 1536, True, False),
]  # fmt: skip


@pytest.mark.parametrize("arch", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_candidates_can_run_and_the_default_is_the_first(key, arch):
    target = Target(arch, 100)
    found = candidates(key, target)
    assert found[0] == default_config(key, target)
    assert len(set(found)) == len(found) > 3
    assert all(table.allowed(key, config, target) for config in found)


def test_candidates_on_hopper():
    tiles = {(c.block_n, c.block_k) for c in candidates(UP, H200) if c.hopper}
    assert tiles == {(128, 32), (128, 64), (256, 32), (256, 64)}
    assert any(not c.hopper for c in candidates(UP, H200))
    assert {(128, 256), (256, 128)} <= {(c.block_m, c.block_n) for c in candidates(DW1, H200)}
    assert not any(c.hopper for c in candidates(UP, Target(90, 132, gluon=False)))
    assert any(c.hopper for c in candidates(UP._replace(gated=False), H200))
