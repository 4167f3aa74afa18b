"""Files past the page cache: half the processor time of a copy, and what is read back has been on the disk.

A file system that knows no O_DIRECT gets the ordinary way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from headway.guard.hashing import XXH3, FileEntry, Hasher, finished

_ALIGN = 4096
_CHUNK = 8 << 20
_READ = 2 << 20
_LEAST = 1 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)


def copy(source: int, target: Path, progress: Callable[[int, int], None]) -> None:
    """Copies an open file to a new one and waits until the disk has it. `progress`: told of bytes done and size.

    Written from the source's own pages: a file in shared memory is copied nowhere on its way. Raises OSError,
    FileExistsError too; EIO when the source became shorter.
    """
    size = os.fstat(source).st_size
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        direct = size >= _LEAST and _set_direct(descriptor, True)
        done = 0
        while done < size:
            progress(done, size)
            start = done - done % mmap.ALLOCATIONGRANULARITY  # after a short write
            end = min(start + _CHUNK, size)
            if direct and end % _ALIGN:  # the end of the file
                direct = not _set_direct(descriptor, False)
            with _mapped(source, start, end, target.name) as piece, piece[done - start :] as rest:
                try:
                    done += os.pwrite(descriptor, rest, done)
                except OSError as problem:
                    if problem.errno == errno.EFAULT:
                        raise _shorter(target.name) from problem
                    if not direct or problem.errno != errno.EINVAL:
                        raise
                    direct = not _set_direct(descriptor, False)  # other blocks than we thought
            if direct and done % _ALIGN:  # a short write
                direct = not _set_direct(descriptor, False)
        os.fsync(descriptor)
        # What is read back should come from the disk, and the training needs the memory.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def hash_file(path: Path, kind: str = XXH3) -> FileEntry:
    """Size and hash of a file as the disk has it, with its marks. Raises OSError."""
    return finished(hash_by_steps(path, kind))


def hash_by_steps(path: Path, kind: str = XXH3) -> Generator[None, None, FileEntry]:
    """The same with a pause after every piece, for whoever has to leave off; returns the entry."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        direct = size >= _LEAST and _set_direct(descriptor, True)
        hasher, buffer, done = Hasher(size, kind), _aligned(_READ), 0
        while done < size:
            try:
                read = os.preadv(descriptor, [buffer], done)
            except OSError as problem:
                if not direct or problem.errno != errno.EINVAL:
                    raise
                direct = not _set_direct(descriptor, False)
                continue
            if not read:
                break
            hasher.update(buffer[:read])
            done += read
            yield
        return hasher.entry()
    finally:
        os.close(descriptor)


def _aligned(size: int) -> memoryview:
    """Memory for O_DIRECT, of one large page where the kernel has some: the disk's requests are fewer then."""
    buffer = mmap.mmap(-1, size)
    with contextlib.suppress(OSError, AttributeError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(buffer)


@contextlib.contextmanager
def _mapped(source: int, start: int, end: int, name: str) -> Iterator[memoryview]:
    """Bytes `start` … `end - 1` of a file as they lie in its pages, for the kernel to read: here it would be killed
    (SIGBUS) where the file became shorter."""
    try:
        mapping = mmap.mmap(source, end - start, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
    except ValueError as problem:
        raise _shorter(name) from problem
    with mapping, memoryview(mapping) as view:
        yield view


def _shorter(name: str) -> OSError:
    return OSError(errno.EIO, f"the staged copy of {name} became shorter")


def _set_direct(descriptor: int, on: bool) -> bool:
    """Whether it is as asked; False where the file system knows no O_DIRECT."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
        return not on or _DIRECT != 0
    return False
