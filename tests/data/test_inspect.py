"""`inspect` shows what is trained, of any folder, with the tokenizer it was made with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data.chat_material import CHATML, Characters, byte_level, metaspace, write_jsonl
from headway.account.errors import UserError
from headway.data.inspect import inspect_folder, render_sample
from headway.data.prepare import prepare

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
