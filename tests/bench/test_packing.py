from __future__ import annotations

import numpy as np
import pytest

from headway.bench.packing import _TimedCompute, chat_lengths, compare, measure_headway, measure_trl
from headway.data.pack import best_fit


def test_lengths_are_chat_like_and_the_same_every_time() -> None:
    lengths = chat_lengths(20_000)
    assert (lengths == chat_lengths(20_000)).all() and lengths.dtype == np.int64
    assert lengths.min() >= 16 and lengths.max() == 8192
    assert 650 < np.median(lengths) < 750


def test_it_reports_what_the_packer_did() -> None:
    lengths = chat_lengths(2000)
    measured = measure_headway(lengths, 8192, repeats=3)
    packs = best_fit(lengths, 8192)
    assert (measured.documents, measured.packs, measured.fill) == (2000, len(packs), packs.fill)
    assert len(measured.seconds) == 3 and min(measured.seconds) > 0
    assert f"2000 documents in {len(packs)} packs" in str(measured)


def test_without_trl_it_says_so() -> None:
    if measure_trl(chat_lengths(10), 8192, 1) is not None:
        pytest.skip("trl is installed here")
    assert compare(500, 8193, 1, 1)[-1] == "trl: cannot be imported here, not compared"


def test_both_packers_need_as_many_packs() -> None:
    pytest.importorskip("trl.data_utils", exc_type=ImportError)
    lengths = chat_lengths(3000)
    peer = measure_trl(lengths, 8192, 1)
    assert peer is not None and peer.packs >= measure_headway(lengths, 8192, 1).packs
    assert 0 < peer.search[0] < peer.seconds[0]


def test_the_timer_passes_calls_through_and_counts_only_what_moves_columns() -> None:
    class Compute:
        def take(self, values: list[int], which: list[int]) -> list[int]:
            return [values[each] for each in which]

        def greater(self, a: int, b: int) -> bool:
            return a > b

    timed = _TimedCompute(Compute())
    assert timed.greater(2, 1) is True and timed.seconds == 0.0
    assert timed.take([5, 6, 7], which=[2, 0]) == [7, 5] and timed.seconds > 0.0
