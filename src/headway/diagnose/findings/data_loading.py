"""The step waits for its batch: always (starvation) or now and then (jitter)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headway.diagnose import cold
from headway.diagnose.case import Case
from headway.diagnose.finding import Finding
from headway.diagnose.view import ms

NOTABLE = 0.02
_JITTER = 3.0
_HANDED_OVER, _SAME_CORES = 0.95, 0.5
_SWITCHED_NS = 1_000_000  # a wait in which another process surely gets the core


def find(case: Case) -> Iterator[Finding]:
    view = case.view
    waited = view.idle.get("data", 0)
    rows = view.device.steps.rows
    walls = [row.shares.wall_ns for row in rows] or [view.wall_ns]
    waits = [row.shares.idle.get("data", 0) for row in rows] or [waited]
    if waited < NOTABLE * view.wall_ns:
        return
    names = [name for name in view.rank.names if "DataLoader" in name][:2]
    seen = f" under {', '.join(names)}" if names else ""
    what = "device idles" if view.on_gpu else "loop waits"
    text = f"the {what} {ms(waited)}{seen} while the batch is made"
    yield data_finding(waits, walls, view.wall_ns, waited, "idle.data", text, view.on_gpu)


def data_finding(
    waits: Sequence[int], walls: Sequence[int], wall_ns: int, waited: int, claim: str, seen: str, on_gpu: bool
) -> Finding:
    """Starvation or jitter, from the waits and lengths of steps (ns).

    Upper bound: all of the wait, on a CPU also what it leaves cold. Surely won: min(wait, step / 2) step by step, less
    a twentieth for handing batches over. Where the wait is the shorter half, one loader that works ahead hides it under
    the rest. Where it is the longer, the loader is the bottleneck and stays it: two loaders (or twice as many as there
    are) make two batches in the time of one, and the step is half as long. Where the loop computes on a CPU, half of
    that, since loaders may need the cores that compute.
    """
    typical, worst = float(np.median(waits)), max(waits)
    jitter = len(waits) >= 4 and worst > _JITTER * max(typical, 1e5) and typical < 0.5 * np.mean(waits)
    hidden = sum(min(wait, wall // 2) for wait, wall in zip(waits, walls, strict=True))
    total = max(1, sum(waits))
    long = sum(wait >= _SWITCHED_NS for wait in waits)
    evidence = (
        seen,
        f"{ms(typical)} a step at the median, {ms(worst)} at most, over {len(waits)} step{'s' * (len(waits) > 1)}",
    )
    return Finding(
        name="data-jitter" if jitter else "data-starvation",
        title="loading is uneven: some batches come late" if jitter else "the step waits for data",
        claims={claim: waited} | ({} if on_gpu else {"caches": cold.after_waits(long, waited, wall_ns)}),
        lower_ns=min(waited, int((_HANDED_OVER if on_gpu else _SAME_CORES) * waited * hidden / total)),
        wall_ns=wall_ns,
        evidence=evidence,
        check="time the loader alone, without the model: batches a second against steps a second",
        remedy="steady-loading" if jitter else "load-ahead",
        symptom="unstable step time" if jitter else "",
    )
