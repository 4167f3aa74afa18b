"""An agent's line to the store, in a process of its own: a store that does not answer must not stop the agent.

The agent forks its ranks, so it may hold no threads; where it starts them as commands, the line is a thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import msgspec

from headway.guard.processes import can_fork, die_with_parent

_CHUNK = 1 << 16


class _Ask(msgspec.Struct):
    """One exchange: count `add` up by one, set `put`, and read those of `get` that exist."""

    put: dict[str, str]
    get: list[str]
    add: str = ""


class _Answer(msgspec.Struct):
    values: dict[str, str]
    number: int = 0


class Link:
    """One exchange at a time. `timeout_s`: the longest that connecting, or one operation of the store, may take.

    `closed`: the store was not there, or did not answer in time; a new link may be tried.
    """

    def __init__(self, address: str, port: int, timeout_s: float) -> None:
        self.closed = False
        self.heard_at = time.monotonic()
        self._rest = b""
        self._waiting = False
        self._ours, theirs = socket.socketpair()
        self._pid = 0
        if can_fork():
            ask = die_with_parent()
            self._pid = os.fork()
            if not self._pid:
                self._ours.close()
                _alone(theirs, address, port, timeout_s, ask)
            theirs.close()
        else:
            threading.Thread(
                target=_serve, args=(theirs, address, port, timeout_s), name="headway-link", daemon=True
            ).start()
        self._ours.setblocking(False)

    def exchange(
        self, put: Mapping[str, str], get: Sequence[str], wait_s: float, add: str = ""
    ) -> tuple[dict[str, str], int] | None:
        """Sends, unless the last answer is still awaited, and waits up to `wait_s` for an answer: values, and what
        `add` has counted to. None when none came; then call again with the same request."""
        if self.closed:
            return None
        if not self._waiting:
            self._send(msgspec.json.encode(_Ask(dict(put), list(get), add)) + b"\n")
            self._waiting = True
        deadline = time.monotonic() + wait_s
        while not self.closed:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            try:
                chunk = self._ours.recv(_CHUNK)
            except OSError:
                chunk = b""
            self.closed = not chunk
            self._rest += chunk
            line, end, rest = self._rest.partition(b"\n")
            if end:
                self._rest, self._waiting, self.heard_at = rest, False, time.monotonic()
                answer = msgspec.json.decode(line, type=_Answer)
                return answer.values, answer.number
        return None

    def _send(self, line: bytes) -> None:
        try:
            self._ours.setblocking(True)
            self._ours.sendall(line)  # nothing else is in the pipe: the other end reads it at once
        except OSError:
            self.closed = True
        finally:
            self._ours.setblocking(False)

    def close(self) -> None:
        self.closed = True
        self._ours.close()
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0


def _alone(end: socket.socket, address: str, port: int, timeout_s: float, ask: object) -> None:
    try:
        os.setpgid(0, 0)
        if callable(ask):
            ask()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch warns of every answer that does not come; we say it
        _serve(end, address, port, timeout_s)
    finally:
        sys.stdout = sys.stderr = None  # what waits in the buffers is the parent's
        os._exit(0)


def _serve(end: socket.socket, address: str, port: int, timeout_s: float) -> None:
    import torch.distributed as dist

    seen: set[str] = set()
    with end, contextlib.suppress(dist.DistError, RuntimeError, OSError):
        store = dist.TCPStore(
            address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        for line in end.makefile("rb"):
            ask = msgspec.json.decode(line, type=_Ask)
            number = store.add(ask.add, 1) if ask.add else 0
            if ask.put:
                store.multi_set(list(ask.put), list(ask.put.values()))  # type: ignore[attr-defined]  # not in its stub
            seen |= {key for key in ask.get if key not in seen and store.check([key])}  # `get` would wait for the rest
            known = [key for key in ask.get if key in seen]
            found = store.multi_get(known) if known else []
            values = {key: value.decode() for key, value in zip(known, found, strict=True)}
            end.sendall(msgspec.json.encode(_Answer(values, number)) + b"\n")
