"""Where the `headway` command begins: nothing is imported yet, so that Ctrl-C during the imports ends it quietly."""

from __future__ import annotations

import signal
import sys

from headway.cli.starting import answer_sigterm


def main() -> None:
    """Imports the command line with the system's own Ctrl-C, then hands over."""
    ours = signal.getsignal(signal.SIGINT)
    # Python's handler would raise inside whatever is being imported, and print a traceback of that.
    if ours is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    answer_sigterm(sys.argv[1:])
    from headway.cli.main import main as run

    signal.signal(signal.SIGINT, ours)
    run()
