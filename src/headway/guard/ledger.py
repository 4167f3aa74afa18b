"""The ledger of incidents: what happened, what was done about it, what it cost. Any rank and any process may write.

    ledger = Ledger(folder.incidents, rank=rank)
    found = ledger.record("hang", step, rank=3, evidence="no progress for 12 s in backward", action="restarted")
    ledger.amend(found, steps_lost=4, seconds_lost=9.5)

A ledger never ends a run: a line that cannot be written (full disk) is said on stderr, kept, and tried again
by `flush`.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from headway.account.events import Incident
from headway.record.incidents import append_incident
from headway.record.jsonl import complain

Listener = Callable[[Incident], None]
"""Told of every incident and of every amendment, e.g. to send an alert. Must not block; what it raises is dropped."""

_UNWRITTEN = 1000


class Ledger:
    """Writes to one run's incidents.jsonl. Not shared between threads; every process makes its own.

    `rank`: the rank that writes, None for the supervisor; `host`: default this machine's name.
    """

    def __init__(
        self, path: Path, *, rank: int | None = None, host: str | None = None, listeners: Iterable[Listener] = ()
    ) -> None:
        self.path = path
        self._rank = rank
        self._host = host or socket.gethostname()
        self._listeners = list(listeners)
        self._unwritten: deque[Incident] = deque(maxlen=_UNWRITTEN)
        self._said = False

    def record(
        self,
        fault: str,
        step: int,
        *,
        rank: int | None = None,
        host: str | None = None,
        phase: str = "",
        evidence: str = "",
        action: str = "",
        steps_lost: int = 0,
        seconds_lost: float = 0.0,
        detect_s: float | None = None,
        recover_s: float | None = None,
        link: str = "",
    ) -> Incident:
        """Adds a line, durable when this returns, and says it on stderr.

        `fault`: a short name that groups ("hang", "checkpoint failed"); what differs from case to case is `evidence`.
        `rank`, `host`: whom it is about, default the writer. `link`: a file that says more, below the run folder.
        Losses as in `Incident`; where they are known only later, `amend` the returned value.
        """
        incident = Incident(
            id=uuid.uuid4().hex[:12],
            fault=fault,
            step=step,
            time=time.time(),
            monotonic_ns=time.monotonic_ns(),
            host=host or self._host,
            rank=self._rank if rank is None else rank,
            evidence=evidence,
            action=action,
            steps_lost=steps_lost,
            seconds_lost=seconds_lost,
            link=link,
            phase=phase,
            detect_s=detect_s,
            recover_s=recover_s,
        )
        said = f"{fault}: {evidence}; {action}" if action else f"{fault}: {evidence}"
        complain(f"step {step}: {said}")
        self._add(incident)
        return incident

    def amend(self, incident: Incident, **changes: Any) -> Incident:
        """The same incident with other fields, e.g. the losses that are known once the run goes on."""
        changed = msgspec.structs.replace(incident, **changes)
        self._add(changed)
        return changed

    def _add(self, incident: Incident) -> None:
        self._unwritten.append(incident)
        self.flush()
        for listener in self._listeners:
            # An alert that cannot be sent is no reason to stop training.
            try:
                listener(incident)
            except Exception as error:
                complain(f"alert: {type(error).__name__}: {error}")

    def flush(self) -> bool:
        """Writes what could not be written before; False where it still cannot. Costs nothing where nothing waits."""
        try:
            while self._unwritten:
                append_incident(self.path, self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            if not self._said:
                complain(
                    f"{self.path}: not written ({error.strerror or error}); kept in memory and tried again at every "
                    "step: free room there"
                )
            self._said = True
            return False
        if self._said:
            self._said = False
            complain(f"{self.path}: written again")
        return True

    def close(self) -> None:
        """Tries once more what could not be written, and says what is lost."""
        if not self.flush():
            complain(f"{self.path}: {len(self._unwritten)} incidents are lost: there was no room for them to the end")
