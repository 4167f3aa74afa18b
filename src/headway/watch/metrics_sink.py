"""The run folder's own sink: every line of the run, in full, in metrics.jsonl."""

from __future__ import annotations

from headway.account.events import CheckpointLine, Line, SessionEnd
from headway.record.folder import RunFolder
from headway.record.jsonl import PatientWriter


class MetricsSink:
    """Writes metrics.jsonl. A kill can tear at most the line being written; the next session starts on a fresh one.
    A full disk ends no run: lines wait for room in memory. A run that is killed meanwhile has lost them, also those of
    steps that a checkpoint elsewhere (another disk, a neighbour's memory) holds: its next session then goes on behind a
    hole."""

    def __init__(self, folder: RunFolder) -> None:
        self._writer = PatientWriter(folder.metrics)

    def tell(self, line: Line) -> None:
        self._writer.append(line)
        if isinstance(line, CheckpointLine | SessionEnd):
            # A checkpoint should not outlive the lines of its own steps, or a resume finds a hole before it.
            self._writer.sync()

    def close(self) -> None:
        self._writer.close()
