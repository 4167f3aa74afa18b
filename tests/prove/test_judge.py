"""Steps that are not finite: they neither widen the band for good nor pass unseen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from headway.prove.judge import Verdict, judge
from headway.prove.report import lines, record
from headway.prove.trajectory import Trajectory, chosen_steps
from headway.prove.verify import Verified

INF, NAN = math.inf, math.nan


def made(norms: Sequence[float], losses: Sequence[float] | None = None, way: float = 1.0) -> Trajectory:
    """A training of one tensor whose gradient has these lengths."""
    losses = losses or [2.0] * len(norms)
    direction = torch.ones(16, dtype=torch.float64) / 4
    gradients = {step: {"head.weight": norms[step] * direction} for step in chosen_steps(len(norms))}
    return Trajectory(
        "x", list(losses), list(norms), gradients, {"head.weight": way * direction}, 2.0, [100] * len(norms), 100
    )


def told(a: Trajectory, b: Trajectory, twin: Trajectory) -> Verdict:
    verdict = judge(a, b, twin)
    found = Verified(verdict, a, b, twin, (), len(a.losses))
    assert record(found)["left_out"] == list(verdict.left_out)
    text = "\n".join(lines(found))
    assert all(f"left out: {what}" in text for what in verdict.left_out)
    return verdict


@pytest.mark.parametrize("twin", [(INF, 1, 1, 1), (1, 1, 1, 1)], ids=["as A", "otherwise"])
def test_an_overflow_of_both_is_left_out_and_the_rest_is_held_as_before(twin: Sequence[float]) -> None:
    """The band was infinite from there on: a norm five times as long was the same training."""
    a, again = made((INF, 1, 1, 1)), made(twin)
    same = told(a, made((INF, 1, 1, 1)), again)
    assert same.same and same.left_out == ("step 1: not finite in A and in B",)
    assert not told(a, made((INF, 1, 5, 1)), again).same  # step 3 is sampled
    assert [test.name for test in told(a, made((INF, 5, 1, 1)), again).failed] == ["gradient norm per step"]


def test_losses_that_are_no_number_pass_no_other_ones() -> None:
    a = made((1, 1, 1), (1.0, NAN, NAN))
    assert not told(a, made((1, 1, 1), (1.0, 3.0, 9.0)), a).same
    assert told(a, a, a).same and len(told(a, a, a).left_out) == 2


@pytest.mark.parametrize("side", ["A", "B"])
def test_an_overflow_of_one_side_is_another_training(side: str) -> None:
    fine, over = made((1, 1, 1)), made((INF, 1, 1))
    a, b = (over, fine) if side == "A" else (fine, over)
    assert not told(a, b, a).same and not told(a, b, fine).same


def test_where_only_the_second_run_overflows_the_gradients_of_that_step_are_not_judged() -> None:
    a = made((1, 1, 1))
    found = told(a, a, made((INF, 1, 1)))
    assert found.same and "A's second run" in found.left_out[0]


def test_nothing_finite_and_nothing_learned_is_no_proof() -> None:
    """It was a traceback: there was no layer that had moved."""
    over = made((INF, INF, INF), way=0.0)
    found = told(over, over, over)
    assert {test.name for test in found.failed} == {"gradient norm per step", "gradient per layer"}
