"""The benchmark compares like with like: the same texts, the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.chat_material import CHATML, Characters, byte_level
from headway.account.errors import UserError
from headway.bench.data import DataBench, Times, bench_prepare, count_tokens, rendered
from headway.data.options import PrepareOptions
from headway.data.prepare import prepare
from headway.data.tokenizer import make_encoder, take_apart


def chats(path: Path, count: int = 20) -> Path:
    turns = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "brown fox"}]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(count)))
    return path


def test_the_tokenizer_alone_is_given_what_prepare_tokenises(tmp_path: Path) -> None:
    tokenizer, source = byte_level(CHATML), chats(tmp_path / "c.jsonl")
    info: Any = take_apart(tokenizer)
    texts = rendered(source, info, PrepareOptions())
    backend: Any = make_encoder(info)
    report = prepare(source, tmp_path / "s", tokenizer, workers=1)
    assert len(texts) == report.totals.documents
    assert count_tokens(backend.backend.encode_batch, texts, info) == report.totals.tokens


def test_a_bench_times_both_and_removes_its_shards(tmp_path: Path) -> None:
    bench = bench_prepare(chats(tmp_path / "c.jsonl"), byte_level(CHATML), workers=1, rounds=2, scratch=tmp_path)
    assert [len(t) for t in (bench.alone.wall, bench.alone.cores, bench.prepare.wall, bench.prepare.cores)] == [2] * 4
    assert bench.documents == 20 and bench.tokens > 0 and "by the clock" in "\n".join(bench.lines())
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_ratios_are_throughputs_of_prepare_over_the_tokenizer() -> None:
    bench = DataBench(1, 1, 1, 1, Times([2.0, 9.0, 4.0], [1.0, 1.0, 1.0]), Times([4.0, 10.0, 5.0], [2.0, 2.0, 2.0]))
    assert bench.ratios == (0.5, 0.8, 0.9) and bench.core_ratios == (0.5, 0.5, 0.5)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Rust backend to compare with"):
        bench_prepare(chats(tmp_path / "c.jsonl"), Characters(chat_template=CHATML))
    (tmp_path / "e.jsonl").write_text("")
    with pytest.raises(UserError, match="the sources hold no text"):
        bench_prepare(tmp_path / "e.jsonl", byte_level(CHATML))
