"""Who turns stretches of JSON into pieces: this process, or a few forked ones beside it, with the same result."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headway.diagnose.piece import Piece, piece_of
from headway.diagnose.records import UNDECODABLE, decode_list
from headway.diagnose.source import is_gzip

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

SPACE = b" \t\r\n"
_BETWEEN = SPACE + b","
_LOOK = 64  # bytes at the ends of a stretch that are looked at a time
_SLOT = 2 << 20  # bytes of a stretch that a process is handed; longer ones are decoded here
_PIPE = 1 << 20  # so that a process need not wait with its piece until it is wanted
_MOST_WORKERS = 6  # one process cuts for about so many
_WORTH_PLAIN, _WORTH_GZIP = 48 << 20, 4 << 20  # bytes of a file for which processes are worth their start


Stretch = tuple[bytes | memoryview, ...]
"""JSON text in parts that follow each other."""


def sound_piece(stretch: Stretch) -> Piece | None:
    """The events of a stretch, None where any of it is no JSON."""
    return _piece_of_list(b"".join((b"[", *_trimmed(stretch), b"]")))


def _piece_of_list(text: bytes | memoryview) -> Piece | None:
    try:
        records = decode_list(text)
    except UNDECODABLE:
        return None
    return piece_of(records, text)


def _trimmed(stretch: Stretch) -> list[memoryview]:
    """The parts without the spaces and commas at both ends; nothing is copied."""
    parts = [memoryview(part) for part in stretch]
    while parts:
        head = bytes(parts[0][:_LOOK])
        parts[0] = parts[0][len(head) - len(head.lstrip(_BETWEEN)) :]
        if head.strip(_BETWEEN):
            break
        if not parts[0]:
            del parts[0]
    while parts:
        tail = bytes(parts[-1][-_LOOK:])
        parts[-1] = parts[-1][: len(parts[-1]) - len(tail) + len(tail.rstrip(_BETWEEN))]
        if tail.strip(_BETWEEN):
            break
        if not parts[-1]:
            del parts[-1]
    return parts


class Decoder(Protocol):
    """Takes up to `depth` stretches ahead. `result` is asked for once for each ticket, in the order of `submit`."""

    depth: int

    def submit(self, stretch: Stretch) -> Any: ...

    def result(self, ticket: Any) -> Piece | None: ...


class Here:
    """Decodes in this process, when asked."""

    depth = 1

    def submit(self, stretch: Stretch) -> Stretch:
        return stretch

    def result(self, ticket: Stretch) -> Piece | None:
        return sound_piece(ticket)


class Pool:
    """Forked processes that take stretches in turn from memory shared with them.

    A process that dies (out of memory) costs time, never an event: its stretches are decoded here.
    """

    def __init__(self, workers: int, slot: int = _SLOT) -> None:
        import fcntl
        import multiprocessing

        self.depth = 2 * workers + 1
        self._slot = slot
        self._shared = mmap.mmap(-1, self.depth * slot)
        self._ends: list[tuple[Connection, Connection]] = []  # (to a worker, from it)
        self._processes: list[BaseProcess] = []
        self._given = 0
        fork = multiprocessing.get_context("fork")
        for _ in range(workers):
            their_in, my_out = fork.Pipe(duplex=False)
            my_in, their_out = fork.Pipe(duplex=False)
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(their_out.fileno(), fcntl.F_SETPIPE_SZ, _PIPE)
            self._ends.append((my_out, my_in))
            mine = [end for pair in self._ends for end in pair]
            process = fork.Process(target=_work, args=(their_in, their_out, mine, self._shared), daemon=True)
            process.start()
            their_in.close()
            their_out.close()
            self._processes.append(process)

    def submit(self, stretch: Stretch) -> tuple[int, Stretch]:
        """A ticket: the worker (-1 for none) and the text."""
        worker, slot = self._given % len(self._ends), self._given % self.depth
        self._given += 1
        parts: list[bytes | memoryview] = [b"[", *_trimmed(stretch), b"]"]
        length = sum(map(len, parts))
        if length > self._slot:
            return -1, stretch
        at = slot * self._slot
        for part in parts:
            self._shared[at : at + len(part)] = part
            at += len(part)
        try:
            self._ends[worker][0].send((slot * self._slot, length))
        except OSError:
            return -1, stretch
        return worker, stretch

    def result(self, ticket: tuple[int, Stretch]) -> Piece | None:
        worker, stretch = ticket
        if worker >= 0:
            with contextlib.suppress(EOFError, OSError):
                piece: Piece | None = self._ends[worker][1].recv()
                return piece
        return sound_piece(stretch)

    def close(self) -> None:
        for ends in self._ends:
            for end in ends:
                end.close()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._shared.close()


def _work(requests: Connection, results: Connection, others: list[Connection], shared: mmap.mmap) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's end closes the pipes
    for end in others:
        end.close()
    with contextlib.suppress(EOFError, OSError), memoryview(shared) as view:
        while True:
            at, length = requests.recv()
            with view[at : at + length] as text:
                piece = _piece_of_list(text)
            results.send(piece)


@contextlib.contextmanager
def decoder_for(path: Path, workers: int | None = None) -> Iterator[Decoder]:
    """Processes where the file is large enough to be worth them, this process else. `workers`: so many, whatever the
    file; 0 for none."""
    count = worth(path) if workers is None else workers
    if not count:
        yield Here()
        return
    pool = Pool(count)
    try:
        yield pool
    finally:
        pool.close()


def worth(path: Path) -> int:
    """How many processes a file is worth. Forking is safe where this process has one thread and may have children."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return 0
    cores = len(os.sched_getaffinity(0))
    try:
        worthwhile = path.stat().st_size >= (_WORTH_GZIP if is_gzip(path) else _WORTH_PLAIN)
    except OSError:  # the reader says what is wrong with it
        return 0
    if not worthwhile or cores < 2:
        return 0
    import multiprocessing

    return 0 if multiprocessing.current_process().daemon else min(cores, _MOST_WORKERS)
