"""Progress bars belong on terminals."""

from __future__ import annotations

import sys

from transformers.utils import logging as transformers_logging


def bars_on_terminals_only() -> None:
    """Silence transformers' progress bars where nobody watches them (they fill log files with carriage returns)."""
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
