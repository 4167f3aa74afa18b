"""Interval algebra against a slow reference that looks at every nanosecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.account import intervals as iv

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(-3, 12)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def array(rows: list[tuple[int, int]]) -> iv.Intervals:
    return np.array(rows, np.int64).reshape(-1, 2)


def points(rows: iv.Intervals) -> set[int]:
    return {t for start, end in rows for t in range(start, end)}


@given(spans, spans)
def test_against_sets_of_points(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    left, right = array(a), array(b)
    assert points(iv.union(left)) == points(left)
    assert iv.measure(left) == len(points(left))
    assert points(iv.intersect(left, right)) == points(left) & points(right)
    assert points(iv.subtract(left, right)) == points(left) - points(right)
    assert points(iv.complement(left, 5, 40)) == set(range(5, 40)) - points(left)
    merged = iv.union(left)
    assert (merged[1:, 0] > merged[:-1, 1]).all() and (merged[:, 1] > merged[:, 0]).all()


@given(spans, spans)
def test_shares_of_a_window_close(comp: list[tuple[int, int]], comm: list[tuple[int, int]]) -> None:
    window = (0, 80)
    compute = iv.measure(iv.clip(array(comp), *window))
    exposed = iv.measure(iv.clip(iv.subtract(array(comm), array(comp)), *window))
    idle = iv.measure(iv.complement(np.concatenate((array(comp), array(comm))), *window))
    assert compute + exposed + idle == 80


def test_large_times_stay_exact() -> None:
    base = 2**62
    assert iv.measure(array([(base, base + 3), (base + 1, base + 5)])) == 5
