"""Bad records, whatever they are and wherever they stand: named, counted, listed, and judged by `max_bad` alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from data.chat_material import CHATML, byte_level
from headway.account.errors import UserError
from headway.data.options import PrepareOptions, PrepareReport
from headway.data.prepare import prepare

TOKENIZER = byte_level(CHATML)
GOOD = json.dumps({"text": "the fox"})
BAD = {
    "not JSON": b'{"text": "the',
    "not UTF-8": b'{"text": "\xff"}',
    "no object": b"17",
    "no known key": b'{"chosen": "a"}',
    "a key without a value": b'{"text": null}',
    "a value of another kind": b'{"messages": {"role": "user"}}',
    "another format cut short": b'{"instruction": "do it"}',
}


def prepared(folder: Path, files: dict[str, bytes], max_bad: float = 0.01) -> PrepareReport:
    (folder / "in").mkdir()
    for name, content in files.items():
        (folder / "in" / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    options = PrepareOptions(max_bad=max_bad)
    return prepare(folder / "in", folder / "s", TOKENIZER, workers=1, shard_bytes=4096, options=options)


def lines(bad: bytes, count: int, good: int) -> bytes:
    return b"".join([bad + b"\n"] * count + [GOOD.encode() + b"\n"] * good)


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.json"])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_file_that_holds_nothing_good_counts_like_its_records(tmp_path: Path, bad: bytes, name: str) -> None:
    if name == "b.json":
        if bad == BAD["not JSON"]:
            pytest.skip("an array that is broken is a broken file")
        bad = b"[" + bad + b"]"
    report = prepared(tmp_path, {"a.jsonl": lines(b"", 0, 180), name: bad})
    assert (report.totals.documents, report.totals.rejected) == (180, 1)
    (listed,) = map(json.loads, (tmp_path / "s" / "rejected.jsonl").read_text().splitlines())
    assert listed["file"].endswith(name) and listed["line"] == 1 and listed["reason"]
    assert [file.format for file in report.files] == ["text", "unknown"]
    (tmp_path / "again").mkdir()
    with pytest.raises(UserError, match=rf"{name}:1: .*; 1 of 91 records are bad \(1.1%, data.max_bad allows 1.0%\)"):
        prepared(tmp_path / "again", {"a.jsonl": lines(b"", 0, 90), name: bad})


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_beginning_of_any_length_is_judged_by_its_share(tmp_path: Path, bad: bytes) -> None:
    report = prepared(tmp_path, {"a.jsonl": lines(bad, 300, 600)}, max_bad=0.34)
    assert (report.totals.documents, report.totals.rejected) == (600, 300) and report.files[0].format == "text"
    assert (tmp_path / "s" / "rejected.jsonl").read_text().count("\n") == 300


def test_input_of_nothing_but_bad_records_says_what_most_of_them_lack(tmp_path: Path) -> None:
    content = lines(BAD["not JSON"], 1, 0) + lines(BAD["no known key"], 9, 0)
    with pytest.raises(
        UserError, match=r"a.jsonl:2: holds keys 'chosen', which is none of .*give data.format; none of 10"
    ):
        prepared(tmp_path, {"a.jsonl": content}, max_bad=1.0)
