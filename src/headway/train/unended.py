"""A session without an end: all was killed at once, and nobody was left to write it down. The next start does, and
ends what is left of it."""

from __future__ import annotations

from headway.guard.control import Control
from headway.guard.orphans import end_stopped
from headway.record.folder import RunFolder
from headway.record.incidents import read_incidents
from headway.record.sessions import History, read_history
from headway.train.reporter import Reporter

KILLED = "run killed"


def tell_of_the_session_before(folder: RunFolder, step: int, reporter: Reporter, control: Control) -> None:
    """Adds an incident for the newest session in the run folder, where it neither ended nor was its death written down.

    `step`: the one that this start goes on from. Call it on all ranks, before this session's first line.
    """
    if control.is_main:
        found = unended(read_history(folder), step, [item.time for item in read_incidents(folder.incidents).items
                                                     if item.action.startswith(("restarted", "stopped"))])  # fmt: skip
        if found is not None:
            last, lost, seconds = found
            reporter.incident(
                KILLED,
                last + 1,
                f"the session before has no end: launcher and ranks, or their machine, died behind step {last}",
                f"restarted from step {step}",
                seconds,
                steps_lost=lost,
            )


def end_what_is_left(folder: RunFolder, reporter: Reporter) -> None:
    """Ends stopped processes of sessions before on this machine, with an incident for each. One rank a machine."""
    for evidence in end_stopped(folder.root):
        reporter.local_incident("checkpoint saver died", evidence, "went on: it had published nothing more", 0.0)


def unended(history: History, step: int, told: list[float]) -> tuple[int, int, float] | None:
    """(last step, steps to be made again, seconds that those took) of the newest session, None where it ended or its
    death is known. `told`: when deaths were written down, seconds since the epoch."""
    if not history.sessions or history.sessions[-1].end is not None:
        return None
    session = history.sessions[-1]
    heard = session.steps[-1].time if session.steps else session.start.time
    if any(time >= heard for time in told):
        return None
    last = session.steps[-1].step if session.steps else session.start.resumed_from
    again = [line for line in session.steps if line.step > step]
    return last, max(0, last - step), sum(line.wall_ns for line in again) / 1e9
