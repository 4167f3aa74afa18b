"""What a relative path in the run file is relative to."""

from __future__ import annotations

import os
import re
from pathlib import Path

from headway.account.errors import UserError
from headway.config.base import PathKind

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve(text: str, base: Path, kind: PathKind) -> str:
    """An absolute path for `text` seen from the folder `base`; URLs, hub names and the words of `kind` stay.

    A `model` that could be a hub name is a folder when `base` has such a folder.
    """
    if not text or "://" in text or (kind == "checkpoint" and text in {"auto", "never"}):
        return text
    path = os.path.normpath(os.path.join(base, os.path.expanduser(text)))
    if kind == "model" and _HUB_NAME.fullmatch(text) and not os.path.exists(path):
        return text
    return path


def refuse_missing(path: str | os.PathLike[str], key: str) -> None:
    """A hub name looks like `owner/name`; whatever looks more like a path must exist, before a hub is asked for it.

    Raises:
        UserError: there is nothing at what can only be a path; names `key`.
    """
    text = os.fspath(path)
    local = os.path.expanduser(text)
    owner, _, name = text.partition("/")
    # With a folder of the owner's name here, a mistyped path is more likely than a hub name.
    looks_local = text.startswith((".", "/", "~")) or text.count("/") != 1 or not name or os.path.isdir(owner)
    if looks_local and not os.path.exists(local):
        raise UserError(f"{key} {text}: no such folder (a hub name has the form owner/name)")
