"""`inspect` shows what is trained, of any folder, with the tokenizer it was made with."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data.chat_material import CHATML, Characters, byte_level, metaspace, write_jsonl
from data.test_megatron import write as write_megatron
from headway.account.errors import UserError
from headway.data.inspect import inspect_folder, render_sample
from headway.data.prepare import prepare
from headway.data.report_text import inspect_lines, inspect_record
from headway.data.sources import expand

TURNS = [("user", "hello"), ("assistant", "the fox"), ("user", "été?"), ("assistant", "你好 🙂")]
PLAIN = (
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦the fox<|im_end|>⟧\n"
    "<|im_start|>user\nété?<|im_end|>\n<|im_start|>assistant\n⟦你好 🙂<|im_end|>⟧\n"
)


def folder_of(tmp_path: Path, tokenizer: Any, count: int = 7) -> Path:
    messages = [{"role": role, "content": content} for role, content in TURNS]
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": messages}] * count)
    prepare(source, tmp_path / "s", tokenizer, workers=1)
    return tmp_path / "s"


def test_samples_show_their_trained_tokens(tmp_path: Path) -> None:
    report = inspect_folder(folder_of(tmp_path, byte_level(CHATML)), show=3)
    assert [s.line for s in report.samples] == [1, 3, 5]  # spread over the folder
    sample = report.samples[0]
    assert sample.plain == PLAIN
    assert sample.file == str(tmp_path / "c.jsonl") and sample.trained < sample.tokens
    assert report.manifest.totals.documents == 7
    assert len(set(report.lengths)) == 1 and report.lengths[0] == sample.tokens


def test_the_terminal_shows_trained_tokens_in_another_style(tmp_path: Path) -> None:
    (sample,) = inspect_folder(folder_of(tmp_path, byte_level(CHATML)), show=1).samples
    text = render_sample(sample)
    assert text.plain.splitlines()[0] == f"{tmp_path / 'c.jsonl'}:1  {sample.tokens} tokens, {sample.trained} trained"
    highlighted = [text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style)]
    assert highlighted == ["the fox<|im_end|>", "你好 🙂<|im_end|>"]
    console = Console(force_terminal=True, color_system="truecolor", width=200, record=True)
    with console.capture() as captured:
        console.print(text)
    assert "\x1b[" in captured.get()


def test_text_in_brackets_is_not_taken_for_markup(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", [{"text": "x [bold]y[/bold] [link=z] \x1b[2J"}])
    prepare(source, tmp_path / "s", byte_level(), workers=1)
    (sample,) = inspect_folder(tmp_path / "s").samples
    assert "[bold]y[/bold]" in render_sample(sample).plain
    assert "\x1b" not in render_sample(sample).plain  # nor for a command to the terminal


def test_more_is_asked_than_there_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, byte_level(CHATML), count=2)
    assert [s.document for s in inspect_folder(folder, show=9).samples] == [0, 1]
    assert inspect_folder(folder, show=0).samples == []


def test_decoders_that_treat_the_first_token_apart(tmp_path: Path) -> None:
    (sample,) = inspect_folder(folder_of(tmp_path, metaspace(CHATML, prefix="first")), show=1).samples
    assert sample.segments[1][0].endswith("<|im_end|>") and sample.segments[1][1] is True
    assert "".join(part for part, _ in sample.segments).count("<|im_start|>") == 4


def test_the_tokenizer_travels_with_the_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, byte_level(CHATML))
    moved = tmp_path / "elsewhere"
    shutil.move(folder, moved)
    (tmp_path / "c.jsonl").unlink()
    assert inspect_folder(moved, show=1).samples[0].plain == PLAIN


def test_a_tokenizer_can_be_given_but_must_be_the_same(tmp_path: Path) -> None:
    tokenizer = Characters(chat_template=CHATML)
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]
    prepare(write_jsonl(tmp_path / "c.jsonl", [{"messages": messages}]), tmp_path / "s", tokenizer, workers=1)
    assert "⟦jumps<|im_end|>⟧" in inspect_folder(tmp_path / "s", tokenizer=tokenizer).samples[0].plain.replace(" ", "")
    with pytest.raises(UserError, match="which is not the one given"):
        inspect_folder(tmp_path / "s", tokenizer=byte_level(CHATML))


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no manifest"):
        inspect_folder(tmp_path)


def _no_manifest(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def _file(folder: Path) -> Path:
    return write_jsonl(folder / "c.jsonl", [{"text": "a"}])


def _below_a_file(folder: Path) -> Path:
    return _file(folder) / "shards"


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _missing(folder: Path) -> Path:
    return folder / "nowhere"


@pytest.mark.parametrize("make", [_no_manifest, _file, _below_a_file, _pipe, _missing])
def test_whatever_is_no_folder_of_shards_says_how_to_make_one(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path)
    with pytest.raises(UserError, match=f"^{re.escape(str(path))}: .*headway data prepare") as refused:
        inspect_folder(path)
    assert "cannot be read" not in str(refused.value)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_megatron_pair_is_inspected_and_not_prepared_again(tmp_path: Path, suffix: str) -> None:
    prefix = write_megatron(tmp_path)
    named = Path(f"{prefix}{suffix}")
    report = inspect_folder(named, show=2)
    assert (report.totals.documents, report.totals.tokens, report.lengths[4]) == (5, 11, 5)
    assert report.samples[0].plain == "⟦5 6 7 ⟧"
    assert any("Megatron" in line for line in inspect_lines(report, 3))
    assert inspect_record(report, 3)["overlong"] == 1
    tokenizer = byte_level(CHATML)
    assert inspect_folder(named, show=1, tokenizer=tokenizer).samples[0].plain.replace("⟦", "").replace("⟧", "") == (
        tokenizer.decode([5, 6, 7])
    )
    with pytest.raises(UserError, match=f"read as it is; give {re.escape(str(prefix))} as data.sources"):
        expand([named])
    with pytest.raises(UserError, match=r"as data\.sources"):
        expand([tmp_path])  # the folder of the pair, with nothing else in it


def test_half_a_megatron_pair_is_named(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path)
    Path(f"{prefix}.idx").unlink()
    for call in (inspect_folder, lambda path: expand([path])):
        with pytest.raises(UserError, match=r"set_text_document.*\.idx"):
            call(Path(f"{prefix}.bin"))


def test_shards_are_not_prepared_once_more(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, byte_level(CHATML))
    with pytest.raises(UserError, match=r"is prepared already; give it as data.sources"):
        prepare(folder, tmp_path / "again", byte_level(CHATML), workers=1)
