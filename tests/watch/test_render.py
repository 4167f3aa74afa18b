"""The summary on a terminal: closed as printed, inside its width, and never fooled by a name."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style
from rich.table import Table

from headway.account.events import SessionStart
from headway.record.folder import RunFolder
from headway.watch.bars import cells_of
from headway.watch.console import make_console
from headway.watch.render import render_summary
from headway.watch.summary import read_summary
from watch.run_maker import Maker, killed_and_resumed, plain_run, rewrite


def printed(folder: RunFolder, width: int = 100, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    make_console(file, width).print(render_summary(read_summary(folder)))
    file.flush()
    return file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def shares(text: str, first: str, last: str) -> list[float]:
    rows = text.splitlines()
    start = next(i for i, row in enumerate(rows) if first in row and "%" in row)
    stop = next(i for i, row in enumerate(rows) if last in row and "%" in row and i > start)
    found = [re.search(r"(<?)(\d+\.\d) %", row) for row in rows[start : stop + 1]]
    return [0.05 if item[1] else float(item[2]) for item in found if item]


@pytest.mark.parametrize("peak", [989e12, None])
def test_the_waterfall_closes_as_printed_and_comes_last(tmp_path: Path, peak: float | None) -> None:
    text = printed(killed_and_resumed(tmp_path, peak=peak))
    first, last = ("purchased peak FLOPs", "useful FLOPs") if peak else ("wall clock", "useful compute")
    rows = shares(text[text.index("waterfall ") :], first, last)
    assert rows[0] == 100.0
    assert sum(rows[1:]) == pytest.approx(100.0, abs=0.05 * len(rows))
    assert text.index("waterfall ") > max(text.index(part) for part in ("session ", "step account", "trained tokens"))


def test_the_step_account_closes_as_printed(tmp_path: Path) -> None:
    text = printed(plain_run(tmp_path))
    block = text[text.index("step account") : text.index("waterfall ")].splitlines()[1:]
    tops = [row for row in block if not row.startswith("  ") and "%" in row]
    total = sum(float(re.search(r"(\d+\.\d) %", row)[1]) for row in tops)  # type: ignore[index]
    assert total == pytest.approx(100.0, abs=0.05 * len(tops)) and any(row.startswith("unaccounted") for row in tops)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_it_fits(tmp_path: Path, width: int) -> None:
    folder = killed_and_resumed(tmp_path, world=4, slow_rank=1, skip_at=3)
    rows = printed(folder, width).splitlines()
    assert max(cell_len(row.rstrip()) for row in rows) <= min(width, 100)
    assert not any("…" in row for row in rows), "a figure was cut off"


def test_a_terminal_without_block_characters_gets_ascii_bars(tmp_path: Path) -> None:
    text = printed(plain_run(tmp_path, peak=None), encoding="latin-1")
    assert "###" in text and "useful compute" in text


def test_markup_in_a_name_stays_text(tmp_path: Path) -> None:
    folder = plain_run(tmp_path / "run[bold]x[")
    rewrite(
        folder,
        lambda line: msgspec.structs.replace(line, device="[red]gpu") if isinstance(line, SessionStart) else line,
    )
    text = printed(folder)
    assert "[red]gpu" in text and "run[bold]x[" in text.replace("\n", "")


def test_what_does_not_add_up_is_shown(tmp_path: Path) -> None:
    folder = plain_run(tmp_path)
    with folder.metrics.open("ab") as file:
        file.write(b"garbage\n")
    text = printed(folder)
    assert "does not add up, or could not be read" in text and "metrics.jsonl: 1 damaged line" in text


def test_runs_with_no_and_one_step(tmp_path: Path) -> None:
    empty = Maker(tmp_path / "none")
    empty.start()
    assert "no step was done" in printed(empty.close())
    one = plain_run(tmp_path / "one", steps=1)
    assert "useful FLOPs" in printed(one)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 120))
def test_bars_fill_their_width_exactly_and_never_vanish(a: float, b: float, width: int) -> None:
    start, end = sorted((a, b))
    text = "".join(segment.text for segment in cells_of(start, end, width, Style()))
    assert cell_len(text) == width
    if end > start:
        assert text.strip(), "a loss that is there must show"
    full = text.count("█")
    assert full <= (end - start) * width + 1


@pytest.mark.parametrize("text", ["data.sources=[/abs/chats.jsonl]", "eval.data=[chats.jsonl]", "[bold]x", ":rocket:"])
def test_what_a_user_wrote_comes_out_as_written(text: str) -> None:
    """A list in an override was read as markup: the run it stopped ended with a traceback, or its command lacked the list."""
    file = io.StringIO()
    console, table = make_console(file, 120), Table(text)
    table.add_row(text)
    console.print(text, soft_wrap=True)
    console.print(table)
    assert file.getvalue().count(text) == 3
