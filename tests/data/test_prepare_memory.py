"""The memory of `prepare` does not grow with the data, neither where it is read nor where it is tokenised."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.chat_material import CHATML, byte_level, write_jsonl
from headway.data import prepare as preparing
from headway.data import units
from headway.data.prepare import prepare

TOKENIZER = byte_level(CHATML)
_MARGIN = 640  # KiB; from run to run it is within 350, and 4 times the data is 2 MB more
_UNIT = 1 << 17


def make(path: Path, count: int) -> Path:
    dice = random.Random(0)
    words = ["hello", "the", "fox", "été"]
    turns = [{"role": role, "content": " ".join(dice.choices(words, k=60))} for role in ("user", "assistant")]
    return write_jsonl(path, [{"messages": turns, "unused": "x" * 600}] * count)


def peaks(source: Path, out: Path) -> tuple[int, int]:
    """KiB that Python and numpy held at the highest: in the process that reads, and in the larger worker.

    Counted by allocation: the resident size of a process that has done much before hides what it takes now.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            tracemalloc.start()
            tell_peaks_of_workers(out.with_name(f"{out.name}-peaks"))
            prepare(source, out, TOKENIZER, workers=2, shard_bytes=_UNIT)
            os.write(write, json.dumps(tracemalloc.get_traced_memory()[1]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        parent = json.loads(told.read())
    os.waitpid(child, 0)
    workers = [int(path.read_text()) for path in out.with_name(f"{out.name}-peaks").iterdir()]
    return parent >> 10, max(workers) >> 10


def tell_peaks_of_workers(folder: Path) -> None:
    folder.mkdir()
    do = units.do_unit

    def and_tell(recipe: Any, converter: Any, unit: Any) -> Any:
        mine = folder / str(os.getpid())
        if not mine.exists():
            tracemalloc.clear_traces()  # the parent's, from before the fork
        done = do(recipe, converter, unit)
        mine.write_text(str(tracemalloc.get_traced_memory()[1]))
        return done

    units.do_unit = and_tell  # type: ignore[assignment]


def growth(folder: Path, count: int = 500) -> tuple[int, int]:
    """KiB that four times the data takes more."""
    little = peaks(make(folder / "little.jsonl", count), folder / "a")
    much = peaks(make(folder / "much.jsonl", 4 * count), folder / "b")
    return much[0] - little[0], much[1] - little[1]


def test_four_times_the_data_takes_no_more_memory(tmp_path: Path) -> None:
    parent, worker = growth(tmp_path)
    assert abs(parent) < _MARGIN and abs(worker) < _MARGIN, (parent, worker)


def _read_all_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = preparing.cut_units
    monkeypatch.setattr(preparing, "cut_units", lambda *given: iter(list(cut(*given))))


def _keep_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    do = units.do_unit

    def and_keep(recipe: Any, converter: Any, unit: Any) -> Any:
        kept.append(unit)
        return do(recipe, converter, unit)

    monkeypatch.setattr(units, "do_unit", and_keep)


@pytest.mark.parametrize(("plant", "where"), [(_read_all_first, 0), (_keep_what_is_done, 1)])
def test_planted_hoards_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], where: int
) -> None:
    plant(monkeypatch)
    assert growth(tmp_path)[where] > _MARGIN
