"""Why a plan wins: its terms by size, and where another loses to it, second by second."""

from __future__ import annotations

from headway.plan.predict import Prediction


def bottlenecks(found: Prediction) -> list[tuple[str, float]]:
    """Terms and the share of the step each takes, largest first, zeros left out."""
    terms = sorted(found.terms.items(), key=lambda item: -item[1])
    return [(name, seconds / found.step_s) for name, seconds in terms if seconds > 0]


def loses(winner: Prediction, other: Prediction) -> list[tuple[str, float]]:
    """Where `other` loses to `winner`: seconds by term, largest loss first; what it wins back has a minus."""
    gaps = [(name, other.terms[name] - winner.terms[name]) for name in winner.terms]
    return sorted((gap for gap in gaps if abs(gap[1]) > 1e-6), key=lambda gap: -gap[1])


def communication(found: Prediction) -> float:
    """Seconds of a step in which devices wait for communication: TP, DP, PP, CP, EP and what it slows."""
    return sum(found.terms[name] for name in ("tp", "dp", "pp", "cp", "ep"))
