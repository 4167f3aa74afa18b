"""Findings are ranked by what is surely won; overlapping claims are rescaled, never added."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.config.schema import all_keys
from headway.diagnose.finding import Finding, rank, top_remedies
from headway.diagnose.remedies import REMEDIES, register


def finding(name: str, claims: dict[str, int], lower: int, within: str = "", remedy: str = "pack") -> Finding:
    return Finding(name, name, claims, lower, 1000, ("seen",), "check", remedy, within=within)


def test_overlapping_claims_shrink_in_proportion() -> None:
    a, b = rank([finding("a", {"idle": 300}, 200), finding("b", {"idle": 100}, 100)], {"idle": 200})
    assert (a.claims["idle"], a.lower_ns, b.claims["idle"], b.lower_ns) == (150, 100, 50, 50)


def test_claims_that_fit_are_left_alone() -> None:
    items = [finding("a", {"idle": 100}, 50), finding("b", {"comm": 100}, 60)]
    assert [item.name for item in rank(items, {"idle": 100, "comm": 500})] == ["b", "a"]


def test_a_finding_within_another_is_shown_below_it_and_claims_nothing() -> None:
    items = [
        finding("part", {"idle": 90}, 80, within="whole"),
        finding("whole", {"idle": 100}, 10),
        finding("other", {"comm": 50}, 40),
    ]
    ranked = rank(items, {"idle": 100, "comm": 50})
    assert [item.name for item in ranked] == ["other", "whole", "part"]
    assert ranked[1].upper_ns == 100


def test_what_is_longer_than_the_finding_that_holds_it_is_ranked_with_the_rest() -> None:
    """All ranks save for long, one is a little late: the late one's wait holds none of the saving."""
    items = [
        finding("host-busy", {"idle": 400}, 200, within="straggler", remedy="bf16"),
        finding("straggler", {"straggler": 30}, 30),
        finding("unstable", {"idle": 100}, 50, within="host-busy"),
    ]
    ranked = rank(items, {"idle": 500})
    assert [(item.name, item.within) for item in ranked] == [
        ("host-busy", ""), ("unstable", "host-busy"), ("straggler", ""),
    ]  # fmt: skip
    assert (ranked[0].upper_ns, ranked[0].lower_ns) == (370, 185), "what the straggler claims is not counted again"
    assert [remedy.name for remedy, _ in top_remedies(ranked)] == ["bf16", "pack"]
    late, varies = rank(
        [
            finding("varies", {"idle.data": 100, "idle.host": 60, "caches": 20}, 90, within="late"),
            finding("late", {"idle.data": 100}, 50),
        ],
        {"idle.data": 100, "idle.host": 100},
    )
    assert (late.name, late.claims["idle.data"], late.lower_ns) == ("late", 100, 50), "its claim does not shrink"
    assert varies.claims == {"idle.host": 60, "caches": 20} and varies.lower_ns == 40
    same = rank([finding("busy", {"idle": 110}, 50, within="late"), finding("late", {"straggler": 100}, 90)], {})
    assert [(item.name, item.within) for item in same] == [("late", ""), ("busy", "late")]


def test_a_finding_within_one_within_another_is_not_lost() -> None:
    items = [
        finding("inner", {"idle": 40}, 10, within="part"),
        finding("part", {"idle": 90}, 80, within="whole"),
        finding("whole", {"idle": 100}, 10),
    ]
    assert [(item.name, item.within) for item in rank(items, {})] == [
        ("whole", ""), ("part", "whole"), ("inner", "whole"),
    ]  # fmt: skip


def test_a_finding_within_one_that_is_absent_stands_alone() -> None:
    (alone,) = rank([finding("part", {"idle": 90}, 80, within="whole")], {"idle": 100})
    assert alone.within == ""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 10**9), min_size=1), st.floats(0, 1)),
        max_size=8,
    ),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 10**9)),
)
def test_no_class_is_claimed_beyond_what_there_is(
    items: list[tuple[dict[str, int], float]], available: dict[str, int]
) -> None:
    found = [finding(str(i), claims, int(share * sum(claims.values()))) for i, (claims, share) in enumerate(items)]
    ranked = rank(found, available)
    for path, ns in available.items():
        assert sum(item.claims.get(path, 0) for item in ranked) <= ns + len(ranked)
    lows = [item.lower_ns for item in ranked]
    assert lows == sorted(lows, reverse=True)
    assert all(item.lower_ns <= item.upper_ns for item in ranked)


@pytest.mark.parametrize(("claims", "lower"), [({"idle": -1}, 0), ({"idle": 5}, 6), ({"idle": 5}, -1)])
def test_planted_impossible_gains_are_refused(claims: dict[str, int], lower: int) -> None:
    with pytest.raises(ValueError, match="finding"):
        finding("a", claims, lower)


def test_one_remedy_answers_several_findings_once() -> None:
    items = rank(
        [finding("a", {"x": 100}, 50), finding("b", {"y": 300}, 100), finding("c", {"z": 9}, 9, remedy="bf16")], {}
    )
    remedies = top_remedies(items)
    assert [remedy.name for remedy, _ in remedies] == ["pack", "bf16"]
    assert remedies[0][0].gain == pytest.approx((0.15, 0.4))


def test_every_remedy_changes_run_file_keys_that_exist_and_names_the_setting_outside() -> None:
    keys = all_keys()
    for remedy in REMEDIES.values():
        assert set(remedy.change) <= set(keys), remedy.name
        assert len(remedy.setting) > 10 and remedy.check


def test_a_planted_second_registration_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        register("pack", (), {}, "", "")


def test_tune_tries_only_registered_remedies_and_the_loss_names_its_key() -> None:
    from headway.tune import registry

    named = re.findall(r'predict\(\s*"([\w-]+)"', Path(registry.__file__).read_text())
    assert len(named) == len(registry.DATA + registry.COMPUTE) and set(named) <= set(REMEDIES)
    assert REMEDIES["fuse-loss"].change == {"model.fuse": "auto"}
