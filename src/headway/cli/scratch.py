"""A command's scratch folder: gone when the command ends, by a signal too; what a SIGKILL left goes with the next."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OWNER = ".owner"
"""A file in every scratch folder, locked as long as the process that made the folder, or a child of it, lives."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_PREFIX = "headway-scratch-"


@contextmanager
def scratch_folder(command: str) -> Iterator[Path]:
    """A new folder for the command's own files, under the system's temporary folder.

    SIGTERM and SIGHUP (a closed terminal) leave by the way of Ctrl-C meanwhile, past what removes it: exit code 128
    plus the signal's number.
    """
    with _signals_raise():
        _sweep(Path(tempfile.gettempdir()))
        with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{command}-", ignore_cleanup_errors=True) as made:
            folder = Path(made)
            lock = os.open(folder / f"{_OWNER}.new", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                os.rename(folder / f"{_OWNER}.new", folder / _OWNER)  # never there without its lock
                yield folder
            finally:
                os.close(lock)


def _sweep(base: Path) -> None:
    """Removes this user's scratch folders whose process is gone; those of others and of the living stay."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # no lock file (yet), another's, or gone meanwhile
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


@contextmanager
def _signals_raise() -> Iterator[None]:
    owner = os.getpid()

    def leave(number: int, frame: object) -> None:
        if os.getpid() == owner:
            raise SystemExit(128 + number)
        signal.signal(number, signal.SIG_DFL)  # a forked child: the folder is not its own
        os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():  # only there can handlers be installed
        yield
        return
    former = {number: signal.signal(number, leave) for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
