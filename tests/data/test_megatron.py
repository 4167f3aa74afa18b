from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from data.batch_check import check_batch
from headway.account.errors import UserError
from headway.data.global_batch import Position
from headway.data.megatron import MegatronStore
from headway.data.store import DocumentStore, open_store
from headway.data.stream import Stream, StreamOptions
from headway.data.view import View, ViewOptions, Weighted
from headway.data.vocabulary import check_vocabulary

CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}
DOCUMENTS = [[[5, 6, 7]], [[8, 9], [10], [11, 12]], [[13]], [], [[14, 15]]]  # documents of sequences of ids


def write(
    folder: Path, documents: list[list[list[int]]] = DOCUMENTS, dtype: type = np.uint16, **header: object
) -> Path:
    """An indexed data set, field by field as Megatron's `_IndexWriter` and `IndexedDatasetBuilder` write it."""
    sequences = [np.array(sequence, dtype=dtype) for document in documents for sequence in document]
    sizes = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
    pointers = np.zeros(len(sizes), dtype=np.int64)
    np.cumsum(sizes[:-1] * np.dtype(dtype).itemsize, out=pointers[1:])
    bounds = np.cumsum([0] + [len(document) for document in documents]).astype(np.int64)
    prefix = folder / "set_text_document"
    with prefix.with_name(prefix.name + ".idx").open("wb") as idx:
        idx.write(header.get("magic", b"MMIDIDX\x00\x00"))  # type: ignore[arg-type]
        idx.write(struct.pack("<Q", header.get("version", 1)))
        idx.write(struct.pack("<B", header.get("code", CODES.get(dtype))))
        idx.write(struct.pack("<Q", len(sizes)))
        idx.write(struct.pack("<Q", len(bounds)))
        idx.write(sizes.tobytes(order="C"))
        idx.write((np.asarray(header.get("pointers", pointers), dtype=np.int64)).tobytes(order="C"))
        idx.write(np.asarray(header.get("bounds", bounds), dtype=np.int64).tobytes(order="C"))
    prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    return prefix


@pytest.mark.parametrize("dtype", CODES)
def test_reads_what_was_written(tmp_path: Path, dtype: type) -> None:
    store = open_store(write(tmp_path, dtype=dtype))
    assert isinstance(store, MegatronStore) and isinstance(store, DocumentStore)
    flat = [[token for sequence in document for token in sequence] for document in DOCUMENTS]
    assert [store.tokens(doc).tolist() for doc in range(len(flat))] == flat
    assert store.lengths.tolist() == [3, 5, 1, 0, 2] and store.lengths.dtype == np.int64
    assert store.trained.tolist() == [2, 4, 0, 0, 1]
    assert store.tokens(1, 1, 3).tolist() == [9, 10] and store.mask(1, 1, 3).tolist() == [1, 1]
    assert store.max_token == 15 and store.vocab_size == 2 ** (8 * np.dtype(dtype).itemsize)
    assert store.source(4) == (str(tmp_path / "set_text_document.bin"), 5)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_prefix_or_either_file_may_be_named(tmp_path: Path, suffix: str) -> None:
    prefix = write(tmp_path)
    assert len(open_store(prefix.with_name(prefix.name + suffix)).lengths) == 5


def test_trains_through_packs(tmp_path: Path) -> None:
    view = View([Weighted(open_store(write(tmp_path)))], ViewOptions(4, "split"))
    assert view.untrained.empty == 1 and view.overlong.affected == 1
    batch = Stream(view, StreamOptions(slots=6, sequences_per_step=9)).global_batch(Position())
    for micro in batch.micro_batches(0, 1):
        check_batch(micro, view)
    assert batch.trained_tokens == 2 + 3 + 1 and sorted(batch.documents.tolist()) == [0, 1, 4]


def test_a_slice_never_reaches_the_next_document(tmp_path: Path) -> None:
    store = MegatronStore.open(write(tmp_path))
    for read in (store.tokens, store.mask):
        with pytest.raises(IndexError, match="document 0 has 3 tokens"):
            read(0, 0, 4)


def test_no_documents_is_an_empty_store(tmp_path: Path) -> None:
    store = MegatronStore.open(write(tmp_path, []))
    assert len(store) == 0 and store.max_token == -1


def test_negative_ids_are_beyond_any_vocabulary(tmp_path: Path) -> None:
    store = MegatronStore.open(write(tmp_path, [[[1, 2]], [[3, -1]]], np.int32))
    with pytest.raises(UserError, match=r"document\.bin:2 \(data source 0\): token id 4294967295"):
        check_vocabulary(View([Weighted(store)], ViewOptions(4, "drop")), 50_000)
    check_vocabulary(View([Weighted(MegatronStore.open(write(tmp_path)))], ViewOptions(8, "drop")), 16)


def test_the_largest_id_is_found_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start of every rank read all tokens: minutes to hours of a large set."""
    prefix, kept = write(tmp_path, dtype=np.int32), tmp_path / "shards" / "largest_tokens.json"
    reads: list[None] = []
    largest = MegatronStore.max_token.func  # type: ignore[attr-defined]

    def counted(store: MegatronStore) -> int:
        reads.append(None)
        return int(largest(store))

    monkeypatch.setattr(MegatronStore, "max_token", property(counted))

    def check(vocabulary: int) -> int:
        view = View([Weighted(MegatronStore.open(prefix))], ViewOptions(8, "drop"))
        check_vocabulary(view, vocabulary, kept)
        return len(reads)

    assert [check(16), check(16), check(1000)] == [1, 1, 1]
    with pytest.raises(UserError, match="token id 15 is beyond"):
        check(15)
    kept.write_text("[]")
    assert [check(16), check(16)] == [2, 2]
    write(tmp_path, [[[1, 70_000]]], np.int32)
    with pytest.raises(UserError, match="token id 70000"):
        check(16)


def test_fingerprint_follows_content(tmp_path: Path) -> None:
    first = MegatronStore.open(write(tmp_path)).fingerprint
    assert MegatronStore.open(write(tmp_path)).fingerprint == first
    for documents in ([[[5, 6, 8]], *DOCUMENTS[1:]], [[[5, 6], [7]], *DOCUMENTS[1:]]):
        assert MegatronStore.open(write(tmp_path, documents)).fingerprint != first
    assert MegatronStore.open(write(tmp_path, dtype=np.int32)).fingerprint != first


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ({"magic": b"MMIDIDX\x00\x01"}, "not a Megatron index"),
        ({"version": 2}, "version 2"),
        ({"code": 7}, "token type 7"),
        ({"pointers": [0, 6, 10, 12, 16, 19]}, "offsets"),
        ({"pointers": [0, 6, 12, 10, 16, 18]}, "offsets"),
        ({"pointers": [-2, 6, 10, 12, 16, 18]}, "offsets"),
        ({"pointers": [0, 6, 10, 12, 16, 400]}, r"\.bin: 11 tokens where its index needs 202"),
        ({"bounds": [0, 1, 4, 5, 5, 7]}, "do not cover its 6 sequences"),
        ({"bounds": [0, 4, 1, 5, 5, 6]}, "do not cover"),
        ({"bounds": [1, 1, 4, 5, 5, 6]}, "do not cover"),
    ],
)
def test_a_wrong_index_is_named(tmp_path: Path, header: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        MegatronStore.open(write(tmp_path, **header))
    assert "set_text_document" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_cut_anywhere_is_named(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"set_text_document{suffix}"
    prefix = write(tmp_path)
    whole = file.read_bytes()
    for kept in range(len(whole)):
        file.write_bytes(whole[:kept])
        with pytest.raises(UserError, match=rf"set_text_document\{suffix}: "):
            MegatronStore.open(prefix)
    file.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        MegatronStore.open(prefix)
