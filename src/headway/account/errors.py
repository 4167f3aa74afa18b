"""The errors a user may see as one line; everything else is a bug and keeps its traceback."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The message is one line that names the file, line or key and says what to do.

    exit_code: of the command that it ends.
    """

    exit_code = 2


class Refused(UserError):
    """Headway could go on, but the result would not mean what the user thinks (e.g. a resume with other data)."""


class Stopped(UserError):
    """Bad news: nothing that was given is wrong by itself, but the run cannot go on, or could not save its state.

    told: the ledger has a line of it already.
    """

    exit_code = 1

    def __init__(self, message: str, *, told: bool = False) -> None:
        super().__init__(message)
        self.told = told
