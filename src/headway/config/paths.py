"""What a relative path in the run file is relative to."""

from __future__ import annotations

import os
import re
from pathlib import Path

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
