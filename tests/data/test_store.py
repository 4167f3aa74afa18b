"""Shard folders: what was written is what is read, without a copy, and whatever is wrong is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.data import manifest as manifests
from headway.data.encode import Encoded
from headway.data.manifest import (
    FileHash,
    Manifest,
    SourceFile,
    TemplateRecord,
    TokenizerRecord,
    Totals,
    fingerprint,
)
from headway.data.shards import ShardBuilder, write_bytes
from headway.data.store import DocumentStore, ShardFolder, open_store, part_path

Documents = list[tuple[list[int], list[int]]]


def write_folder(folder: Path, shards: list[Documents], dtype: Any = np.uint16, vocab_size: int = 60_000) -> Path:
    """A folder of shards holding (tokens, mask) documents; document d of a shard comes from line 10 * d + 1."""
    folder.mkdir(parents=True)
    records = []
    for number, documents in enumerate(shards):
        builder = ShardBuilder(f"shard-{number:05d}", dtype)
        for d, (tokens, mask) in enumerate(documents):
            builder.add(Encoded(np.array(tokens, dtype=dtype), np.array(mask, dtype=np.uint8)), number % 2, 10 * d + 1)
        records.append(builder.write(folder)[0])
    rejected = write_bytes(folder / manifests.REJECTED, [])
    manifest = Manifest(
        fingerprint=fingerprint(records, vocab_size),
        totals=Totals(
            documents=sum(s.documents for s in records),
            tokens=sum(s.tokens for s in records),
            trained=sum(s.trained for s in records),
        ),
        notes={"boundary_cut": 2},
        tokenizer=TokenizerRecord("tok", "aa", vocab_size, 2),
        template=TemplateRecord("tokenizer", "bb", "prefix"),
        options={"labels": "all"},
        files=[SourceFile(f"file{i}", 10, "cc", "messages", Totals()) for i in range(2)],
        shards=records,
        rejected=rejected,
    )
    (folder / manifests.NAME).write_bytes(manifests.encode(manifest))
    return folder


TWO: list[Documents] = [[([5, 6, 7], [0, 1, 1]), ([8], [0])], [([9, 10], [0, 1])]]


@settings(max_examples=30, deadline=None)
@given(
    shards=st.lists(
        st.lists(st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 1)), max_size=9), max_size=5), max_size=4
    ),
    wide=st.booleans(),
)
def test_what_is_read_is_what_was_written(tmp_path_factory: Any, shards: list[Any], wide: bool) -> None:
    shards = [[([t for t, _ in d], [0, *[m for _, m in d[1:]]][: len(d)]) for d in s] for s in shards]
    folder = write_folder(tmp_path_factory.mktemp("s") / "shards", shards, np.uint32 if wide else np.uint16)
    store = ShardFolder.open(folder)
    documents = [d for s in shards for d in s]
    assert isinstance(store, DocumentStore)
    assert store.lengths.tolist() == [len(t) for t, _ in documents] and store.lengths.dtype == np.int64
    assert store.trained.tolist() == [sum(m) for _, m in documents] and store.trained.dtype == np.int64
    for d, (tokens, mask) in enumerate(documents):
        assert store.tokens(d).tolist() == tokens and store.mask(d).tolist() == mask
        for start in range(len(tokens) + 1):
            assert store.tokens(d, start).tolist() == tokens[start:]
            assert store.mask(d, 0, start).tolist() == mask[:start]
    origins = [(f"file{n % 2}", 10 * d + 1) for n, s in enumerate(shards) for d in range(len(s))]
    assert [store.source(d) for d in range(len(store))] == origins
    assert store.max_token == max((t for tokens, _ in documents for t in tokens), default=-1)
    store.verify()


def test_slices_are_views_of_the_file(tmp_path: Path) -> None:
    store = ShardFolder.open(write_folder(tmp_path / "s", TWO))
    view = store.tokens(0, 1)
    assert view.base is not None and not view.flags.writeable and view.dtype == np.uint16


def test_a_slice_never_reaches_into_the_next_document(tmp_path: Path) -> None:
    store = ShardFolder.open(write_folder(tmp_path / "s", TWO))
    for start, stop in [(0, 4), (2, 1), (-1, 2), (4, None)]:
        with pytest.raises(IndexError, match="document 0 has 3 tokens"):
            store.tokens(0, start, stop)


def test_the_files_are_little_endian_and_memory_mappable(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "s", TWO)
    for part, dtype in {
        "tokens": "<u2",
        "mask": "|u1",
        "offsets": "<i8",
        "trained": "<i8",
        "lines": "<i8",
        "files": "<i4",
    }.items():
        array = np.load(part_path(folder, "shard-00000", part), mmap_mode="r")
        assert array.dtype.str == dtype and array.ndim == 1


def test_the_fingerprint_follows_tokens_masks_and_boundaries(tmp_path: Path) -> None:
    def made(name: str, documents: Documents, vocab_size: int = 60_000) -> str:
        return ShardFolder.open(write_folder(tmp_path / name, [documents], vocab_size=vocab_size)).fingerprint

    base = made("a", [([5, 6], [0, 1]), ([7, 8], [0, 1])])
    assert base == made("same", [([5, 6], [0, 1]), ([7, 8], [0, 1])])
    others = [
        made("token", [([5, 6], [0, 1]), ([7, 9], [0, 1])]),
        made("mask", [([5, 6], [0, 1]), ([7, 8], [0, 0])]),
        made("cut", [([5], [0]), ([6, 7, 8], [1, 0, 1])]),
        made("vocabulary", [([5, 6], [0, 1]), ([7, 8], [0, 1])], 61_000),
    ]
    assert len({base, *others}) == 5


def _truncate(folder: Path) -> None:
    path = part_path(folder, "shard-00001", "mask")
    path.write_bytes(path.read_bytes()[:-1])


def _other_version(folder: Path) -> None:
    content = json.loads((folder / manifests.NAME).read_text())
    (folder / manifests.NAME).write_text(json.dumps({**content, "version": 99}))


def _wrong_counts(folder: Path) -> None:
    content = json.loads((folder / manifests.NAME).read_text())
    content["shards"][0]["documents"] = 5
    (folder / manifests.NAME).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (shutil.rmtree, "no such folder; make it with `headway data prepare"),
        (lambda f: (f / manifests.NAME).unlink(), "holds no manifest.json"),
        (lambda f: (f / manifests.NAME).write_text("{"), "not valid JSON"),
        (lambda f: (f / manifests.NAME).write_text('{"kind": "x"}'), "not a manifest of headway-shards"),
        (_other_version, "written as version 99, this Headway reads version 1"),
        (lambda f: (f / manifests.NAME).write_text('{"kind": "headway-shards", "version": 1}'), "damaged"),
        (lambda f: part_path(f, "shard-00001", "tokens").unlink(), "shard-00001.tokens.npy: missing"),
        (_truncate, "shard-00001.mask.npy: 129 bytes, the manifest says 130"),
        (_wrong_counts, "does not fit 5 documents"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path, harm: Any, message: str) -> None:
    folder = write_folder(tmp_path / "s", TWO)
    harm(folder)
    with pytest.raises(UserError, match=message):
        open_store(folder)


def test_verify_finds_a_flipped_bit_that_opening_cannot(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "s", TWO)
    path = part_path(folder, "shard-00000", "tokens")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"shard-00000.tokens.npy: its content is not what the manifest says"):
        ShardFolder.open(folder).verify()


def test_an_older_or_newer_field_does_not_make_a_folder_unreadable(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "s", TWO)
    content = json.loads((folder / manifests.NAME).read_text())
    (folder / manifests.NAME).write_text(json.dumps({**content, "added_later": 1}))
    assert len(ShardFolder.open(folder)) == 3


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headway.data.shards.os.fsync", fail)
    with pytest.raises(OSError):
        write_bytes(tmp_path / "x", [b"data"])
    assert list(tmp_path.iterdir()) == []


def test_counts_are_of_documents_read_back(tmp_path: Path) -> None:
    hashes = FileHash(1, "x")
    assert hashes.size == 1 and Totals(1, 2, 3, 4, 5) + Totals(1, 1, 1, 1, 1) == Totals(2, 3, 4, 5, 6)
