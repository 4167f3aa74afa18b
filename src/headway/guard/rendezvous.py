"""Where ranks meet: a TCPStore outside of them, on a port that the kernel chose or that was asked for.

It stays open from then on: no moment exists in which another launch could take the port, and it outlives any rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

from headway.guard.processes import can_fork, die_with_parent


@contextlib.contextmanager
def store(address: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """The ranks' meeting point; yields its port. In a process of its own where this one forks ranks: its thread would
    forbid that."""
    if not can_fork() or "torch" not in sys.modules:
        import torch.distributed as dist  # seconds of import that a refused launch does not need

        inner = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
        try:
            yield inner.port
        finally:
            del inner
        return
    read, write = os.pipe()
    ask = die_with_parent()
    pid = os.fork()
    if not pid:
        _serve_store(address, port, write, ask)
    os.close(write)
    try:
        with os.fdopen(read) as stream:
            text = stream.read()
        if not text.isdigit():
            raise OSError(f"no store could be opened on {address}:{port}: {text}")
        yield int(text)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve_store(address: str, port: int, write: int, ask: Callable[[], None] | None) -> None:
    try:
        os.setpgid(0, 0)
        if ask is not None:
            ask()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # it ends with its parent, after the ranks
        import torch.distributed as dist

        inner = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
        os.write(write, str(inner.port).encode())
        os.close(write)
        while True:
            signal.pause()
    except BaseException as problem:
        with contextlib.suppress(OSError):
            os.write(write, str(problem).encode()[:400])
    finally:
        os._exit(1)
