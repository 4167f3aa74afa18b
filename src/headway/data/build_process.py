"""A process that builds micro-batches, for where a thread would take turns with the training's Python.

It is forked, as torch's own loader does: it shares the mapped shards and computes with numpy alone. It is told what to
build, pieces and shapes, and knows no order of documents. One that dies, or stands stopped by a signal, is an OSError
here; the reader is then made anew.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import psutil

from headway.data.batch import BadDocuments, Batch, BatchBuilder
from headway.data.global_batch import Micro

_FORK = multiprocessing.get_context("fork")
_LOOK_S = 2.0
"""How often a waiting child looks whether its parent is still there (others may hold the parent's end of the pipe), and
a waiting parent whether its child stands stopped."""


class _Stopped(OSError):
    pass


class BuildProcess:
    """Builds batches one request at a time. Not for use from several threads at once."""

    def __init__(self, builder: BatchBuilder) -> None:
        self._pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(
            target=_serve, args=(theirs, self._pipe, builder), name="headway-builder", daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def build(self, micro: Sequence[Micro], padding: Sequence[Micro]) -> list[Batch]:
        """The micro-batches, then padding ones of the others' shapes.

        Raises:
            BadDocuments: as the builder does.
            OSError: the process has ended or stands stopped; nothing more can be built by it.
        """
        try:
            self._pipe.send_bytes(pickle.dumps((list(micro), list(padding))))
            self._wait()
            kind, value = pickle.loads(self._pipe.recv_bytes())
        except _Stopped:
            raise
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if kind == "bad":
            raise BadDocuments(value)
        if kind == "failed":
            raise value
        return value

    def close(self) -> None:
        """Ends it, whatever it is at: a thread that waits for it gets its OSError. May be called again."""
        self._process.kill()
        self._process.join()

    def _wait(self) -> None:
        """Until there is an answer. A disk may take its time; a process that was stopped never comes back by itself."""
        stopped = 0
        while not self._pipe.poll(_LOOK_S):
            # Twice: Ctrl-Z stopped both, and of both this one may be the first to go on.
            stopped = stopped + 1 if self._stands_stopped() else 0
            if stopped == 2:
                raise _Stopped(f"the process that builds batches (pid {self.pid}) stands stopped by a signal")

    def _stands_stopped(self) -> bool:
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:  # gone: the pipe says so
            return False

    def _ended(self) -> OSError:
        self._process.join(_LOOK_S)
        code = self._process.exitcode
        how = (
            "has closed its pipe" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended ({code})"
        )
        return OSError(f"the process that builds batches {how}")


def _serve(pipe: Connection, parents_end: Connection, builder: BatchBuilder) -> None:
    """The child's whole life."""
    import torch

    parent = os.getppid()
    parents_end.close()  # else the parent's death would not end the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the parent's pool of threads was not forked
    with contextlib.suppress(EOFError, OSError):
        while True:
            while not pipe.poll(_LOOK_S):
                if os.getppid() != parent:
                    return
            micro, padding = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(_built(builder, micro, padding)))


def _built(builder: BatchBuilder, micro: list[Micro], padding: list[Micro]) -> tuple[str, Any]:
    try:
        return "built", [each.build(builder) for each in micro] + [each.padding(builder) for each in padding]
    except BadDocuments as bad:
        return "bad", bad.documents
    except MemoryError:
        return "failed", OSError(errno.ENOMEM, "no memory left in the process that builds batches")
    except OSError as error:
        return "failed", OSError(f"{type(error).__name__}: {error}")
    except Exception as error:
        # As the thread would raise it; what cannot be pickled is told in words.
        return "failed", error if _can_be_sent(error) else RuntimeError(f"{type(error).__name__}: {error}")


def _can_be_sent(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # pickling runs the exception's own code
        return False
