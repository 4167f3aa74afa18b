"""Joins the lines of all sessions of a run: which copy of a step counts, and what was done twice.

Knows order and repetition, not what a value means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headway.account.events import CheckpointLine, EvalLine, Line, SessionEnd, SessionStart, StepLine, TraceLine
from headway.record.folder import RunFolder
from headway.record.jsonl import read_jsonl


@dataclass
class Session:
    """One process group's life, from its start line to the next start line.

    start_lost: the start line could not be read; `start` then says only where the session's first line stood.
    """

    start: SessionStart
    steps: list[StepLine] = field(default_factory=list)
    end: SessionEnd | None = None
    start_lost: bool = False


@dataclass
class History:
    """Everything metrics.jsonl says. `kept` holds the copy of each step that is in the final weights."""

    sessions: list[Session] = field(default_factory=list)
    evals: list[EvalLine] = field(default_factory=list)
    checkpoints: list[CheckpointLine] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    traces: list[TraceLine] = field(default_factory=list)

    @property
    def kept(self) -> list[StepLine]:
        last: dict[int, StepLine] = {}
        for session in self.sessions:
            for step in [step for step in last if step > session.start.resumed_from]:
                del last[step]
            last.update({line.step: line for line in session.steps})
        return [last[step] for step in sorted(last)]

    @property
    def lost(self) -> list[StepLine]:
        """Steps that a later session did again."""
        kept = {id(line) for line in self.kept}
        return [line for session in self.sessions for line in session.steps if id(line) not in kept]


def read_history(folder: RunFolder | Path) -> History:
    """Reads a run folder's metrics.jsonl. A torn line is in `bad`, never an error."""
    path = folder.metrics if isinstance(folder, RunFolder) else folder
    lines = read_jsonl(path, Line)
    history = History(bad=lines.bad)
    for line in lines.items:
        _file_line(history, line)
    return history


def _file_line(history: History, line: Line) -> None:
    if isinstance(line, SessionStart):
        history.sessions.append(Session(line))
    elif isinstance(line, EvalLine):
        history.evals.append(line)
    elif isinstance(line, CheckpointLine):
        history.checkpoints.append(line)
    elif isinstance(line, TraceLine):
        history.traces.append(line)
    elif isinstance(line, StepLine):
        _session_of(history, line).steps.append(line)
    elif isinstance(line, SessionEnd):
        _session_of(history, line).end = line


def _session_of(history: History, line: StepLine | SessionEnd) -> Session:
    """The session a line belongs to. One whose start line was damaged gets a stand-in, or its steps would vanish."""
    if not history.sessions or history.sessions[-1].start.session != line.session:
        before = line.step - isinstance(line, StepLine)
        start = SessionStart(
            session=line.session, time=line.time, resumed_from=before, world_size=0, steps=0, device=""
        )  # fmt: skip
        history.sessions.append(Session(start, start_lost=True))
    return history.sessions[-1]
