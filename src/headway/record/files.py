"""Whole files of the run folder: written beside, synced, then renamed, so that a reader never sees half of one."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import orjson

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors that a full disk, or a quota that is used up, gives."""


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replaces `path` in one step; a crash leaves the old content or the new one.

    Raises:
        OSError: it cannot be written, or is a device, a pipe or a socket, which a file would replace.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        # A write's error names no file; without one nobody knows which disk is full.
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, value: Any) -> None:
    write_atomic(
        path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    )


def read_json(path: Path) -> Any:
    return orjson.loads(path.read_bytes())
