"""What the findings of a trace are made from: the job, one device to look at closely, and what the user said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headway.diagnose.facts import JobFacts
from headway.diagnose.finding import Finding
from headway.diagnose.view import View


@dataclass(frozen=True)
class Case:
    """One job's traces. `view` is the busiest device of the rank that is looked at closely.

    memory_free: share of the device's memory that no step used, 0 to 1, where it is known (run folder, snapshot).
    """

    job: JobFacts
    view: View
    memory_free: float | None = None
    memory_text: str = ""


Finder = Callable[[Case], Iterator[Finding]]


def case_of(job: JobFacts, memory_free: float | None = None, memory_text: str = "") -> Case:
    """Looks closely at the rank that waits least: its own time is what the job's step takes."""
    rank = min(job.ranks, key=lambda item: (item.device().shares.exposed_comm_ns, item.rank))
    return Case(job, View(rank, rank.device()), memory_free, memory_text)
