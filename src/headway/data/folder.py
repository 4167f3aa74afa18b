"""The output folder's life: one writer at a time, work aside, one rename at the end."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.account.errors import UserError
from headway.data.manifest import NAME
from headway.record.files import DISK_FULL

_PATIENCE = 3.0  # seconds; the workers of a killed prepare hold its lock until they notice
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def partial_folder(out: Path) -> Path:
    """Where shards are written until they are published."""
    return out.with_name(f".{out.name}.partial")


@contextmanager
def only_writer(out: Path) -> Iterator[None]:
    """Hold the lock of an output folder; the system lets go of it when the process dies, however it dies.

    Raises:
        UserError: another process holds it; or the folder above cannot be written.
    """
    path = out.with_name(f".{out.name}.lock")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path, out: Path) -> int:
    deadline = time.monotonic() + _PATIENCE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
            os.close(descriptor)
            if time.monotonic() > deadline:
                who = f" (process {holder})" if holder else ""
                raise UserError(
                    f"{out}: another `headway data prepare`{who} is writing it; wait for it, or choose another --out"
                ) from None
            time.sleep(0.1)
            continue
        # The last holder may have removed the file between our opening and our locking it.
        if _is_at(path, descriptor):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            return descriptor
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def check_target(out: Path) -> bool:
    """Whether a published folder is there already.

    Raises:
        UserError: something else is there, which must not be overwritten.
    """
    if not out.exists():
        return False
    if out.is_dir():
        if (out / NAME).exists():
            return True
        if not any(out.iterdir()):
            return False
    raise UserError(f"{out}: exists and is not a folder of shards; choose another --out, or remove it")


def recover(out: Path) -> None:
    """Tidy up after a process that died while it put a new folder in place of an old one."""
    old = _old(out)
    if old.exists():
        if out.exists():
            shutil.rmtree(old)
        else:
            old.rename(out)


def publish(partial: Path, out: Path) -> None:
    """Give the finished folder its name, in place of an older one if there is one: readers see the one or the other."""
    _sync_folder(partial)
    if not (out.exists() and any(out.iterdir())):
        partial.replace(out)
    elif _exchange(partial, out):
        shutil.rmtree(partial)
    else:  # no atomic exchange on this file system; `recover` mends a death between the two renames
        old = _old(out)
        out.rename(old)
        partial.rename(out)
        shutil.rmtree(old)
    _sync_folder(out.parent)


@contextmanager
def full_disk(out: Path, partial: Path) -> Iterator[None]:
    """Turn "no space left" into one line that says what is kept and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        free = shutil.disk_usage(out.parent).free
        raise UserError(
            f"{out}: the disk is full ({free >> 20} MiB free); nothing was published, finished shards are kept in "
            f"{partial}; make room and run the same command again"
        ) from None


def check_space(out: Path, partial: Path, source_bytes: int) -> None:
    """Refuse before hours of work what cannot fit: shards take at least an eighth of their source's bytes.

    Raises:
        UserError: less is free.
    """
    written = sum(f.stat().st_size for f in partial.rglob("*") if f.is_file()) if partial.exists() else 0
    needed, free = source_bytes // 8 - written, shutil.disk_usage(out.parent).free
    if needed > free:
        raise UserError(
            f"{out}: at least {needed >> 20} MiB are needed and {free >> 20} MiB are free; nothing was written; "
            "make room or choose another --out"
        )


def _old(out: Path) -> Path:
    return out.with_name(f".{out.name}.old")


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step (Linux's renameat2); False where that is not to be had."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
