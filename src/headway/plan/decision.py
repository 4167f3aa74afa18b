"""A plan as a decision: days, GPU-hours, dollars; what one change is worth. Steps only: see `goodput` for failures."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headway.account.errors import UserError
from headway.plan.predict import Prediction


@dataclass(frozen=True)
class Cost:
    """What training on `tokens` takes: seconds of steps, GPU-hours, US dollars (None where no price is known)."""

    tokens: float
    seconds: float
    gpu_hours: float
    dollars: float | None

    @property
    def days(self) -> float:
        return self.seconds / 86400


def cost_of(found: Prediction, tokens: float) -> Cost:
    """Time and money of `tokens` at the predicted speed, nothing lost to failures."""
    seconds = found.run_seconds(tokens)
    hours = seconds / 3600 * found.cluster.gpus
    price = found.cluster.price
    return Cost(tokens, seconds, hours, None if price is None else hours * price)


def parse_deadline(text: str) -> float:
    """`30d`, `12h` or a bare number of days, in seconds. Raises UserError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([dhw]?)\s*", text)
    if not match or float(match[1]) <= 0:
        raise UserError(f"--deadline {text!r}: give a time such as 30d, 12h or 6w")
    return float(match[1]) * {"": 86400, "d": 86400, "h": 3600, "w": 7 * 86400}[match[2]]


def bottlenecks(found: Prediction) -> list[tuple[str, float]]:
    """Terms and the share of the step each takes, largest first, zeros left out."""
    terms = sorted(found.terms.items(), key=lambda item: -item[1])
    return [(name, seconds / found.step_s) for name, seconds in terms if seconds > 0]


def loses(winner: Prediction, other: Prediction) -> list[tuple[str, float]]:
    """Where `other` loses to `winner`: seconds by term, largest loss first; what it wins back has a minus."""
    gaps = [(name, other.terms[name] - winner.terms[name]) for name in winner.terms]
    return sorted((gap for gap in gaps if abs(gap[1]) > 1e-6), key=lambda gap: -gap[1])
