"""Damaged, foreign and half-written files in the folder of a run."""

import contextlib
import errno
import json
import os
import resource

import pytest
import torch

from sonicmoe.cli import main
from sonicmoe_trainer import checkpoint, run, runlog


@pytest.fixture
def two(tmp_path):
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        checkpoint.save(folder, step, {"step": step}, keep=2)
    return folder


def _file(folder, step, name="manifest.json"):
    return folder / f"step-{step:08d}" / name


def _damage(folder, step):
    path = _file(folder, step, "state.pt")
    path.write_bytes(path.read_bytes()[:-1])


# --- manifests ------------------------------------------------------------------------------------
def test_every_flipped_bit_of_a_manifest_is_damage(two):
    path = _file(two, 2)
    sound = path.read_bytes()
    for bit in range(8 * len(sound)):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        with open(path, "r+b") as file:  # write_bytes truncates first, which some disks flush
            file.write(data)
        assert checkpoint._fault(path.parent) is not None, bit
        if bit % 16:  # loading takes longer
            continue
        said = []
        assert checkpoint.load_latest(two, said.append)["step"] == 1
        assert len(said) == 1
        assert "step-00000002 is damaged: manifest.json" in said[0]
        assert "falling back to step 1" in said[0]
    path.write_bytes(sound)
    assert checkpoint.load_latest(two)["step"] == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b'{"files": {}}', b'{"files": null}', b"[" * 100_000, b"\xff\xfe"],
    ids=lambda content: content[:24],
)
def test_what_is_no_manifest_is_damage(two, content):
    _file(two, 2).write_bytes(content)
    assert checkpoint.load_latest(two, lambda _: None)["step"] == 1


@pytest.mark.parametrize("files", [{}, {"state.pt": {}}, {"state.pt": 7}, ["state.pt"], None])
def test_a_manifest_that_does_not_describe_the_state_is_damage(two, files):
    _file(two, 2).write_bytes(checkpoint._manifest(files))  # with the right checksum of its own
    assert checkpoint.load_latest(two, lambda _: None)["step"] == 1


def test_a_manifest_lists_every_file_with_size_and_checksum(two):
    files = json.loads(_file(two, 2).read_text())["files"]
    others = {p.name for p in (two / "step-00000002").iterdir()} - {"manifest.json"}
    assert files.keys() == others
    for name, entry in files.items():
        assert entry["bytes"] == _file(two, 2, name).stat().st_size
        assert len(entry["sha256"]) == 64


class _Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_checkpoint_that_would_run_code_is_refused(two, tmp_path):
    marker = tmp_path / "it ran"
    checkpoint.save(two, 3, {"step": _Malicious(marker)}, keep=3)  # with the right checksums
    said = []
    assert checkpoint.load_latest(two, said.append)["step"] == 2
    assert not marker.exists()
    assert "step-00000003 is damaged" in said[0]


# --- pruning --------------------------------------------------------------------------------------
def test_damaged_checkpoints_do_not_displace_sound_ones(two):
    _damage(two, 2)
    checkpoint.save(two, 3, {"step": 3}, keep=2)
    _damage(two, 3)
    checkpoint.save(two, 4, {"step": 4}, keep=2)
    _damage(two, 4)
    said = []
    assert checkpoint.load_latest(two, said.append)["step"] == 1
    assert len(said) == 3
    for step in (5, 6):
        checkpoint.save(two, step, {"step": step}, keep=2)
    assert checkpoint.steps(two) == [5, 6]


def test_a_damaged_manifest_does_not_displace_a_sound_checkpoint(two):
    _file(two, 2).write_text("{}")
    checkpoint.save(two, 3, {"step": 3}, keep=2)
    assert 1 in checkpoint.steps(two)


def test_checkpoints_that_the_run_continued_before_do_not_count(two):
    """Steps 8 and 9 are damaged, the run continued after step 2 and has not reached them again."""
    for step in (8, 9):
        checkpoint.save(two, step, {"step": step}, keep=4)
        _damage(two, step)
    checkpoint.save(two, 3, {"step": 3}, keep=2)
    assert checkpoint.load_latest(two, lambda _: None)["step"] == 3
    _damage(two, 3)
    assert checkpoint.load_latest(two, lambda _: None)["step"] == 2


def test_later_checkpoints_that_cannot_be_loaded_do_not_count(two):
    """Their checksums are right, but they hold Python objects: the run continued after step 2."""
    for step in (8, 9):
        checkpoint.save(two, step, {"step": step, "path": two}, keep=4)
    assert checkpoint.load_latest(two, lambda _: None)["step"] == 2
    checkpoint.save(two, 3, {"step": 3}, keep=2)
    assert checkpoint.steps(two) == [2, 3, 8, 9]
    assert checkpoint.load_latest(two, lambda _: None)["step"] == 3


def test_pruning_reads_no_checkpoint_again_that_this_process_wrote(two, monkeypatch):
    read = []
    describe = checkpoint._describe
    monkeypatch.setattr(
        checkpoint, "_describe", lambda p: read.append(p.parent.name) or describe(p)
    )
    checkpoint.save(two, 3, {"step": 3}, keep=2)
    assert read == [".writing-step-00000003"]
    assert checkpoint.steps(two) == [2, 3]


def test_stray_files_and_folders_change_nothing(two):
    for name in ("step-5", "step-abc", "step-", "step-00000003", "refused-step-00000009"):
        (two / name).mkdir()
    (two / "step-00000007").write_text("a file")
    (two / "step-٠٠٠٠٠٠٠٤").mkdir()  # digits, but not those that we write
    assert checkpoint.load_latest(two, lambda _: None)["step"] == 2
    for step in (6, 7):
        checkpoint.save(two, step, {"step": step}, keep=2)
    assert checkpoint.load_latest(two)["step"] == 7
    assert checkpoint.steps(two) == [6, 7]
    assert (two / "step-5").is_dir()
    assert (two / "step-abc").is_dir()


# --- writing --------------------------------------------------------------------------------------
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noted_rename(old, new):
        events.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    checkpoint.save(tmp_path / "checkpoints", 1, {"step": 1}, keep=2)
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert set(before) == {"state.pt", "manifest.json", ".writing-step-00000001"}
    assert before[-1] == ".writing-step-00000001"
    assert after == ["checkpoints"]


@contextlib.contextmanager
def _largest_file(size):
    """Inside, the operating system refuses to let a file grow beyond `size` bytes."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@pytest.mark.parametrize("room", [0, 100, 50_000])
def test_a_write_that_the_system_refuses_is_an_os_error(two, room):
    state = {"step": 3, "weights": torch.zeros(100_000)}
    with _largest_file(room), pytest.raises(OSError, match="step 3 could not be written") as caught:
        checkpoint.save(two, 3, state, keep=1)
    assert caught.value.errno == errno.EFBIG
    assert sorted(p.name for p in two.iterdir()) == ["step-00000001", "step-00000002"]
    assert checkpoint.load_latest(two)["step"] == 2


def test_a_full_disk_ends_in_one_line_and_the_run_can_continue(
    command, tmp_path, monkeypatch, capsys
):
    save = torch.save

    def full(state, file):
        if state["step"] == 4:
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    assert main(command(steps=6, checkpoint_every=2, warmup_steps=1)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "No space left on device" in error
    folder = tmp_path / "runs" / "demo"
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-00000002"]
    monkeypatch.undo()
    assert main(["train", "--resume", str(folder)]) == 0
    assert "Continuing after step 2." in capsys.readouterr().out


def test_what_a_kill_left_half_written_is_removed(two):
    left = two / ".writing-step-00000009"
    left.mkdir()
    (left / "state.pt").write_text("half")
    checkpoint.save(two, 3, {"step": 3}, keep=2)
    assert not left.exists()


# --- the log and the configuration ----------------------------------------------------------------
_GARBAGE = [b'{"kind": "train", "step": 3, "lo', b"\x00\xff\xfe\x80binary", b"[1, 2]", b"{}", b"7",
            b'{"kind": "train", "step": "3", "loss": 1, "seconds": 1}', b"[" * 100_000]  # fmt: skip


def test_lines_of_a_log_that_are_no_records_are_skipped_with_one_warning(tmp_path, capsys):
    good = [{"kind": "train", "step": s, "loss": 1.5, "seconds": 0.1} for s in (1, 2)]
    first, last = (json.dumps(r).encode() for r in good)
    (tmp_path / "log.jsonl").write_bytes(b"\n".join([first, *_GARBAGE, last, _GARBAGE[0]]))
    assert runlog.read(tmp_path) == good
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(tmp_path / "log.jsonl") in error
    assert "line 2, 3, 4" in error


def test_a_run_with_a_damaged_log_continues(tiny, cache, tmp_path, stop_after, capsys):
    folder = tmp_path / "run"
    with stop_after(2):
        run.train(tiny.override({"steps": 4}), folder, cache, picture=False)
    with open(folder / "log.jsonl", "ab") as file:
        file.write(b"\x00\xff\n" + _GARBAGE[0])
    capsys.readouterr()
    run.train(run.continued(folder, {}), folder, cache, resume=True)
    assert capsys.readouterr().err.count("log.jsonl") == 1
    assert [r["step"] for r in runlog.read(folder) if r["kind"] == "train"] == [1, 2, 3, 4]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"config": 1'])
def test_a_damaged_configuration_is_named(tmp_path, content, capsys):
    (tmp_path / "run.json").write_bytes(content)
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "run.json" in capsys.readouterr().err
