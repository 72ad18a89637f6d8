"""Turn documents into token files: deduplicate, split by document, train a BPE, encode, cache.

A corpus is a folder: tokenizer.json, train.tokens and validation.tokens (int32), and corpus.json
(what was found, and the size and SHA-256 of every file). It is written to a temporary folder and
renamed. Every load verifies the checksums, at about 1 GB/s; a damaged corpus is built again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sonicmoe.plugins import bad_argument, check_writable

from . import text
from .config import TrainConfig

END_OF_TEXT = "<|endoftext|>"
_FORMAT = 3
_SMALLEST_VOCABULARY = 257
_SAMPLE_BYTES = 32 * 2**20  # the tokenizer's training sample; more text hardly changes its merges
_DUPLICATE = 100  # characters: shorter paragraphs, such as headings, may repeat


class TooLittleText(ValueError):
    """The sources hold less text than the run needs."""


@dataclass(frozen=True, slots=True)
class Corpus:
    folder: Path
    found: dict[str, Any]  # counts of bytes, documents and tokens, from corpus.json

    @property
    def key(self) -> str:
        return self.folder.name

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    def tokens(self, split: str) -> torch.Tensor:
        """(n,) int32, mapped from the file."""
        size = self.found[split]["tokens"]
        path = str(self.folder / f"{split}.tokens")
        return torch.from_file(path, shared=False, size=size, dtype=torch.int32)

    def describe(self) -> str:
        train, held = self.found["train"], self.found["validation"]
        kinds = self.found["kinds"].items()
        lines = [f"  {size / 1e6:7.2f} MB  {n:6d} documents  {kind}" for kind, (n, size) in kinds]
        lines.append(
            f"  duplicates left out: {self.found['duplicate_bytes'] / 1e6:.2f} MB; training "
            f"{train['tokens'] / 1e6:.2f}M tokens of {train['documents']} documents, validation "
            f"{held['tokens'] / 1e6:.3f}M of {held['documents']}; "
            f"{self.found['bytes_per_token']:.2f} bytes per token"
        )
        if skipped := self.found["not_text"]:
            lines.append(f"  not UTF-8 text, left out: {len(skipped)} files, first {skipped[0]!r}")
        return "\n".join(lines)


def check(config: TrainConfig) -> None:
    """Check sources and vocabulary before any work."""
    for source in config.data:
        text.check(source)
    size = config.model.vocab_size
    if size < _SMALLEST_VOCABULARY:
        least = f"at least {_SMALLEST_VOCABULARY}: the bytes and an end of text"
        raise bad_argument("vocab_size", least, size, "1024 suits small models.")


def prepare(
    config: TrainConfig,
    cache: Path,
    say: Callable[[str], None] = print,
    key: str | None = None,
    tokenizer: Path | None = None,
) -> Corpus:
    """The corpus of this configuration, from the cache if a sound one is there.

    `key` requires exactly the corpus of an earlier run. `tokenizer` is a tokenizer.json to encode
    the text with, by default that of `config.init_from`; without both, one is trained.
    """
    if tokenizer is None and config.init_from:
        tokenizer = Path(config.init_from) / "tokenizer.json"
    if tokenizer and not tokenizer.is_file():
        expected, remedy = "the tokenizer.json of a run", "Restore the file."
        raise bad_argument("tokenizer", expected, str(tokenizer), remedy)
    wanted = _key(config, tokenizer)
    folder = cache / (key or wanted)
    corpus, _ = _load(folder)
    if corpus is None:
        with _locked(folder, say):
            corpus, fault = _load(folder)  # another process may have built it meanwhile
            if corpus is None:
                _check_can_build(key, wanted, cache, fault)
                if fault:
                    say(f"Warning: the cached text in {folder} is damaged ({fault}): rebuilding it")
                say(f"Text from {', '.join(config.data)}, up to {config.data_megabytes:g} MB …")
                corpus = _build(config, folder, tokenizer)
        say(corpus.describe())
    else:
        say(f"Text (cached in {folder}):\n{corpus.describe()}")
    _check_enough(config, corpus)
    return corpus


def _check_can_build(key: str | None, wanted: str, cache: Path, fault: str | None) -> None:
    """Raise if a resumed run would get another corpus than the one it began with."""
    if key and key != wanted:
        found = f"a damaged one ({fault})" if fault else "none"
        got = f"{found}, and its text has changed or is gone"
        remedy = "Start a new run, restore the text, or point --cache at the folder that holds it."
        raise bad_argument("data", f"the corpus {key} of the run in {cache}", got, remedy)


def _load(folder: Path) -> tuple[Corpus | None, str | None]:
    """The corpus in `folder`, or what is damaged in it; neither if there is no such folder."""
    if not folder.exists():
        return None, None
    try:
        stored = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        found, files = stored["found"], stored["files"]
        if stored["sha256"] != _sha256_of(found, files):
            return None, "corpus.json does not have its checksum"
        for name, expected in files.items():
            if _size_and_sha256(folder / name) != expected:
                return None, f"{name} does not have its size and checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"{type(error).__name__}: {error}"
    return Corpus(folder, found), None


def _size_and_sha256(path: Path) -> list[Any]:
    with open(path, "rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _sha256_of(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


@contextlib.contextmanager
def _locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Let one process at a time build the corpus in `folder`."""
    check_writable("--cache", folder.parent)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.parent / f".lock-{folder.name}"
    with contextlib.ExitStack() as failed, open(lock, "w") as file:
        failed.callback(lock.unlink, missing_ok=True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another process that prepares the same text …")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a network file system without locks: the text may be prepared twice
        yield
        failed.pop_all()  # another process may wait for this file


def unique(documents: Iterable[text.Document]) -> Iterator[tuple[text.Document, int]]:
    """Documents without paragraphs seen earlier, and the bytes left out of each."""
    seen: set[bytes] = set()
    for document in documents:
        kept, dropped = [], 0
        for paragraph in document.text.split("\n\n"):
            words = " ".join(paragraph.split())
            if len(words) >= _DUPLICATE:
                mark = _digest(words)
                if mark in seen:
                    dropped += len(paragraph)
                    continue
                seen.add(mark)
            kept.append(paragraph)
        yield text.Document(document.kind, document.name, "\n\n".join(kept).strip()), dropped


def held_out(document: text.Document, fraction: float) -> bool:
    """Whether a document is for validation; depends on its text only."""
    return int.from_bytes(_digest(document.text), "big") < fraction * 2**64


def _fill(splits: dict[str, list[str]]) -> None:
    """Move documents to a split with too little, as chance leaves it with few documents.

    Validation gets 4096 characters or a fifth of the text, training at least one document.
    """
    train, held = splits["train"], splits["validation"]
    least = min(4096, sum(map(len, train + held)) // 5)
    while sum(map(len, held)) < least and len(train) > 1:
        held.append(min(train, key=_digest))
        train.remove(held[-1])
    if not train and len(held) > 1:
        train.append(held.pop())


def _build(config: TrainConfig, folder: Path, given: Path | None) -> Corpus:
    budget = config.data_megabytes * 1e6
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    kinds: dict[str, list[int]] = {}
    not_text: list[str] = []
    taken = duplicate = 0
    for document, dropped in unique(text.documents(config.data, config.include_code, not_text)):
        duplicate += dropped
        size = len(document.text.encode())
        if size < 200:
            continue
        name = "validation" if held_out(document, config.validation_fraction) else "train"
        splits[name].append(document.text)
        tally = kinds.setdefault(document.kind, [0, 0])
        tally[0] += 1
        tally[1] += size
        taken += size
        if taken >= budget:
            break
    _fill(splits)
    for name, documents in splits.items():
        if not documents:
            raise TooLittleText(
                f"data: expected several documents, got {taken / 1e6:.3f} MB and nothing for "
                f"{name}. Pass more text with --data, or the file itself, which is then split."
            )

    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        if given:
            tokenizer = read_tokenizer(given)
            shutil.copyfile(given, work / "tokenizer.json")
        else:
            tokenizer = _train_tokenizer(splits["train"], config.model.vocab_size)
            tokenizer.save(str(work / "tokenizer.json"))
        found: dict[str, Any] = {"kinds": kinds, "duplicate_bytes": duplicate}
        found["not_text"] = not_text
        for name, documents in splits.items():
            tokens = _encode(tokenizer, documents, work / f"{name}.tokens")
            found[name] = {"tokens": tokens, "documents": len(documents)}
        found["bytes_per_token"] = taken / sum(found[name]["tokens"] for name in splits)
        files = {path.name: _size_and_sha256(path) for path in sorted(work.iterdir())}
        stored = {"found": found, "files": files, "sha256": _sha256_of(found, files)}
        (work / "corpus.json").write_text(json.dumps(stored, indent=1), encoding="utf-8")
        _rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Corpus(folder, found)


def _rename(work: Path, folder: Path) -> None:
    """Rename `work` to `folder`, which may hold a damaged corpus."""
    try:
        os.rename(work, folder)
    except OSError:
        if _load(folder)[0]:
            return  # without locks, another process may have been faster
        damaged = work.with_name(f"{work.name}-damaged")
        os.rename(folder, damaged)
        os.rename(work, folder)
        shutil.rmtree(damaged, ignore_errors=True)


def _train_tokenizer(documents: list[str], vocab_size: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Evenly spread over the documents, so that the sample is representative.
    stride = max(1, round(sum(map(len, documents)) / _SAMPLE_BYTES))
    tokenizer.train_from_iterator(documents[::stride], trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of a tokenizer.json; a ValueError if the file is missing or damaged."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        expected, got = "the tokenizer.json of a run", f"{path} ({error})"
        raise bad_argument("tokenizer", expected, got, "Restore the file.") from None


def _encode(tokenizer, documents: list[str], path: Path, at_once: int = 512) -> int:
    """Write all tokens of the documents, an end-of-text token after each; return how many."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    count = 0
    with open(path, "wb") as file:
        for i in range(0, len(documents), at_once):
            for encoding in tokenizer.encode_batch_fast(documents[i : i + at_once]):
                ids = array("i", encoding.ids)
                ids.append(end)
                ids.tofile(file)
                count += len(ids)
    return count


def _check_enough(config: TrainConfig, corpus: Corpus) -> None:
    for split, windows in (("train", config.batch), ("validation", 2)):
        have = corpus.found[split]["tokens"]
        least = windows * config.model.context + 1
        if have < least:
            raise TooLittleText(
                f"data: expected at least {least} tokens for {split} ({windows} windows of "
                f"{config.model.context}), got {have}. Pass more text with --data, or lower the "
                "context or the batch (--preset demo has small ones)."
            )


def _key(config: TrainConfig, tokenizer: Path | None) -> str:
    """A name for the corpus: it changes when the text, the split or the vocabulary would."""
    c, sources = config, [_fingerprint(s) for s in config.data]
    what = [_FORMAT, sources, c.include_code, c.data_megabytes, c.validation_fraction]
    what.append(c.model.vocab_size)
    if tokenizer:
        what.append(hashlib.sha256(tokenizer.read_bytes()).hexdigest())
    return _digest(json.dumps(what)).hex()


def _fingerprint(source: str) -> Any:
    if source == "local":
        packages = [sorted(p.name for p in folder.iterdir()) for folder in text.site_packages()]
        return ["local", sys.prefix, sys.version, packages]
    path = Path(source).expanduser()
    if not path.exists():
        return source
    entries = [path] if path.is_file() else list(text.walk(path))
    return [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in entries]


def _digest(value: str) -> bytes:
    return hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest()
