"""Two runs side by side: whether the second learns more slowly, and what was set otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from headway.diagnose.finding import Finding
from headway.diagnose.run_facts import RunFacts

# Of the loss; below this two seeds differ by as much.
NOTABLE = 0.01
_COMPRESSION = ("compress", "powersgd", "fp8", "quanti")


def slower_convergence(run: RunFacts, against: RunFacts) -> Iterator[Finding]:
    """`run` at the same number of trained tokens has a higher loss than `against`."""
    mine, other = _curve(run), _curve(against)
    if mine is None or other is None:
        return
    until = min(mine[0][-1], other[0][-1])
    points = np.linspace(until / 2, until, 16)
    loss = np.interp(points, *mine)
    behind = loss - np.interp(points, *other)
    mean = float(behind.mean())
    # Behind everywhere, not only on average: one bad batch is no slower convergence.
    if mean < NOTABLE * float(loss.mean()) or (behind > 0).mean() < 0.9:
        return
    changed = changed_settings(run.config, against.config)
    compressed = [text for text in changed if any(word in text.lower() for word in _COMPRESSION)]
    late = _tokens_behind(mine, other, until)
    yield Finding(
        name="slower-convergence-compressed" if compressed else "slower-convergence",
        title="it learns more slowly with compressed gradients" if compressed else "it learns more slowly",
        claims={"rework": int(late * run.wall_ns)},
        lower_ns=int(0.5 * late * run.wall_ns),
        wall_ns=run.wall_ns,
        evidence=(
            f"at {until:,.0f} trained tokens the loss is {mean:+.4f} above {against.folder.root.name}'s, "
            f"{late:.0%} of the tokens behind",
            *(compressed or changed[:6] or ["no setting differs: look at the data and the versions"]),
        ),
        check="held-out loss of both at the same number of trained tokens",
        remedy="less-compression" if compressed else "same-convergence",
        symptom="slower convergence after gradient compression" if compressed else "",
    )


def changed_settings(mine: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key: theirs → mine` for every setting that differs, names and paths left out."""
    found = []
    for key in sorted(set(mine) | set(other)):
        a, b = other.get(key), mine.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += changed_settings(b, a, f"{prefix}{key}.")
        elif a != b and f"{prefix}{key}" not in ("name", "out"):
            found.append(f"{prefix}{key}: {a} → {b}")
    return found


def _curve(run: RunFacts) -> tuple[np.ndarray, np.ndarray] | None:
    """(trained tokens, smoothed nll) over the kept steps; None for a run of fewer than 8."""
    lines = [line for line in run.history.kept if line.nll is not None and line.trained_tokens]
    if len(lines) < 8:
        return None
    tokens = np.cumsum([line.trained_tokens for line in lines]).astype(float)
    nll = np.array([line.nll for line in lines], float)
    width = max(1, len(nll) // 10)
    kernel = np.ones(width)
    smooth = np.convolve(nll, kernel, "same") / np.convolve(np.ones(len(nll)), kernel, "same")
    return tokens, smooth


def _tokens_behind(mine: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray], until: float) -> float:
    """Share of the tokens that the other run did not need for the loss that this one ends with, 0 to 1."""
    final = float(np.interp(until, *mine))
    reached = other[0][np.minimum.accumulate(other[1]) <= final]
    return max(0.0, 1 - float(reached[0]) / until) if len(reached) else 0.0
