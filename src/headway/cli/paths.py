"""Types of options that name files: one to read, and one to write that is known to be writable before the work begins.

A wrong value ends in one line that names the option.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from headway.account.errors import UserError


def in_path(value: str | Path) -> Path:
    """A path that names something; whether it is there is the reader's question."""
    if not str(value) or "\0" in str(value):
        raise typer.BadParameter("an empty name; give a file")
    return Path(value)


def out_path(value: str | Path) -> Path:
    """A file that can be written, folders for it included; said before minutes of work, not after.

    A device, a pipe or a socket is refused: files are put in place by renaming, which would replace it.
    """
    path = in_path(value)
    if problem := why_not_written(path, str(value)):
        raise typer.BadParameter(f"{value} {problem}")
    return path


def why_not_written(path: Path, said: str) -> str:
    """Why no file can be put there, in words that follow its name; empty where one can."""
    try:
        return _problem(path, said)
    except OSError as error:  # a name too long, a loop of links, a folder that may not be looked into
        return f"cannot be written: {(error.strerror or str(error)).lower()}"


def _problem(path: Path, said: str) -> str:
    if path.is_dir() or said.endswith(os.sep):
        return "is a folder; give a file in it"
    if path.exists() and not path.is_file():
        return "is no regular file and would be replaced by one; give another name"
    above = next((one for one in path.absolute().parents if one.exists()), Path("/"))
    if not above.is_dir():
        return f"cannot be written: {above} is no folder"
    if above == Path(above.anchor) and path.absolute().parent != above:
        return f"cannot be written: {path.absolute().parent} does not exist; make it first"
    if not os.access(path if path.exists() else above, os.W_OK):
        why = "read-only file system" if os.statvfs(above).f_flag & os.ST_RDONLY else "permission denied"
        return f"cannot be written: {why}"
    return ""


def why_no_room(path: Path, size: int) -> str:
    """Why no `size` bytes can be written beside it (a full disk, a quota), found by doing so; empty where they can."""
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent, buffering=0) as file:
            written = file.write(b"#" * size)
            os.fsync(file.fileno())
    except OSError as error:
        return f"cannot be written: {(error.strerror or str(error)).lower()}"
    return "" if written == size else "cannot be written: no space left on device"


def is_no_input(
    option: str, out: Path | None, inputs: Iterable[Path | None], ours: Callable[[Path], bool] = lambda _: False
) -> None:
    """Raises UserError where the file to be written is one that is read, or lies among the files of a folder that is.

    A page may lie there, and `ours`: what the same command wrote before.
    """
    if out is None:
        return
    target = out.resolve()
    for path in inputs:
        if path is None:
            continue
        source = path.resolve()
        within = source.is_dir() and source in target.parents and target.exists() and target.suffix != ".html"
        if target == source or (within and not ours(target)):
            raise UserError(f"{option} {out}: is one of the files to read, and would be replaced; give another name")


in_path.__name__ = out_path.__name__ = "file"
