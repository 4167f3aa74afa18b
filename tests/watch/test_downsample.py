"""A picture with fewer points still shows what happened."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.watch.downsample import bucket_edges, bucket_sums, pick, rolling_mean, rolling_median

GAPS = st.sampled_from([0.0, 0.3, 1.0])


@given(st.integers(1, 5000), st.integers(10, 300), st.integers(1, 4), st.integers(0, 2**32 - 1), GAPS)
def test_extremes_first_and_last_stay(total: int, limit: int, count: int, seed: int, gaps: float) -> None:
    rng = np.random.default_rng(seed)
    series = [rng.standard_normal(total) for _ in range(count)]
    for values in series:
        values[rng.random(total) < gaps] = np.nan
    rows = pick(series, limit)
    assert len(rows) <= max(limit, total if total <= limit else limit)
    assert (np.diff(rows) > 0).all() and rows[0] == 0 and rows[-1] == total - 1
    for values in series:
        if np.isfinite(values).any() and limit >= 2 + 2 * count:
            assert np.nanmax(values[rows]) == np.nanmax(values)
            assert np.nanmin(values[rows]) == np.nanmin(values)


@given(st.integers(0, 99_999))
def test_a_planted_spike_of_one_step_stays(at: int) -> None:
    values = np.sin(np.arange(100_000) / 9000.0)
    values[at] = 50.0
    assert values[pick([values], 2000)].max() == 50.0


def test_every_nth_point_would_lose_the_planted_spike() -> None:
    values = np.zeros(100_000)
    values[12_345] = 50.0
    assert values[::50].max() == 0.0
    assert values[pick([values], 2000)].max() == 50.0


@given(st.integers(1, 3000), st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_buckets_keep_every_nanosecond(total: int, limit: int, seed: int) -> None:
    parts = np.random.default_rng(seed).integers(0, 10**12, (4, total))
    edges = bucket_edges(total, limit)
    assert edges[0] == 0 and edges[-1] == total and len(edges) - 1 == min(total, limit)
    assert np.diff(edges).min() >= 1 and np.ptp(np.diff(edges)) <= 1
    sums = bucket_sums(parts, edges)
    assert (sums.sum(axis=0) == bucket_sums(parts.sum(axis=0), edges)).all()
    slow = [[sum(int(v) for v in row[a:b]) for a, b in itertools.pairwise(edges)] for row in parts]
    assert sums.tolist() == slow


def test_rolling_values_look_both_ways_at_first_and_back_at_the_end() -> None:
    values = np.array([5.0, 4.0, 3.0, 2.0, 100.0, 1.0, np.nan])
    rows = np.arange(7)
    assert rolling_median(values, rows, 2)[:3].tolist() == [5.0, 4.0, 4.0]
    assert np.isnan(rolling_median(values, rows, 2)[6])
    assert rolling_median(values, np.array([5]), 2)[0] == 2.0, "one odd step must not move the typical one"
    weights = np.array([1.0, 1.0, 1.0, 3.0, 0.0, 1.0, 1.0])
    assert rolling_mean(values, weights, np.array([4, 3]), 1).tolist() == pytest.approx([(2 * 3 + 1) / 4, (3 + 6) / 4])
