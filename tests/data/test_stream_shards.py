"""Both halves of the room together: chats -> shards on disk -> view -> packs -> batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from data.batch_check import check_batch
from headway.data.batch import IGNORE
from headway.data.prepare import prepare
from headway.data.store import ShardFolder
from headway.data.stream import Stream, StreamOptions
from headway.data.view import View, ViewOptions, Weighted
from headway.data.vocabulary import check_vocabulary
from tiny import make_chats, make_tokenizer


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardFolder:
    folder = tmp_path_factory.mktemp("chats")
    chats = make_chats(folder / "chats.jsonl", count=60)
    prepare(chats, folder / "shards", make_tokenizer(folder / "tokenizer"), workers=1, shard_bytes=4000)
    return ShardFolder.open(folder / "shards")


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
def test_every_token_and_label_of_the_shards_arrives(shards: ShardFolder, overlong: str) -> None:
    assert len(shards.manifest.shards) > 1
    view = View([Weighted(shards)], ViewOptions(120, overlong, holdout=5))  # type: ignore[arg-type]
    check_vocabulary(view, 320)
    stream = Stream(view, StreamOptions(slots=150, sequences_per_step=3))
    seen: Counter[int] = Counter()
    for batch in stream.epoch(0):
        micro_batches = [micro for rank in range(2) for micro in batch.micro_batches(rank, 2)]
        for micro in micro_batches:
            check_batch(micro, view)
        assert sum(micro.trained_tokens for micro in micro_batches) == batch.trained_tokens
        seen.update(batch.documents.tolist())
    assert seen == Counter(view.pieces.raw.tolist())
    assert seen.keys().isdisjoint(view.held_out().pieces.raw.tolist())
    assert view.overlong.affected > 0


def test_every_answers_end_token_is_learned_though_it_is_the_padding_token(shards: ShardFolder, tmp_path: Path) -> None:
    """P15, end to end: the tokenizer's pad is its eos; every assistant turn must still learn to stop."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path / "tokenizer"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    view = View([Weighted(shards)], ViewOptions(10_000, "drop"))
    turns = learned = 0
    for batch in Stream(view, StreamOptions(slots=view.longest, sequences_per_step=4)).epoch(0):
        for micro in batch.micro_batches(0, 1):
            turns += tokenizer.decode(micro.input_ids[0]).count("<|im_start|>assistant")
            learned += int((micro.labels == tokenizer.eos_token_id).sum())
            assert tokenizer.decode(micro.input_ids[0][micro.labels[0] != IGNORE])
    assert turns == learned > 0
