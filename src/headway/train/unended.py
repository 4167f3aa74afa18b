"""A session without an end: all was killed at once, and nobody was left to write it down. The next start does, and
ends what is left of it. So it does after a restart by torchrun, which writes nothing down."""

from __future__ import annotations

from headway.account.events import Incident
from headway.guard.control import Control
from headway.guard.deaths import FAILED
from headway.guard.orphans import end_stopped
from headway.record.folder import RunFolder
from headway.record.incidents import read_incidents
from headway.record.sessions import History, read_history
from headway.train.reporter import Reporter

KILLED = "run killed"


def tell_of_the_session_before(folder: RunFolder, step: int, reporter: Reporter, control: Control, anew: bool) -> None:
    """Adds an incident for the newest session in the run folder, where it neither ended nor was its death written down.

    `step`: the one that this start goes on from. anew: a launcher that writes nothing down has started the ranks again,
    so a session that failed counts too. Call it on all ranks, before this session's first line.
    """
    if control.is_main:
        history = read_history(folder)
        told = [item.time for item in read_incidents(folder.incidents).items if is_an_end(item)]
        found = unended(history, step, told, failed_too=anew)
        if found is not None:
            last, lost, seconds = found
            failed = history.sessions[-1].end is not None
            how = "failed" if failed else "has no end"
            who = "launcher and ranks, or their machine, died" if not anew else "its launcher started all ranks again"
            hole = f"; nothing is written of steps {last + 1} to {step}, which it made" if step > last else ""
            reporter.incident(
                FAILED if failed else KILLED,
                last + 1,
                f"the session before {how}: {who} behind step {last}{hole}",
                f"restarted from step {step}",
                seconds,
                steps_lost=lost,
            )


def tell_of_checkpoints_gone(folder: RunFolder, reporter: Reporter, control: Control) -> str:
    """For a start that found no checkpoint: adds an incident where the run has made some, and returns what to say;
    empty for a run that has not. Call it on all ranks."""
    if not control.is_main:
        return ""
    made = read_history(folder).checkpoints
    if not made:
        return ""
    newest = max(made, key=lambda line: line.time)
    evidence = (
        f"every checkpoint of this run is gone: it has told of {len(made)}, the newest of step {newest.step}, and none "
        f"is in {folder.checkpoints}, in memory or in a store"
    )
    action = "began anew from step 0"
    reporter.incident("checkpoint rejected", newest.step, evidence, action)
    return f"checkpoints: {evidence}; {action}"


def is_an_end(incident: Incident) -> bool:
    """Whether a line says why a session ended."""
    return incident.fault == "stopped" or incident.action.startswith(("restarted", "stopped"))


def end_what_is_left(folder: RunFolder, reporter: Reporter) -> None:
    """Ends stopped processes of sessions before on this machine, with an incident for each. One rank a machine."""
    for evidence in end_stopped(folder.root):
        reporter.local_incident("checkpoint saver died", evidence, "went on: it had published nothing more", 0.0)


def unended(history: History, step: int, told: list[float], failed_too: bool = False) -> tuple[int, int, float] | None:
    """(last step, steps to be made again, seconds that those took) of the newest session, None where it ended or its
    death is known. `told`: when deaths were written down, seconds since the epoch; failed_too: an end that says
    "failed" is none."""
    if not history.sessions:
        return None
    session = history.sessions[-1]
    if session.end is not None and not (failed_too and session.end.reason == "failed"):
        return None
    heard = session.steps[-1].time if session.steps else session.start.time
    if any(time >= heard for time in told):
        return None
    last = session.steps[-1].step if session.steps else session.start.resumed_from
    again = [line for line in session.steps if line.step > step]
    return last, max(0, last - step), sum(line.wall_ns for line in again) / 1e9
