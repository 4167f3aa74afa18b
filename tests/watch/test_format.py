"""Numbers read right, and no rounding makes a 1000k."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.watch import format as fmt

UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@given(st.floats(0.001, 9e14))
def test_a_count_is_within_half_a_percent_and_never_four_digits(value: float) -> None:
    match = re.fullmatch(r"([\d.]+)([kMBT]?)", fmt.count(value))
    assert match is not None
    assert float(match[1]) < 1000 or match[2] == "T"
    assert float(match[1]) * UNITS[match[2]] == pytest.approx(value, rel=0.0051, abs=0.0051)


@given(st.floats(0, 1e7))
def test_a_duration_reads_back_within_its_last_digit(value: float) -> None:
    sizes = {"s": 1, "min": 60, "h": 3600, "d": 86400}
    parts = re.findall(r"(\d+) (s|min|h|d)", fmt.clock(value))
    total = sum(int(number) * sizes[unit] for number, unit in parts)
    last = sizes[parts[-1][1]]
    assert abs(total - value) <= 0.5 * last + 31
    assert all(int(number) < 60 for number, unit in parts if unit in ("s", "min"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fmt.count(842), "842"),
        (fmt.count(999.96), "1.00k"),
        (fmt.count(999_950), "1.00M"),
        (fmt.count(18_225), "18.2k"),
        (fmt.count(None), "–"),
        (fmt.si(989e12, "FLOP/s"), "989 TFLOP/s"),
        (fmt.size(1023), "1023 B"),
        (fmt.size(1024 * 1024 - 1), "1.00 MiB"),
        (fmt.percent(0.4789), "47.9 %"),
        (fmt.percent(0.0001), "<0.1 %"),
        (fmt.percent(0.0), "0.0 %"),
        (fmt.percent(float("nan")), "–"),
        (fmt.seconds(0.0008), "0.8 ms"),
        (fmt.seconds(9.996), "10.0 s"),
        (fmt.seconds(0), "0 s"),
        (fmt.seconds(1e-6), "<0.1 ms"),
        (fmt.clock(59.6), "1 min 00 s"),
        (fmt.clock(3599.6), "1 h 00 min"),
        (fmt.clock(86399), "1 d 00 h"),
        (fmt.loss(2.5), "2.5000"),
        (fmt.loss(float("nan")), "nan"),
        (fmt.loss(1e-5), "1.000e-05"),
        (fmt.rate(3e-4), "3.00e-04"),
        (fmt.per_second(18_225.4, "trained tok"), "18.2k trained tok/s"),
        (fmt.plural(1, "step"), "1 step"),
        (fmt.peak(2e15, "datasheet"), "2.00 PFLOP/s (datasheet)"),
        (fmt.peak(2e15, "peak 2 x 989 TFLOP/s bf16 (H200)"), "2 x 989 TFLOP/s bf16 (H200)"),
        (fmt.peak(None, ""), "unknown, so no MFU; `headway bench peak` measures it"),
        (fmt.fact(134515008), "134,515,008"),
        (fmt.fact(["a", 1]), "a; 1"),
        (fmt.fact(True), "yes"),
        (fmt.plural(2000, "step"), "2,000 steps"),
    ],
)
def test_examples(text: str, expected: str) -> None:
    assert text == expected
