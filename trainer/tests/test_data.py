import dataclasses
import gzip
import json
import shutil
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sonicmoe.cli import main
from sonicmoe_trainer import corpus as corpora
from sonicmoe_trainer import run, text
from sonicmoe_trainer.batches import Batches
from sonicmoe_trainer.text import Document


def test_no_document_and_no_window_is_in_both_splits(tiny, cache):
    from tokenizers import Tokenizer

    corpus = corpora.prepare(tiny, cache)
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path))
    end = tokenizer.token_to_id(corpora.END_OF_TEXT)
    found = {}
    for split in ("train", "validation"):
        tokens = corpus.tokens(split).tolist()
        texts = tokenizer.decode(tokens, skip_special_tokens=False).split(corpora.END_OF_TEXT)
        found[split] = {t for t in texts if t}
        assert tokens[-1] == end
        assert len(found[split]) == corpus.found[split]["documents"]
    assert not found["train"] & found["validation"]
    originals = {d.text for d in text.documents(tiny.data, False)}
    assert found["train"] | found["validation"] == originals


def test_paragraphs_that_came_before_are_left_out():
    notice = "permission is hereby granted " * 8
    first = Document("k", "a", f"{notice}\n\nfirst")
    second = Document("k", "b", f"second\n\n{notice.replace(' ', '  ')}")
    (kept_first, none), (kept_second, dropped) = corpora.unique([first, second])
    assert (kept_first.text, none) == (first.text.strip(), 0)
    assert kept_second.text == "second"
    assert dropped > 200


def test_a_document_is_held_out_by_its_text_alone():
    documents = [Document("k", str(i), f"text number {i}") for i in range(4000)]
    share = sum(corpora.held_out(d, 0.05) for d in documents) / len(documents)
    assert 0.035 < share < 0.065
    renamed = [dataclasses.replace(d, name="x", kind="y") for d in documents]
    assert [corpora.held_out(d, 0.05) for d in documents] == [
        corpora.held_out(d, 0.05) for d in renamed
    ]


@pytest.fixture
def small(tiny, tmp_path):
    """A configuration on forty short documents in tmp_path/text."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"Document {i}. " * 60)
    return tiny.override({"data": [str(folder)]})


def test_the_cache_is_used_and_changes_with_the_text(small, tmp_path):
    config, folder = small, tmp_path / "text"
    said = []
    first = corpora.prepare(config, tmp_path / "cache", said.append)
    second = corpora.prepare(config, tmp_path / "cache", said.append)
    assert second.key == first.key
    assert "cached" in said[-1]
    (folder / "new.txt").write_text("Another document. " * 60)
    assert corpora.prepare(config, tmp_path / "cache", said.append).key != first.key
    assert not list((tmp_path / "cache").glob(".making-*"))


def _flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _change_a_count(path):
    stored = json.loads(path.read_text())
    stored["found"]["train"]["tokens"] -= 1
    path.write_text(json.dumps(stored))


DAMAGE = {
    "a byte of the training tokens": ("train.tokens", _flip_a_byte),
    "validation tokens cut short": ("validation.tokens", lambda p: p.write_bytes(b"\0" * 64)),
    "no tokenizer": ("tokenizer.json", lambda p: p.unlink()),
    "a byte of the tokenizer": ("tokenizer.json", _flip_a_byte),
    "no corpus.json": ("corpus.json", lambda p: p.unlink()),
    "corpus.json cut short": ("corpus.json", lambda p: p.write_text("{")),
    "corpus.json of something else": ("corpus.json", lambda p: p.write_text("[]")),
    "corpus.json with another count": ("corpus.json", _change_a_count),
    "corpus.json that is not text": ("corpus.json", lambda p: p.write_bytes(b"\xff\0")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_rebuilt_with_one_warning(small, tmp_path, damage):
    first = corpora.prepare(small, tmp_path / "cache", str)
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    name, spoil = DAMAGE[damage]
    spoil(first.folder / name)
    said = []
    second = corpora.prepare(small, tmp_path / "cache", said.append)
    assert second == first
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == before
    warned = [line for line in said if line.startswith("Warning")]
    assert len(warned) == 1 and str(first.folder) in warned[0] and "\n" not in warned[0]
    assert corpora.prepare(small, tmp_path / "cache", said.append) == first
    assert "cached" in said[-1]
    assert not list((tmp_path / "cache").glob(".making-*"))


def test_a_damaged_cache_without_its_text_is_an_error(small, tmp_path):
    first = corpora.prepare(small, tmp_path / "cache", str)
    shutil.rmtree(tmp_path / "text")
    assert corpora.prepare(small, tmp_path / "cache", str, first.key) == first
    _flip_a_byte(first.folder / "train.tokens")
    with pytest.raises(
        ValueError, match=r"^data: expected .* damaged .*train\.tokens.* gone"
    ) as no:
        corpora.prepare(small, tmp_path / "cache", str, first.key)
    assert "\n" not in str(no.value)


def test_a_run_gets_the_corpus_it_began_with_or_none(small, tmp_path):
    first = corpora.prepare(small, tmp_path / "cache", str)
    (tmp_path / "text" / "new.txt").write_text("Another document. " * 60)
    assert corpora.prepare(small, tmp_path / "cache", str, first.key) == first
    shutil.rmtree(first.folder)
    with pytest.raises(ValueError, match=rf"data: expected the corpus {first.key} .* got none"):
        corpora.prepare(small, tmp_path / "cache", str, first.key)
    assert not first.folder.exists()


def test_a_checkpoint_is_not_continued_on_another_corpus(tiny, trained, cache, tmp_path):
    folder = shutil.copytree(trained[0], tmp_path / "run")
    other = corpora.prepare(tiny.override({"data_megabytes": 0.1}), cache, str)
    stored = json.loads((folder / "run.json").read_text())
    assert stored["corpus"] != other.key
    (folder / "run.json").write_text(json.dumps(stored | {"corpus": other.key}))
    with pytest.raises(ValueError, match=r"data: expected the corpus .* of the checkpoint"):
        run.train(tiny, folder, cache, resume=True)


def test_a_corpus_appears_by_one_rename(small, tmp_path, monkeypatch):
    encode, seen = corpora._encode, []

    def observed(tokenizer, documents, path):
        seen.append((path.parent.stat().st_ino, list((tmp_path / "cache").glob("[!.]*"))))
        return encode(tokenizer, documents, path)

    monkeypatch.setattr(corpora, "_encode", observed)
    corpus = corpora.prepare(small, tmp_path / "cache", str)
    assert seen == [(corpus.folder.stat().st_ino, [])] * 2


def test_an_interrupted_build_leaves_nothing_behind(small, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(corpora, "_encode", interrupt)
        corpora.prepare(small, tmp_path / "cache", str)
    assert all(path.name.startswith(".lock-") for path in (tmp_path / "cache").iterdir())
    corpora.prepare(small, tmp_path / "cache", str)


@pytest.mark.parametrize("damaged", [False, True], ids=["fresh", "damaged"])
def test_two_at_once_build_one_corpus(small, tmp_path, monkeypatch, damaged):
    cache = tmp_path / "cache"
    if damaged:
        _flip_a_byte(corpora.prepare(small, cache, str).folder / "train.tokens")
    build, builds, waiting = corpora._build, [], threading.Event()

    def slowly(config, folder, tokenizer):
        builds.append(folder)
        assert waiting.wait(10)
        return build(config, folder, tokenizer)

    def say(line):
        if line.startswith("Waiting"):
            waiting.set()

    monkeypatch.setattr(corpora, "_build", slowly)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: corpora.prepare(small, cache, say), range(2))
    assert first == second and builds == [first.folder]
    assert corpora._load(first.folder) == (first, None)


def test_two_at_once_without_locks(small, tmp_path, monkeypatch):
    """As on some network file systems: both build, one of the two is kept."""

    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(corpora.fcntl, "flock", no_locks)
    build, both = corpora._build, threading.Barrier(2, timeout=100)

    def together(*given):
        both.wait()
        return build(*given)

    monkeypatch.setattr(corpora, "_build", together)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda _: corpora.prepare(small, tmp_path / "cache", str), range(2)
        )
    assert first == second == corpora._load(first.folder)[0]
    assert not list((tmp_path / "cache").glob(".making-*"))


def test_too_little_text_is_said(tiny, tmp_path):
    (tmp_path / "short.txt").write_text("Hardly anything. " * 30)
    with pytest.raises(ValueError, match="more text"):
        corpora.prepare(tiny.override({"data": [str(tmp_path)]}), tmp_path / "cache")
    long = tiny.override({"context": 4096})
    with pytest.raises(ValueError, match="expected at least"):
        corpora.prepare(long.override({"batch": 64, "micro_batch": 64}), tmp_path / "cache")


def test_a_path_that_is_not_there_is_said(tiny, tmp_path):
    with pytest.raises(ValueError, match="data: expected"):
        corpora.prepare(tiny.override({"data": ["./nowhere.txt"]}), tmp_path / "cache")


def test_this_installation_carries_enough_text():
    size = 0
    for document in text.documents(["local"], include_code=False):
        size += len(document.text)
        if size > 1_000_000:
            return
    pytest.fail(f"only {size} characters found")


# --- files ----------------------------------------------------------------------------------------
def _paragraphs(count):
    return [f"Paragraph {i} of a longer text, with words enough to be kept." for i in range(count)]


def _cut_short(data):
    return data[:-20]


def _flipped(data):
    return (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0xFF]) + data[len(data) // 2 + 1 :]
    )


@pytest.mark.parametrize("damage", [_cut_short, _flipped, lambda data: data + b"more"])
@pytest.mark.parametrize("alone", [True, False], ids=["file", "folder"])
def test_a_damaged_gzip_is_one_line_that_names_the_file(tmp_path, capsys, damage, alone):
    path = tmp_path / "text" / "book.txt.gz"
    path.parent.mkdir()
    path.write_bytes(damage(gzip.compress("\n\n".join(_paragraphs(3000)).encode())))
    command = ["train", "--device", "cpu", "--data", str(path if alone else path.parent)]
    command += ["--runs", str(tmp_path / "runs"), "--cache", str(tmp_path / "cache")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"got {path}, which is damaged" in said
    assert not list((tmp_path / "cache").glob("[!.]*"))


@pytest.mark.parametrize("alone", [True, False], ids=["file", "folder"])
@pytest.mark.parametrize("end", ["\r\n", "\r"], ids=repr)
def test_line_ends_do_not_change_documents(tmp_path, end, alone):
    found = []
    for name, line_end in (("lf", "\n"), ("other", end)):
        path = tmp_path / name / "book.txt"
        path.parent.mkdir()
        content = "\n\n".join(f"{p}\nAnd a second line." for p in _paragraphs(1000))
        path.write_bytes(content.replace("\n", line_end).encode())
        found.append([d.text for d in text.files(path if alone else path.parent)])
    assert found[0] == found[1] and len(found[0]) == (20 if alone else 1)
    assert "\r" not in "".join(found[1])


def test_line_ends_at_the_end_of_a_piece(tmp_path, monkeypatch):
    content = "\n\n".join(_paragraphs(600))
    (tmp_path / "book.txt").write_bytes(content.replace("\n", "\r\n").encode())
    want = [d.text for d in text.files(tmp_path / "book.txt")]
    assert "\n\n".join(want) == content
    monkeypatch.setattr(text, "_PIECE", 7)
    assert [d.text for d in text.files(tmp_path / "book.txt")] == want


def test_line_ends_of_a_dataset(monkeypatch):
    class Library:
        def load_dataset(*_, **__):
            return [{"text": "One line.\r\n" * 30}]

    monkeypatch.setattr(text, "need", lambda *_: Library())
    assert [d.text for d in text.documents(["owner/name"], False)] == ["One line.\n" * 30]


@pytest.mark.parametrize("alone", [True, False], ids=["file", "folder"])
def test_a_text_of_more_than_64_mib_is_read_to_its_end(tmp_path, alone):
    content = "\n\n".join([f"{'word ' * 200}last."] * (66 * 2**10))
    path = tmp_path / "long.txt"
    path.write_text(content)
    assert path.stat().st_size > 64 * 2**20
    found = [d.text for d in text.files(path if alone else tmp_path)]
    assert len(found) > 1000
    assert "\n\n".join(found) == content


def test_text_without_paragraphs_is_cut_at_lines_or_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_SECTIONS", 1)  # more characters than that: a long file
    monkeypatch.setattr(text, "_SECTION", 500)
    monkeypatch.setattr(text, "_LONGEST_SECTION", 1000)
    lines = "\n".join(_paragraphs(90))
    (tmp_path / "lines.txt").write_text(lines)
    found = [d.text for d in text.files(tmp_path / "lines.txt")]
    assert max(map(len, found)) < 1000 and "\n".join(found) == lines
    (tmp_path / "line.txt").write_text("word " * 1000)
    found = [d.text for d in text.files(tmp_path / "line.txt")]
    assert max(map(len, found)) == 1000 and "".join(found) == "word " * 1000


@pytest.mark.parametrize("alone", [True, False], ids=["file", "folder"])
def test_a_decompression_bomb_is_refused_in_bounded_memory(tmp_path, monkeypatch, alone):
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(48):
            file.write(b"word " * 2**18)
    monkeypatch.setattr(text, "LARGEST_UNPACKED", 40 * 2**20, raising=False)
    monkeypatch.setattr(text, "_LONGEST_DOCUMENT", 4 * 2**20, raising=False)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"at most 41,943,040 bytes, got {path}.*gunzip"):
            for _ in text.files(path if alone else tmp_path):
                pass
        assert tracemalloc.get_traced_memory()[1] < 24 * 2**20
    finally:
        tracemalloc.stop()


def test_files_of_a_folder_that_are_not_utf8_are_counted(small, tmp_path):
    for name, data in (("latin.txt", "déjà vu ".encode("latin-1") * 50), ("nul.md", b"\0" * 500)):
        (tmp_path / "text" / name).write_bytes(data)
    said = []
    corpora.prepare(small, tmp_path / "cache", said.append)
    assert f"not UTF-8 text, left out: 2 files, first '{tmp_path}/text/latin.txt'" in said[-1]
    with pytest.raises(ValueError, match=r"expected UTF-8 text, got .*latin\.txt"):
        list(text.files(tmp_path / "text" / "latin.txt"))


def test_a_file_that_may_not_be_read_is_said(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "closed.txt").write_text("word " * 100)
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ValueError, match=r"closed\.txt \(Permission denied\)"):
        list(text.files(tmp_path))


def test_docstrings_are_found():
    source = '# c\n"""Module."""\n\nclass A:\n    """Of A.\n\n    More."""\n\n    def f(self):\n'
    source += "        r'''Of f.'''\n        x = '''not one'''\n"
    assert text.docstrings(source) == "Module.\n\nOf A.\n\nMore.\n\nOf f."


# --- batches --------------------------------------------------------------------------------------
def test_batches_depend_on_seed_and_step_alone():
    tokens = torch.arange(8 * 10 + 1, dtype=torch.int32)
    batches = Batches(tokens, context=8, batch=4, seed=1)
    x, y = batches.step(3)
    again, _ = Batches(tokens, context=8, batch=4, seed=1).step(3)
    other, _ = Batches(tokens, context=8, batch=4, seed=2).step(3)
    assert torch.equal(x, again)
    assert not torch.equal(x, other)
    assert torch.equal(y, x + 1)
    ranks = torch.cat([batches.step(3, rank, 2)[0] for rank in range(2)])
    assert sorted(ranks[:, 0].tolist()) == sorted(x[:, 0].tolist())


def test_an_epoch_visits_every_window_once():
    tokens = torch.arange(8 * 12 + 1, dtype=torch.int32)
    batches = Batches(tokens, context=8, batch=4, seed=0)
    starts = torch.cat([batches.step(s)[0][:, 0] for s in range(3)])
    assert sorted(starts.tolist()) == list(range(0, 96, 8))


def test_every_epoch_has_an_order_of_its_own():
    tokens = torch.arange(8 * 12 + 1, dtype=torch.int32)
    batches = Batches(tokens, context=8, batch=12, seed=0)
    orders = {tuple(batches.step(epoch)[0][:, 0].tolist()) for epoch in range(5)}
    assert len(orders) == 5


def test_validation_windows_are_spread_over_the_whole_text():
    batches = Batches(torch.arange(8 * 12 + 1, dtype=torch.int32), context=8, batch=4, seed=0)
    starts = torch.cat([x[:, 0] for x, _ in batches.spread(4, at_once=3)])
    assert starts.tolist() == [0, 24, 48, 72]
    everything = torch.cat([x[:, 0] for x, _ in batches.spread(100, at_once=5)])
    assert everything.tolist() == list(range(0, 96, 8))
