"""How often to save: Young's and Daly's intervals and the exact optimum for Poisson failures.

One save stops training for `cost_s`, failures arrive with a mean of `mtbf_s` between them, both in seconds. An interval
is seconds of training between the end of one save and the start of the next. Scalars only, so that a plan, a trainer
and a report can call it without numpy.
"""

from __future__ import annotations

import math


def young(cost_s: float, mtbf_s: float) -> float:
    """First order, sqrt(2 C M) (Young, CACM 17(9), 1974). Good while the cost is far below the MTBF."""
    _positive(mtbf_s, cost_s)
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Daly's higher-order estimate (FGCS 22, 2006, eq. 37); M itself once a save costs more than two MTBFs."""
    _positive(mtbf_s, cost_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def exact(cost_s: float, mtbf_s: float) -> float:
    """The interval that minimises expected wall clock under Poisson failures, M (1 + W0(-exp(-1 - C/M))).

    It is the root of (1 - t/M) exp((t + C)/M) = 1, the derivative of the expected time per second of training, which
    is proportional to (exp((t + C)/M) - 1) / t. Time to recover and the lag of an asynchronous save multiply that
    expectation by a constant, so they do not move the optimum.
    """
    _positive(mtbf_s, cost_s)
    ratio = cost_s / mtbf_s
    if ratio < 1e-32:  # Young's formula is exact to the last digit here, and a cost of zero is saved all the time
        return young(cost_s, mtbf_s)
    return mtbf_s * _one_plus_w0(ratio)


def lambert_w0(x: float) -> float:
    """The principal branch of Lambert's W: the w >= -1 with w exp(w) = x. Newton's iteration on w + ln w or w exp w.

    Raises ValueError below -1/e, where no real w exists.
    """
    if not x >= -math.exp(-1):
        raise ValueError(f"Lambert's W has no real value at {x}, below -1/e")
    if x == 0:
        return 0.0
    branch = 2 * (1 + math.e * x)
    w = -1 + math.sqrt(max(0.0, branch)) if x < 0.5 else math.log1p(x)
    for _ in range(64):
        slope = math.exp(w) * (w + 1)
        if slope <= 0:  # on the branch point itself
            return w
        step = (w * math.exp(w) - x) / slope
        w = max(-1.0, w - step)
        if abs(step) <= 4e-16 * max(1.0, abs(w)):
            return w
    return w


def _one_plus_w0(ratio: float) -> float:
    """1 + W0(-exp(-1 - r)) for r > 0 without the cancellation near the branch point.

    With y = 1 + W the equation reads y + ln(1 - y) = -r. For small r the series of y starts with sqrt(2 r); Newton on
    this form keeps every digit where `1 + lambert_w0` would have lost half of them.
    """
    if ratio > 35:  # a save longer than any gap between failures: exp(-1 - r) is below the last digit of 1
        return 1.0
    y = math.sqrt(2 * ratio) * (1 - math.sqrt(2 * ratio) / 3) if ratio < 0.2 else 1 - math.exp(-1 - ratio)
    for _ in range(64):
        # d/dy [y + ln(1 - y)] = -y / (1 - y)
        value = y + math.log1p(-y) + ratio
        step = -value * (1 - y) / y
        y = min(max(y - step, y / 2), (1 + y) / 2)
        if abs(step) <= 2e-16 * y:
            break
    return y


def _positive(mtbf_s: float, cost_s: float) -> None:
    if not (mtbf_s > 0 and math.isfinite(mtbf_s)) or not (cost_s >= 0 and math.isfinite(cost_s)):
        raise ValueError(f"an interval needs a positive MTBF and a cost of zero or more, not {mtbf_s} and {cost_s} s")
