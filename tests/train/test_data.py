import dataclasses

import pytest
import torch

from sonicmoe.train import corpus as corpora
from sonicmoe.train import text
from sonicmoe.train.batches import Batches
from sonicmoe.train.text import Document


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


def test_the_cache_is_used_and_changes_with_the_text(tiny, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"Document {i}. " * 60)
    config = tiny.override({"data": [str(folder)]})
    said = []
    first = corpora.prepare(config, tmp_path / "cache", said.append)
    second = corpora.prepare(config, tmp_path / "cache", said.append)
    assert second.key == first.key
    assert "cached" in said[-1]
    (folder / "new.txt").write_text("Another document. " * 60)
    assert corpora.prepare(config, tmp_path / "cache", said.append).key != first.key
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


def test_docstrings_are_found():
    source = '# c\n"""Module."""\n\nclass A:\n    """Of A.\n\n    More."""\n\n    def f(self):\n'
    source += "        r'''Of f.'''\n        x = '''not one'''\n"
    assert text.docstrings(source) == "Module.\n\nOf A.\n\nMore.\n\nOf f."


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
