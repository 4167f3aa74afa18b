"""Tells people of incidents: by webhook or command, once for many of a kind, and never so that training waits.

Each alert is sent by a small process of its own: it outlives a rank that is about to die, and a receiver that does not
answer holds up nobody. (Not by a thread: the supervisor must have none while it forks ranks.)
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from headway.account.events import Incident
from headway.config.alerts import AlertConfig, AlertsConfig

_HOUR_S = 3600.0


class Alerts:
    """A listener of the ledger. `run`: the name that alerts carry; `clock`: monotonic seconds."""

    def __init__(self, config: AlertsConfig, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._run, self._clock = config, run, clock
        self._known: set[str] = set()
        self._last: dict[tuple[str, str], float] = {}
        self._held: dict[tuple[str, str], int] = {}
        self._sent: list[deque[float]] = [deque() for _ in config.to]
        self._senders: list[subprocess.Popen[bytes]] = []

    def __call__(self, incident: Incident) -> None:
        """Sends the incident, unless it is an amendment, a repetition, or one too many in this hour."""
        self._senders = [sender for sender in self._senders if sender.poll() is None]
        if incident.id in self._known:
            return
        self._known.add(incident.id)
        kind, now = (incident.fault, incident.host), self._clock()
        if now - self._last.get(kind, -float("inf")) < self._config.repeat_s:
            self._held[kind] = self._held.get(kind, 0) + 1
            return
        self._last[kind] = now
        repeated = self._held.pop(kind, 0)
        for place, receiver in enumerate(self._config.to):
            if (not receiver.faults or incident.fault in receiver.faults) and self._allowed(place, now):
                self._start(receiver, incident, repeated)

    def wait(self, timeout_s: float = 30.0) -> None:
        """For the end of a program: lets alerts that are on their way arrive."""
        deadline = time.monotonic() + timeout_s
        for sender in self._senders:
            try:
                sender.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def _allowed(self, place: int, now: float) -> bool:
        sent = self._sent[place]
        while sent and now - sent[0] > _HOUR_S:
            sent.popleft()
        if len(sent) >= self._config.per_hour:
            return False
        sent.append(now)
        return True

    def _start(self, receiver: AlertConfig, incident: Incident, repeated: int) -> None:
        content = payload(receiver.shape if receiver.webhook else "plain", self._run, incident, repeated)
        order = {"webhook": receiver.webhook, "command": receiver.command, "payload": content}
        sender = subprocess.Popen(
            [sys.executable, "-m", "headway.watch.send_alert"], stdin=subprocess.PIPE, start_new_session=True
        )
        assert sender.stdin is not None
        # At most some kilobytes: the pipe takes them without waiting for the process to read.
        sender.stdin.write(orjson.dumps(order))
        sender.stdin.close()
        self._senders.append(sender)


def payload(shape: str, run: str, incident: Incident, repeated: int = 0) -> dict[str, Any]:
    """What is sent: the ledger's line with the run's name, or a text in the form of a chat service."""
    if shape == "plain":
        return {**msgspec.to_builtins(incident), "run": run, "repeated": repeated}
    text = message(run, incident, repeated)
    if shape == "slack":
        return {"text": text}
    return {"msgtype": "text", "text": {"content": text}}


def message(run: str, incident: Incident, repeated: int = 0) -> str:
    """The incident in two lines or three, for a chat."""
    where = incident.host if incident.rank is None else f"{incident.host}, rank {incident.rank}"
    lines = [
        f"Headway run {run}: {incident.fault} at step {incident.step} ({where})",
        _clip(incident.evidence, 1500),
        f"Action: {incident.action}" if incident.action else "",
        f"The same {repeated} times more since the last alert" if repeated else "",
    ]
    return "\n".join(line for line in lines if line)


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
