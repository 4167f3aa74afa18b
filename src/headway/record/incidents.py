"""The ledger's file, incidents.jsonl: appended by any process of a run, read with the newest line of every id."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from headway.account.events import Incident
from headway.record.jsonl import JsonlWriter, Lines, read_jsonl


def append_incident(path: Path, incident: Incident) -> None:
    """Adds one line and makes it durable. Raises OSError where it cannot be written.

    Ranks, supervisor and savers of one run call it at the same moment: the lock keeps their lines apart, also where
    the file system has no atomic append, and keeps a reader of the torn-line check from seeing half a line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        alone = False
        with contextlib.suppress(OSError):  # a file system without locks: a single write is still one line
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            alone = True
        writer = JsonlWriter(path)
        before = os.fstat(descriptor).st_size
        try:
            writer.append(incident)
            writer.sync()
        except OSError:
            # It will be tried again: half a line would read as damage. Without the lock others may have written
            # behind it, and theirs would be cut off with it.
            with contextlib.suppress(OSError):
                if alone:
                    os.ftruncate(descriptor, before)
            raise
        finally:
            writer.close()
    finally:
        os.close(descriptor)  # lets go of the lock


def read_incidents(path: Path) -> Lines[Incident]:
    """Every incident once, in the order of their first lines, as its newest line has it. A torn line is in `bad`."""
    lines = read_jsonl(path, Incident)
    newest: dict[str, Incident] = {}
    for incident in lines.items:
        newest[incident.id] = incident  # an id keeps the place of its first line
    return Lines(list(newest.values()), lines.bad)
