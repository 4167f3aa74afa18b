"""Which code trains: a resume under another version computes other numbers, and must say so."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

import headway

_ROOMS = ("data", "model", "parallel", "train")
SOURCE = "source"


@cache
def code_identity() -> dict[str, str]:
    """Releases of what computes a step, and a digest of Headway's own modules that do.

    Read once a process: ranks that are forked again after a death run the code that their launcher has loaded, whatever
    has been edited on the disk since.
    """
    versions = {name: _release(name) for name in ("torch", "transformers")}
    return {"headway": headway.__version__, **versions, SOURCE: _source_digest(Path(headway.__file__).parent)}


def _release(package: str) -> str:
    """Without the local part: "2.13.0+cu128" and "2.13.0+cpu" are one release."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def _source_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(file for room in _ROOMS for file in (folder / room).rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]
