"""Money: arithmetic by hand, the decision views as properties, and the command's answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.plan.answer import Question, answer
from headway.plan.cluster import load_cluster
from headway.plan.decision import Option, cheapest_by, fastest_within, frontier, options_of
from headway.plan.explain import communication
from headway.plan.failure_rates import given as given_rate
from headway.plan.goodput import predict as predict_goodput
from headway.plan.money import parse_duration, price_of, run_cost, worth
from headway.plan.search import search
from headway.plan.whole_run import RunTerms, reliability_of, run_of
from headway.plan.workload import Workload, load_model

H100 = load_cluster("H100x1024")


def test_cost_by_hand() -> None:
    cost = run_cost(H100, step_s=10, tokens_per_step=4e6, tokens=4e12, ettr=0.9, trained_share=0.5, power_share=0.75)
    hours = 1e6 * 10 / 0.9 / 3600 * 1024
    assert cost.steps == 1e6
    assert cost.gpu_hours == pytest.approx(hours)
    assert cost.dollars == pytest.approx((hours * 1.99, hours * 2.95, hours * 6.88))
    assert cost.energy_kwh == pytest.approx(hours * 0.7 * 0.75)
    assert cost.dollars_per_million == pytest.approx(hours * 2.95 / 2e6)
    text = "\n".join(cost.lines())
    assert "aimultiple" in text and "75% of 700 W" in text and "50% of the tokens carry a label" in text


def test_a_given_price_replaces_the_band() -> None:
    price = price_of(replace(H100, price_per_hour=2.0))
    assert price is not None and (price.low, price.high, price.source) == (2.0, 2.0, "given")


def test_a_device_without_a_price_says_so() -> None:
    cost = run_cost(load_cluster("H800x8"), 1, 1e6, 1e9)
    assert cost.dollars is None and cost.dollars_per_million is None
    assert any("no price known" in line for line in cost.lines())


def test_what_a_point_of_mfu_is_worth() -> None:
    cost = run_cost(H100, 10, 4e6, 4e12)
    point, half = worth(cost, mfu=0.40, step_s=10, communication_s=2)
    assert point.days == pytest.approx(cost.wall_s / 86400 / 41)
    assert half.days == pytest.approx(cost.wall_s / 86400 / 10)
    assert point.dollars == pytest.approx(cost.dollars[1] / 41) if cost.dollars else False


options = st.lists(
    st.builds(
        Option,
        label=st.just(""),
        gpus=st.integers(8, 4096),
        wall_s=st.floats(1, 1e7),
        dollars=st.one_of(st.none(), st.floats(1, 1e9)),
    ),
    max_size=30,
)


def within(found: list[Option]) -> list[Option]:
    """What can be compared by money: the priced, or all where nothing is."""
    return [o for o in found if o.dollars is not None] or found


def cost_of(option: Option, found: list[Option]) -> float:
    return option.dollars if within(found)[0].dollars is not None else option.wall_s * option.gpus  # type: ignore[return-value]


@settings(suppress_health_check=[HealthCheck.too_slow])  # drawing lists is slow where other processes run
@given(options)
def test_the_frontier_holds_no_option_that_another_beats(found: list[Option]) -> None:
    kept = frontier(found)
    for option in within(found):
        beaten = [k for k in kept if k.wall_s <= option.wall_s and cost_of(k, found) <= cost_of(option, found)]
        assert beaten, "every option is on the frontier or beaten by one that is"
    for one in kept:
        mine = (one.wall_s, cost_of(one, found))
        others = [(o.wall_s, cost_of(o, found)) for o in within(found)]
        assert not any(o[0] <= mine[0] and o[1] <= mine[1] and o != mine for o in others)
    assert [o.wall_s for o in kept] == sorted(o.wall_s for o in kept)


@settings(deadline=None)
@given(options, st.floats(1, 1e7), st.floats(1, 1e9))
def test_answers_to_a_date_and_a_budget_are_on_the_frontier(
    found: list[Option], deadline: float, budget: float
) -> None:
    cheap, fast = cheapest_by(found, deadline), fastest_within(found, budget)
    if cheap is not None:
        assert cheap.wall_s <= deadline and cheap in frontier(found)
    else:
        assert all(o.wall_s > deadline for o in within(found))
    if fast is not None:
        assert fast.dollars is not None and fast.dollars <= budget and fast in frontier(found)


def test_durations() -> None:
    assert parse_duration("30d") == 30 * 86400
    assert parse_duration("1.5h") == 5400
    for bad in ("30", "d", "-3d", "0h", "3y", "9" * 400 + "d"):
        with pytest.raises(UserError, match=r"--deadline .* write a number and a unit"):
            parse_duration(bad, "--deadline")


@pytest.mark.parametrize(
    "wrong", [{"ettr": 0.0}, {"ettr": 1.2}, {"trained_share": 0.0}, {"power_share": -1.0}, {"tokens": 0.0}]
)
def test_impossible_shares_are_named(wrong: dict[str, float]) -> None:
    values = {"tokens": 1e9, **wrong}
    with pytest.raises(UserError):
        run_cost(H100, 1, 1e6, **values)


WORK = Workload(load_model("llama3-8b")[1], 8192, 128, "bf16", "llama3-8b")


FIXED = {"pp": 1, "micro_batch": 1}  # keeps the search short


def question(**changes: object) -> Question:
    asked = Question(WORK, [(load_cluster("H100x64"), 1.0)], tokens=1e12, fixed=FIXED)
    return replace(asked, **changes)  # type: ignore[arg-type]


def test_the_run_is_the_steps_over_the_ettr_of_its_own_failures() -> None:
    found = search(WORK, load_cluster("H100x64"), FIXED, top=1).plans[0]
    rate = given_rate(2e-3)
    cost = run_of(found, 1e12, RunTerms(rate))
    assert cost.ettr == predict_goodput(reliability_of(found, rate)).ettr < 1
    assert cost.wall_s * cost.ettr == pytest.approx(cost.steps * found.step_s)
    assert run_of(found, 1e12, RunTerms(given_rate(0.0))).ettr == 1
    worse = run_of(found, 1e12, RunTerms(given_rate(2e-2)))
    assert worse.wall_s > cost.wall_s
    fixed = run_of(found, 1e12, RunTerms(rate, ettr=0.8))
    assert fixed.wall_s == pytest.approx(fixed.work_s / 0.8) and "given" in fixed.assumptions[0]
    huge = replace(found, cluster=found.cluster.with_gpus(200_000))
    with pytest.raises(UserError, match="never gets on"):
        run_of(huge, 1e12, RunTerms(given_rate(1.0)))


def test_faster_storage_raises_the_ettr() -> None:
    found = search(WORK, load_cluster("H100x64"), FIXED, top=1).plans[0]
    slow = replace(found, cluster=replace(found.cluster, storage_total=1e8))
    assert run_of(slow, 1e12, RunTerms()).ettr < run_of(found, 1e12, RunTerms()).ettr


def test_options_are_the_clusters_halves_and_the_answers_come_from_them() -> None:
    options = options_of(WORK, [(load_cluster("H100x64"), 1.0)], 1e12, RunTerms(), FIXED)
    assert [option.gpus for option in options] == [64, 32, 16, 8]
    by_hand = {option.gpus: run_of(option.detail, 1e12, RunTerms()) for option in options}
    assert all(option.dollars == by_hand[option.gpus].dollars[1] for option in options)  # type: ignore[index]
    middle = options[1]
    assert middle.dollars is not None
    found = answer(question(deadline_s=middle.wall_s, budget=middle.dollars))
    assert found.cheapest == middle or (found.cheapest and found.cheapest.dollars <= middle.dollars)  # type: ignore[operator]
    assert found.fastest and found.fastest.wall_s <= middle.wall_s and found.good


def test_what_cannot_be_had_is_said() -> None:
    late = answer(question(deadline_s=60.0))
    assert late.late and not late.good and any("no plan meets the deadline" in line for line in late.lines())
    dear = answer(question(budget=1.0))
    assert dear.dear and any("no plan meets the budget of" in line for line in dear.lines())
    edge = answer(question()).edge
    assert len(edge) > 1  # a smaller cluster is slower and cheaper, so some date and some budget exclude each other
    both = answer(question(deadline_s=edge[0].wall_s, budget=edge[-1].dollars))
    assert both.torn and not both.good and any("meets both" in line for line in both.lines())


def test_worth_names_the_plans_own_shares() -> None:
    found = answer(question())
    best = found.plans[0]
    point, half = found.gains
    assert point.days == pytest.approx(found.costs[0].wall_s / 86400 * 0.01 / (best.mfu + 0.01))
    assert half.days == pytest.approx(found.costs[0].wall_s / 86400 * communication(best) / 2 / best.step_s)


def test_a_choice_of_clusters_is_one_list_and_the_unpriced_are_named() -> None:
    clusters = [(load_cluster(spec), 1.0) for spec in ("H100x64", "H800x64")]
    found = answer(question(clusters=clusters, objective="cost", top=99))
    names = [one.cluster.device.name for one in found.plans]
    priced = names.count("H100-SXM-80GB")
    assert set(names[:priced]) == {"H100-SXM-80GB"} and set(names[priced:]) == {"H800-SXM-80GB"}
    assert any("not compared, no price known" in line and "H800" in line for line in found.lines())
    assert all(option.dollars is not None for option in found.edge)
    slow = answer(question(clusters=[(load_cluster("H100x64"), 1.5)]))
    assert slow.plans[0].step_s == pytest.approx(1.5 * answer(question()).plans[0].step_s)
