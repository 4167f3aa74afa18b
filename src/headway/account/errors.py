"""The two errors a user may see as one line; everything else is a bug and keeps its traceback."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The message is one line that names the file, line or key and says what to do."""


class Refused(UserError):
    """Headway could go on, but the result would not mean what the user thinks (e.g. a resume with other data)."""
