"""Every container gives the same records with the same numbers, in chunks, whatever the chunk size."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.data import readers
from headway.data.chunks import records
from headway.data.formats import parse_record
from headway.data.readers import FileReader
from headway.data.sources import Source, expand
from headway.data.streams import Filled
from headway.data.turns import BadRecord

RECORDS = [{"text": t} for t in ["a", "b\n\u2028c", "é" * 50, "x" * 3000, "", '\u0085 \\ "', "🙂"]]
LINES = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in RECORDS).encode()


def read(path: Path, target: int = 1 << 20, fmt: str = "auto") -> tuple[list[tuple[int, Any]], FileReader]:
    (source,), _ = expand([path])
    reader = FileReader(source, 0, fmt=fmt, target=target)
    return [pair for chunk in reader.chunks() for pair in records(chunk)], reader


def write_as(folder: Path, kind: str, data: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in data).encode()
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_bytes(text)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(text[:700]) + gzip.compress(text[700:]))  # two members
    elif kind == "jsonl.zst":
        path.write_bytes(zstandard.compress(text[:700]) + zstandard.compress(text[700:]))  # two frames
    elif kind == "json":
        path.write_text(json.dumps(data, ensure_ascii=False))
    elif kind == "json.gz":
        path.write_bytes(gzip.compress(json.dumps(data, indent=2).encode()))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(data), path, row_group_size=3)
    else:
        table = pa.Table.from_pylist(data)
        opened = pa.ipc.new_stream if kind == "arrow" else pa.ipc.new_file
        path = folder / ("data.arrow" if kind == "arrow" else "file.arrow")
        with opened(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz", "parquet", "arrow", "arrow_file"]


@pytest.mark.parametrize("target", [1, 64, 5000, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_every_container_gives_the_same_records(tmp_path: Path, kind: str, target: int) -> None:
    path = write_as(tmp_path, kind, RECORDS)
    found, reader = read(path, target)
    assert found == [(i, r) for i, r in enumerate(RECORDS, start=1)]
    assert reader.format == "text"
    assert reader.size == path.stat().st_size
    assert reader.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@settings(max_examples=40, deadline=None)
@given(
    lines=st.lists(
        st.sampled_from([b'{"text": "a"}', b"", b"  ", b'{"text": "bb"}', b"{", b"\xff", b"x" * 40]), max_size=12
    ),
    target=st.integers(1, 60),
    ends=st.sampled_from([b"\n", b"\r\n"]),
    last=st.booleans(),
)
def test_line_numbers_are_those_of_the_file(
    tmp_path_factory: Any, lines: list[bytes], target: int, ends: bytes, last: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "f.jsonl"
    path.write_bytes(ends.join([*lines, b""] if last else lines))
    found, _ = read(path, target, fmt="text")
    expected = [i for i, line in enumerate(lines, start=1) if line.strip()]
    assert [number for number, _ in found] == expected
    for number, record in found:
        assert isinstance(record, BadRecord) == (lines[number - 1] in (b"{", b"\xff", b"x" * 40))


VALUES = st.dictionaries(
    st.text(max_size=3), st.text(max_size=9) | st.integers(-9, 9) | st.floats(0, 9), min_size=1, max_size=3
)


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(VALUES, min_size=1, max_size=6),
    indent=st.sampled_from([None, 0, 2]),
    target=st.integers(1, 80),
    array=st.booleans(),
)
def test_json_is_cut_between_records(
    tmp_path_factory: Any, values: list[Any], indent: int | None, target: int, array: bool
) -> None:
    path = tmp_path_factory.mktemp("json") / "f.json"
    texts = [json.dumps(v, indent=indent) for v in values]
    path.write_text("[" + " ,\n".join(texts) + "]\n" if array else "\n".join(texts))
    found, _ = read(path, target, fmt="text")
    assert [record for _, record in found] == values


def test_a_number_is_not_cut_where_a_read_ends(tmp_path: Path) -> None:
    padding = " " * ((1 << 16) - 3)
    (tmp_path / "f.json").write_text(f'[{padding}1234, {{"text": "a"}}]')
    assert [r for _, r in read(tmp_path / "f.json", fmt="text")[0]] == [1234, {"text": "a"}]


@given(data=st.binary(max_size=60), at_once=st.integers(1, 9), sizes=st.lists(st.integers(1, 20), max_size=8))
def test_reads_are_full_however_little_a_decompressor_hands_out(data: bytes, at_once: int, sizes: list[int]) -> None:
    class Dribble:
        left = data

        def read(self, size: int = -1, /) -> bytes:
            out, self.left = self.left[:at_once], self.left[at_once:]
            return out

    stream, at = Filled(Dribble()), 0
    for size in sizes:
        assert stream.read(size) == data[at : at + size]
        at += size


def test_one_pretty_object_and_objects_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps(RECORDS[0], indent=2) + json.dumps(RECORDS[1], indent=2))
    assert read(path)[0] == [(1, RECORDS[0]), (2, RECORDS[1])]


def test_json_lines_in_a_json_file_and_an_array_in_a_jsonl_file(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_bytes(LINES)
    assert [r for _, r in read(tmp_path / "f.json")[0]] == RECORDS
    for text in (json.dumps(RECORDS), json.dumps(RECORDS, indent=1)):
        (tmp_path / "f.jsonl").write_text(text)
        assert [r for _, r in read(tmp_path / "f.jsonl")[0]] == RECORDS


def test_a_broken_first_line_of_jsonl_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(b"[1, 2\n" + LINES)
    (tmp_path / "g.jsonl").write_bytes(b'{"text":\n' + LINES)
    found, reader = read(tmp_path / "g.jsonl")
    assert isinstance(found[0][1], BadRecord) and len(found) == len(RECORDS) + 1 and reader.format == "text"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"},\n {"text": "b"\n', r"f.json:3: not JSON in record 2"),
        ('[{"text": "a"}\n', "the array is not closed"),
        ('[{"text": "a"} {"text": "b"}]', r"f.json:1: .* expected ',' or '\]', found '{'"),
        ('[{"text": "a"}] x', "text behind the end of the array"),
        ("hello", "begins with 'h', not with a JSON array or object"),
    ],
)
def test_broken_json_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read(tmp_path / "f.json")


def test_byte_order_marks(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES)
    assert [r for _, r in read(tmp_path / "f.jsonl")[0]] == RECORDS
    (tmp_path / "g.jsonl").write_bytes(LINES.decode().encode("utf-16"))
    with pytest.raises(UserError, match=r"g.jsonl: is UTF-16; convert"):
        read(tmp_path / "g.jsonl")


def test_bytes_that_are_not_utf8_reject_their_record_only(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(b'{"text": "\xe9"}\n' + LINES)
    (tmp_path / "f.json").write_bytes(b'[{"text": "a"}, {"text": "\xe9"}, {"text": "b"}]')
    (tmp_path / "f.txt").write_bytes(b"caf\xe9")
    for name, bad in [("f.jsonl", 1), ("f.json", 2), ("f.txt", 1)]:
        found, _ = read(tmp_path / name)
        assert [n for n, r in found if isinstance(r, BadRecord)] == [bad]
        assert "not UTF-8: byte 0xe9" in str(dict(found)[bad])


def test_a_ten_megabyte_line(tmp_path: Path) -> None:
    big = {"text": "long " * (2 << 20)}
    for name, text in [
        ("f.jsonl", "\n".join(map(json.dumps, [*RECORDS, big, *RECORDS]))),
        ("f.json", json.dumps([big, RECORDS[0]])),
    ]:
        (tmp_path / name).write_text(text)
        found, _ = read(tmp_path / name, 1 << 16)
        assert big in [r for _, r in found]
        assert found[-1][1] in RECORDS


def test_a_line_without_end_is_not_taken_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f.jsonl").write_bytes(b'{"text": "a"}\n{"text": "' + b"a" * 100_000)
    (source,), _ = expand([tmp_path / "f.jsonl"])
    monkeypatch.setattr(readers.line_chunks, "__defaults__", (50_000,))
    with pytest.raises(UserError, match=r"f.jsonl:2: line longer than"):
        list(FileReader(source, 0, target=1000).chunks())


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst"])
def test_a_compressed_file_cut_short_is_an_error(tmp_path: Path, kind: str) -> None:
    path = write_as(tmp_path, kind, RECORDS)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"its compression is damaged .*; restore the file"):
        read(path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_damaged_table_is_an_error(tmp_path: Path, kind: str) -> None:
    path = write_as(tmp_path, kind, RECORDS)
    path.write_bytes(b"nonsense" + path.read_bytes()[8:-8])
    with pytest.raises(UserError, match=f"data.{kind}: cannot be read as {kind}"):
        read(path)


def test_null_fields_of_tables_are_dropped_and_other_columns_left_on_disk(tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}], "x": 1},
        {"messages": [{"role": "user", "content": "b"}], "x": 2},
    ]  # fmt: skip
    found, reader = read(write_as(tmp_path, "parquet", chats))
    assert found[0][1]["messages"][1] == {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert found[1][1] == {"messages": [{"role": "user", "content": "b"}]}
    assert reader.format == "messages"


def test_text_files_are_one_document_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.md").write_text("\n")
    assert read(tmp_path / "a.txt")[0] == [(1, {"text": "one\n\ntwo"})]
    assert read(tmp_path / "b.md")[0] == []
    monkeypatch.setattr(readers, "MAX_RECORD", 4)
    with pytest.raises(UserError, match="a text file is one document, and this one is longer"):
        read(tmp_path / "a.txt")


def reason(path: Path) -> str:
    """Why the first record of a file is rejected."""
    found, reader = read(path)
    with pytest.raises(BadRecord) as rejected:
        parse_record(reader.format, found[0][1], chat_template=True)
    return str(rejected.value)


def test_a_record_without_a_format_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text('{"chosen": 1, "rejected": 2}\n')
    assert re.match("holds keys 'chosen', 'rejected', which is none of .*data.format", reason(tmp_path / "f.jsonl"))
    (tmp_path / "g.jsonl").write_text("nonsense\nmore\n")
    found, reader = read(tmp_path / "g.jsonl")
    assert [str(bad).split(":")[0] for _, bad in found] == ["not JSON"] * 2 and reader.format == "unknown"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ('{"text": 5}', "'text' is a number, not text"),
        ('{"messages": []}', "'messages' is an empty list"),
        ('{"messages": "hello"}', "'messages' is a string, not a list of turns"),
        ('{"conversations": [{"speaker": "a"}]}', "the first turn of 'conversations' is no object with 'role'"),
    ],
)
def test_a_right_key_with_a_wrong_value_is_named_as_that(tmp_path: Path, record: str, said: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(record + "\n")
    assert said in reason(path)


def test_a_bad_beginning_does_not_hide_the_format(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(b"\n" * 9 + b"{" * 300 + b"\n" + LINES)
    for target in (1, 1 << 20):
        found, reader = read(tmp_path / "f.jsonl", target)
        assert reader.format == "text" and found[0][0] == 10 and len(found) == 1 + len(RECORDS)
        formats = [chunk.format for chunk in FileReader(reader.source, 0, target=target).chunks()]
        assert formats[-1] == "text" and formats == sorted(formats, reverse=True), "unknown ones come before"


def test_a_file_without_records_is_empty(tmp_path: Path) -> None:
    for name, content in [("a.jsonl", ""), ("b.json", "  \n"), ("c.json", "[]"), ("d.jsonl", "\n\n")]:
        (tmp_path / name).write_text(content)
        found, reader = read(tmp_path / name)
        assert found == [] and reader.format == "empty", name


# -- sources -----------------------------------------------------------------------------------------------------------


def names(sources: list[Source]) -> list[str]:
    return [source.path.name for source in sources]


def test_folders_and_globs_are_sorted_and_name_foreign_files(tmp_path: Path) -> None:
    for name in ["b.jsonl", "a.jsonl.gz", "sub/c.parquet", "d.csv", ".hidden.jsonl", "sub/e.json.zst"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found, foreign = expand([tmp_path])
    assert names(found) == ["a.jsonl.gz", "b.jsonl", "c.parquet", "e.json.zst"]
    assert [f.name for f in foreign] == ["d.csv"]
    assert found[0].compression == "gzip" and found[3].compression == "zstd"
    assert names(expand([str(tmp_path / "*.jsonl*")])[0]) == ["a.jsonl.gz", "b.jsonl"]
    assert names(expand([tmp_path / "b.jsonl", tmp_path / "a.jsonl.gz"])[0]) == ["b.jsonl", "a.jsonl.gz"]  # as given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["missing.jsonl"], "missing.jsonl: no such file or folder"),
        (["*.nothing"], "matches no file"),
        (["x.csv"], r"x.csv: suffix .csv is not known; rename it"),
        (["empty"], "empty: holds no file with one of the suffixes"),
        (["a.jsonl", "a.*"], "a.jsonl: named twice"),
        ([], "no data given"),
    ],
)
def test_sources_that_cannot_be_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "x.csv").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        expand(given)


def save_to_disk(folder: Path, shards: int = 2, **state: Any) -> Path:
    """A folder as `datasets` writes it."""
    folder.mkdir(parents=True)
    files = []
    for i in range(shards):
        table = pa.Table.from_pylist(RECORDS[i::shards])
        name = f"data-{i:05d}-of-{shards:05d}.arrow"
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table)
        files.append({"filename": name})
    (folder / "state.json").write_text(json.dumps({"_data_files": files, **state}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_datasets_folders(tmp_path: Path) -> None:
    found, foreign = expand([save_to_disk(tmp_path / "one")])
    assert len(found) == 2 and not foreign
    read_back = [r for source in found for c in FileReader(source, 0).chunks() for _, r in records(c)]
    assert read_back == RECORDS[0::2] + RECORDS[1::2]
    save_to_disk(tmp_path / "splits" / "train")
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert len(expand([tmp_path / "splits"])[0]) == 2


def test_datasets_folders_that_would_be_misread_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="flatten_indices"):
        expand([save_to_disk(tmp_path / "selected", _indices_data_files=[{"filename": "indices.arrow"}])])
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"holds the splits train, test; name one, e.g. .*/train"):
        expand([tmp_path / "splits"])
    folder = save_to_disk(tmp_path / "gone")
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match="missing, though"):
        expand([folder])


# -- real files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fmt", "count"),
    [
        ("alpaca_en_demo.json", "alpaca", 999),
        ("glaive_toolcall_en_demo.json", "sharegpt", 300),
        ("reason_tool_use_demo_50.jsonl", "messages", 50),
        ("c4_demo.jsonl", "text", 300),
        ("dolly_hhrlhf_train_small.jsonl", "prompt_completion", 1000),
        ("arxiv.jsonl", "text", 19),
    ],
)
def test_real_files(shared: Path, name: str, fmt: str, count: int) -> None:
    from headway.data.formats import parse_record

    found, reader = read(shared / "data" / name, 1 << 17)
    assert reader.format == fmt and len(found) == count
    for _, record in found:
        parse_record(fmt, record, chat_template=True)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="not a regular file"):
        expand([tmp_path / "pipe.jsonl"])
