"""Transfer of the learning rate against the published rules by hand; the loss law against constants it was made from."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.plan.scaling_law import Law, fit_law, read_losses
from headway.plan.transfer import Scale, scale_of, transfer
from headway.plan.workload import load_model

TRUE = Law(1.69, 406.4, 410.7, 0.34, 0.28)  # Hoffmann et al. 2022
SIZES = [(n, n * ratio) for n in (5e7, 1e8, 2e8, 4e8, 8e8, 1.6e9) for ratio in (5, 10, 20, 40, 80)]
N, D = np.array(SIZES).T
LOSS = np.array([TRUE.loss(n, d) for n, d in SIZES])
TARGET = (7e10, 1.4e12)


def groups(scale: Scale, lr: float = 1e-3) -> dict[str, tuple[float, float, float]]:
    return {
        one.name.split(",")[0].split(" (")[0]: (one.lr, one.init, one.multiplier) for one in transfer(scale, lr).groups
    }


def test_width_follows_table_8_of_mup() -> None:
    found = groups(Scale(width=4, depth=1, head_dim=1, batch=1))
    assert found["matrices inside layers"] == (pytest.approx(1e-3 / 4), pytest.approx(0.5), 1)
    assert found["embedding"] == (pytest.approx(1e-3), 1, 1)
    assert found["output head"] == (pytest.approx(1e-3), 1, pytest.approx(0.25))


def test_depth_and_batch_follow_the_square_root() -> None:
    deep = groups(Scale(1, 4, 1, 1))
    assert deep["what a layer adds to the residual stream"] == (pytest.approx(5e-4), 1, pytest.approx(0.5))
    large = transfer(Scale(1, 1, 1, 4), 1e-3)
    assert (
        large.groups[0].lr == pytest.approx(2e-3)
        and large.beta1 == pytest.approx(0.6)
        and large.beta2 == pytest.approx(0.8)
    )
    assert large.eps == pytest.approx(0.5) and not large.beyond
    huge = transfer(Scale(1, 1, 1, 64), 1e-3)
    assert huge.beyond and huge.beta1 == 0.9 and any("upper bound" in line for line in huge.lines())


@settings(deadline=None)
@given(st.tuples(*[st.floats(0.25, 4)] * 4), st.tuples(*[st.floats(0.25, 2)] * 4))
def test_two_transfers_are_one(first: tuple, second: tuple) -> None:
    both = Scale(*[a * b for a, b in zip(first, second, strict=True)])
    at_once = transfer(both, 1e-3).groups
    half = transfer(Scale(*first), 1e-3).groups
    for place, one in enumerate(half):
        assert transfer(Scale(*second), one.lr).groups[place].lr == pytest.approx(at_once[place].lr)
    same = transfer(Scale(1, 1, 1, 1), 1e-3)
    assert all((one.lr, one.init, one.multiplier) == (1e-3, 1, 1) for one in same.groups) and same.attention == 1


def test_the_rate_and_the_decay_of_matrices_keep_their_product() -> None:
    found = transfer(Scale(4, 2, 1, 9), 1e-3)
    assert found.groups[1].lr * found.weight_decay == pytest.approx(1e-3)


def test_scales_of_two_models() -> None:
    small, large = load_model("llama3.2-1b")[1], load_model("llama3-8b")[1]
    found = scale_of(small, large, 1e6, 4e6)
    assert (found.width, found.depth, found.head_dim, found.batch) == (2, 2, 2, 4)


def test_the_fit_recovers_the_constants_that_made_the_runs() -> None:
    fit = fit_law(N, D, LOSS, TARGET, copies=5)
    for name in ("e", "a", "b", "alpha", "beta"):
        assert getattr(fit.law, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    assert fit.error < 1e-9 and fit.reach == (pytest.approx(7e10 / 1.6e9), pytest.approx(1.4e12 / 1.28e11))


def test_noise_widens_the_band_and_the_band_holds_the_truth() -> None:
    held, widths = 0, []
    for seed in range(5):
        noise = np.random.default_rng(seed).normal(0, 0.002, len(N))
        fit = fit_law(N, D, LOSS * np.exp(noise), TARGET, copies=25, seed=seed)
        low, high = fit.band(*TARGET)
        held += low <= TRUE.loss(*TARGET) <= high
        widths.append(high - low)
    assert held >= 4  # nominally 90 % of 5
    assert 0.005 < np.median(widths) < 0.1


def test_an_outlier_does_not_pull_the_fit() -> None:
    spoilt = LOSS.copy()
    spoilt[7] *= 1.3
    fit = fit_law(N, D, spoilt, TARGET, copies=2)
    assert fit.law.loss(*TARGET) == pytest.approx(TRUE.loss(*TARGET), rel=0.005)
    assert fit.error > 0.2


def test_what_the_losses_do_not_tell_is_said() -> None:
    """Equal losses but for noise, and losses that depend on one of the two alone."""
    assert not fit_law(N, D, LOSS, TARGET, copies=1).warnings
    noise = np.exp(np.random.default_rng(0).normal(0, 1e-5, len(N)))
    for losses, named in ((3.1 * noise, ["N", "D"]), (1.69 + 410.7 / D**0.28, ["N"]), (1.69 + 406.4 / N**0.34, ["D"])):
        said = fit_law(N, D, losses, TARGET, copies=1).warnings
        assert [re.findall(r"fall with (\w)", text)[0] for text in said] == named


def test_the_best_split_is_a_minimum() -> None:
    flops = 6 * TARGET[0] * TARGET[1]
    n, d = TRUE.best_split(flops)
    assert 6 * n * d == pytest.approx(flops)
    for factor in (0.8, 0.95, 1.05, 1.25):
        assert TRUE.loss(n * factor, d / factor) > TRUE.loss(n, d)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("N,D\n1,2\n", "column 'loss' is missing"),
        ("N,D,loss\n1e8,x,3\n", ":2: column d: x is not"),
        ("N,D,loss\n", "a header and no rows"),
        ("N,D,loss\n" + "1e8,1e9,3\n" * 9, "column N holds 1 values"),
        ("N,D,loss\n1e8,1e9,3\n", "at least 6"),
        (
            "N,D,loss\n" + "".join(f"{n}e8,{d}e9,3.1\n" for n in (1, 2, 4) for d in (1, 2, 4)),
            "loss is 3.1 in every run",
        ),
        ("N,D,loss\n1e8,1e9,nan\n", "is not a positive number"),
    ],
)
def test_files_without_a_law_say_why(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        fit_law(*read_losses(path), TARGET)


def test_a_rate_that_is_none_is_refused() -> None:
    for wrong in (0.0, -1e-3, math.nan, math.inf):
        with pytest.raises(UserError, match="--lr"):
            transfer(Scale(1, 1, 1, 1), wrong)
