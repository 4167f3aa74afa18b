"""The live line: rates of exactly the steps they speak of, quiet where nobody watches, and it fits."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from headway.account.events import CheckpointLine, EvalLine, SessionEnd, SessionStart, StepLine
from headway.watch.live import LiveLine
from headway.watch.rates import TimeLeft, Window, rates
from watch.run_maker import PEAK, Maker, S


def lines_of(tmp_path: Path, **options: object) -> list[object]:
    maker = Maker(tmp_path, steps=60, **options)  # type: ignore[arg-type]
    maker.start()
    maker.run(30, eval_every=15)
    maker.save(30)
    maker.run(60, eval_every=15)
    maker.end()
    maker.close()
    return list(maker.lines)


def show(lines: list[object], *, terminal: bool = False, width: int = 100, tick: float = 1.0, **options: object) -> str:
    clock = [0.0]
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, highlight=False, color_system=None)
    live = LiveLine(console=console, now=lambda: clock[0], **options)  # type: ignore[arg-type]
    for line in lines:
        clock[0] += tick
        live.tell(line)  # type: ignore[arg-type]
    live.close()
    return file.getvalue()


def steps_of(lines: list[object]) -> list[StepLine]:
    return [line for line in lines if isinstance(line, StepLine)]


def test_the_first_interval_is_divided_by_its_own_step_only(tmp_path: Path) -> None:
    lines = lines_of(tmp_path)
    first = steps_of(lines)[0]
    text = show(lines, every=10)
    shown = next(row for row in text.splitlines() if row.startswith("step 1/"))
    per_second = first.trained_tokens / (first.wall_ns / 1e9)
    assert f"{per_second / 1000:.2f}k trained tok/s" in shown
    planted = first.trained_tokens / (first.wall_ns / 1e9 / 10)
    assert f"{planted / 1000:.1f}k" not in shown, "R1: the first step's time divided by log_freq"


def test_the_first_interval_after_a_resume_holds_nothing_of_the_old_session(tmp_path: Path) -> None:
    maker = Maker(tmp_path, steps=60)
    maker.start()
    maker.run(34)  # killed between two printed lines
    maker.start(resumed_from=30, gap_s=60.0)
    maker.run(60)
    maker.close()
    lines: list[object] = list(maker.lines)
    first = next(line for line in steps_of(lines) if line.session == 1)
    rows = show(lines, every=10).splitlines()
    shown = rows[next(i for i, row in enumerate(rows) if row.startswith("  resumed")) :]
    line = next(row for row in shown if row.startswith("step 31/60 "))
    assert f"{first.trained_tokens / (first.wall_ns / 1e9) / 1000:.2f}k trained tok/s" in line
    assert f"MFU {100 * first.flops.useful / (first.wall_ns / 1e9 * PEAK):.1f} %" in line


def test_every_step_is_in_exactly_one_plain_interval(tmp_path: Path) -> None:
    steps = steps_of(lines_of(tmp_path))
    window = Window(math.inf)
    tokens = 0.0
    for number, line in enumerate(steps, 1):
        window.add(line)
        if number % 7 == 0 or line is steps[-1]:
            part = window.rates(PEAK)
            assert part.trained_per_s is not None
            tokens += part.trained_per_s * part.seconds
            window.clear()
    assert tokens == pytest.approx(sum(line.trained_tokens for line in steps))


def test_rates_of_nothing_are_unknown_not_zero() -> None:
    none = rates([], PEAK)
    assert none.trained_per_s is None and none.mfu is None and none.data_share is None


def test_the_sliding_window_spans_its_seconds(tmp_path: Path) -> None:
    window = Window(10.0)
    for line in steps_of(lines_of(tmp_path)):
        window.add(line)
    span = window.rates(None)
    assert 10.0 <= span.seconds < 12.0 and span.mfu is None


def test_the_three_counts_stay_apart(tmp_path: Path) -> None:
    steps = steps_of(lines_of(tmp_path))
    part = rates(steps, PEAK)
    seconds = sum(line.wall_ns for line in steps) / 1e9
    assert part.slots_per_s == pytest.approx(sum(line.slots for line in steps) / seconds)
    assert part.tokens_per_s == pytest.approx(sum(line.tokens for line in steps) / seconds)
    assert part.slots_per_s is not None and part.tokens_per_s is not None and part.trained_per_s is not None
    assert part.slots_per_s > part.tokens_per_s > part.trained_per_s


def test_off_a_terminal_it_is_quiet(tmp_path: Path) -> None:
    lines = lines_of(tmp_path)
    rows = [row for row in show(lines, tick=1.0).splitlines() if row.startswith("step ") and "left" in row]
    assert rows[0].startswith("step 1/60") and rows[-1].startswith("step 60/60")
    assert len(rows) <= 2 + 65 // 10
    assert len([row for row in show(lines, tick=100.0, every=20).splitlines() if "left" in row]) == 4  # 1, 20, 40, 60


def test_what_happened_is_printed_once_and_whole(tmp_path: Path) -> None:
    text = show(lines_of(tmp_path, skip_at=9), width=40)
    rows = text.splitlines()
    assert sum(row.startswith("eval step") for row in rows) == 4
    assert any(row.startswith("saved step 30: checkpoints/step-00000030.g0001 (1.50 GiB") for row in rows)
    assert any("step 9 skipped: no trained token in the global batch" in row for row in rows)
    assert rows[-1].startswith("done at step 60 of 60") and "1 step skipped" in rows[-1]
    assert "989 TFLOP/s (published: bf16 dense)" in text and "16 packs of 8,192 slots" in text


def test_a_skipped_step_is_never_shown_as_a_loss(tmp_path: Path) -> None:
    rows = show(lines_of(tmp_path, skip_at=1)).splitlines()
    first = next(row for row in rows if row.startswith("step 1/60"))
    assert "skipped" in first and "loss" not in first


def test_a_flood_of_skips_does_not_flood_the_screen(tmp_path: Path) -> None:
    lines = lines_of(tmp_path)
    import msgspec

    skipped = [msgspec.structs.replace(line, skipped="empty") if isinstance(line, StepLine) else line for line in lines]
    text = show(skipped, tick=0.0)
    assert text.count(" skipped: empty") == 5 and "60 steps skipped" in text


def test_quiet_shows_start_warnings_and_end_only(tmp_path: Path) -> None:
    text = show(lines_of(tmp_path, skip_at=9), quiet=True, tick=100.0)
    assert "left" not in text and "eval" not in text and "saved" not in text
    assert "step 9 skipped" in text and text.startswith("step 0 → 60") and "done at step 60" in text


def test_an_unknown_peak_shows_no_mfu_and_says_how_to_get_one(tmp_path: Path) -> None:
    text = show(lines_of(tmp_path, peak=None))
    assert "headway bench peak" in text and "MFU –" in text


@pytest.mark.parametrize("width", [30, 50, 80, 100, 200])
def test_the_line_fits_its_terminal_and_keeps_what_matters(tmp_path: Path, width: int) -> None:
    from rich.text import Text

    text = show(lines_of(tmp_path, skip_at=9), terminal=True, width=width, tick=1.0)
    rows = [Text.from_ansi(row).plain for part in text.split("\r") for row in part.split("\n")]
    progress = [row for row in rows if " · loss" in row or " · skipped" in row]
    assert progress and all(cell_len(row) <= width for row in progress)
    if width >= 50:
        assert all("left" in row for row in progress)
    if width >= 100:
        assert all("trained tok/s" in row and "MFU" in row and "data" in row for row in progress)


def test_time_left_forgets_the_first_step_and_counts_evaluation(tmp_path: Path) -> None:
    steps = steps_of(lines_of(tmp_path))
    left = TimeLeft(60)
    left.add(steps[0])
    assert not left.settled and left.seconds(steps[0]) == pytest.approx(59 * steps[0].wall_ns / 1e9)
    for line in steps[1:29]:
        left.add(line)
    last = steps[28]
    mean = sum(line.wall_ns for line in steps[1:29]) / 28 / 1e9
    overhead = 6 * S / last.run_ns["productive"]
    assert left.settled and left.seconds(last) == pytest.approx(31 * mean * (1 + overhead), rel=1e-6)


def test_an_interrupted_run_is_not_called_failed_and_says_how_it_goes_on() -> None:
    start = SessionStart(session=0, time=0.0, resumed_from=0, world_size=1, steps=9, device="cpu")
    for reason, said in (("interrupted", True), ("failed", False)):
        text = show([start, SessionEnd(session=0, time=1.0, step=3, reason=reason, wall_ns=S, run_ns={})])
        assert f"{reason} at step 3 of 9" in text and ("the same command goes on" in text) == said


def test_markup_in_names_stays_text() -> None:
    start = SessionStart(
        session=0, time=0.0, resumed_from=0, world_size=1, steps=1, device="[red]x[/red]",
        facts={"data": "[bold]a.jsonl"},
    )  # fmt: skip
    end = SessionEnd(session=0, time=1.0, step=0, reason="failed", wall_ns=S, run_ns={})
    saved = CheckpointLine(session=0, step=1, time=0.0, path="[link]x", bytes=1, seconds=0.1)
    huge = EvalLine(session=0, step=1, time=0.0, nll=1e4, tokens=1, documents=1, seconds=0.1)
    text = show([start, saved, huge, end])
    assert "[red]x[/red]" in text and "[bold]a.jsonl" in text and "[link]x" in text and "perplexity ∞" in text
