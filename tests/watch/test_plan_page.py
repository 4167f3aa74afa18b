"""The page of `headway plan --html`: self-contained, escaped, with and without a run, and where no plan runs."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headway.plan.answer import Answer, Question, answer
from headway.plan.cluster import load_cluster
from headway.plan.sweep import around, sweep
from headway.plan.workload import Workload, load_model
from headway.watch.palette import Paint
from headway.watch.plan_page import render_plan_page
from headway.watch.plot_data import Line, log_chart

CLUSTER = load_cluster("H100x16")
FIXED = {"pp": 1, "micro_batch": 1, "cp": 1}
WORK = Workload(load_model("llama3-8b")[1], 4096, 128, "bf16", "llama3-8b")


def asked(**changes: object) -> Answer:
    return answer(replace(Question(WORK, [(CLUSTER, 1.0)], tokens=1e12, fixed=FIXED), **changes))  # type: ignore[arg-type]


def test_the_page_holds_everything_and_asks_for_nothing() -> None:
    found = asked(deadline_s=60.0)
    page = render_plan_page(found, sweep(WORK, CLUSTER, around(CLUSTER), fixed=FIXED), "<b>&name</b>")
    assert "&lt;b&gt;&amp;name&lt;/b&gt;" in page and "<b>&name" not in page
    assert not re.search(r"(src|href)=\"(?!#)|https?://|@import|url\(", page)
    assert (
        page.count('<svg class="chart"') == 2 and "limits not met" in page and "no plan meets the deadline of " in page
    )
    assert all(one.layout.describe() in page for one in found.plans)
    assert page.count('<tr class="best"') == 1


def test_one_plan_without_a_run_and_no_plan_at_all() -> None:
    page = render_plan_page(asked(tokens=0.0, top=1), None, "x")
    assert (
        page.count('<svg class="chart"') == 0 and "dollars" not in page and "Plan 1:" in page and "Plan 2:" not in page
    )
    none = render_plan_page(None, None, "x", "no plan fits: <too> big")
    assert "no plan fits: &lt;too&gt; big" in none and "<table" not in none and "#plans" not in none


@given(st.lists(st.tuples(st.floats(1e-6, 1e12), st.floats(1e-6, 1e15)), min_size=1, max_size=20))
def test_points_stay_inside_the_chart_and_keep_their_order(points: list[tuple[float, float]]) -> None:
    chart = log_chart([Line("x", Paint("", "#000", "#fff"), [(x, y, "") for x, y in points])], "x", "y")
    assert chart is not None and chart.x_ticks and chart.y_ticks and len(chart.x_ticks) <= 7
    (_, _, dots), *_ = chart.lines
    assert all(chart.left <= x <= chart.right and chart.top <= y <= chart.bottom for x, y, _ in dots)
    for (x, _), (a, _, _) in zip(points, dots, strict=True):
        for (z, _), (b, _, _) in zip(points, dots, strict=True):
            assert not (x < z and a > b + 1e-6)


def test_no_chart_of_nothing() -> None:
    close = log_chart([Line("x", Paint("", "", ""), [(1.0, 60.8e6, ""), (3.0, 67.4e6, "")])], "x", "y")
    assert close is not None and len(close.y_ticks) >= 2  # less than a doubling: even steps
    assert log_chart([], "x", "y") is None
    assert log_chart([Line("x", Paint("", "", ""), [(0.0, 1.0, "")])], "x", "y") is None
    assert not math.isnan(log_chart([Line("x", Paint("", "", ""), [(5.0, 5.0, "")])], "x", "y").lines[0][2][0][0])  # type: ignore[union-attr]
